"""All samples of many shards as columns: what planning and reading need of a million, in a hundred bytes each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from qie.errors import ShardError
from qie.recipe import Recipe
from qie.shards.hashes import NONE, SHA256_BYTES, XXH3_BYTES
from qie.shards.index import Entry, Member, ShardIndex, is_digest, member_name
from qie.shards.tensors import Sizes, bytes_by_name, is_text_alone
from qie.types import Shape

T = TypeVar("T")

CHUNK = 2**20
"""Samples that are looked at together, where one value for each would be too many."""


@dataclass(frozen=True, eq=False)
class Columns:
    """What a plan knows of N samples: one value each, in the stream's positions.

    Attributes:
        shapes: [N] number of the sample's shape in `shape_names`. The numbering decides nothing.
        shape_names: the shapes.
        rows: [N] number of the sample's row in its shard; its variants have the same and stand together.
        lengths: [N] prompt tokens.
        sources: [N] number of the row's source in `source_names`. The numbering decides nothing.
        ends: [shards] where each shard's samples end.
        source_names: the sources.
        null_prompts: whether every sample has a null prompt, which takes the place of a dropped caption.
        single: no row has several variants; then `rows` need not be read.
        latent_scale: image pixels per latent pixel, for messages.
    """

    shapes: NDArray[np.int32]
    shape_names: tuple[Shape, ...]
    rows: NDArray[np.int64]
    lengths: NDArray[np.int32]
    sources: NDArray[np.int32]
    ends: NDArray[np.int64]
    source_names: tuple[str, ...] = ("",)
    null_prompts: bool = True
    single: bool = False
    latent_scale: int = 8

    def __len__(self) -> int:
        return len(self.shapes)

    @property
    def counts(self) -> NDArray[np.int64]:
        """[shapes] how many samples each of `shape_names` has, looked at in parts."""
        counts = np.zeros(len(self.shape_names), np.int64)
        for start in range(0, len(self), CHUNK):
            counts += np.bincount(self.shapes[start : start + CHUNK], minlength=len(counts))
        return counts

    def of_sources(
        self, names: Collection[str], positions: Sequence[int] | NDArray[np.int64] | None = None
    ) -> NDArray[np.bool_]:
        """Whether samples, all or those at some positions, are of one of the named sources."""
        numbers = [number for number, name in enumerate(self.source_names) if name in names]
        return np.isin(self.sources if positions is None else self.sources[np.asarray(positions)], numbers)

    @property
    def blocks(self) -> NDArray[np.int32]:
        """[N] number of the shard that holds the sample."""
        return numbers_of(self.ends)

    @property
    def numbers(self) -> NDArray[np.int32]:
        """[N] number of the sample's row among all rows, which two rows of different shards never share."""
        if self.single:
            return np.arange(len(self), dtype=np.int32)
        new = np.ones(len(self), np.bool_)
        new[1:] = np.diff(self.rows) != 0
        new[self.ends[self.ends < len(self)]] = True
        return np.cumsum(new, dtype=np.int32) - np.int32(1)

    def since(self, position: int) -> Columns:
        """Those of the samples from a position on, where a shard begins."""
        names = ("shapes", "rows", "lengths", "sources")
        ends = _since(self.ends, position)
        return replace(self, ends=ends, **{name: getattr(self, name)[position:] for name in names})


@dataclass(frozen=True, eq=False)
class Table:
    """One value per sample in each column; samples in the order of shards, rows and variants.

    Attributes:
        keys: [N, 32] content keys.
        hashes: [N, 32] SHA-256 of the records.
        xxh3_128: [N, 16] their XXH3-128; zeros where an index has none.
        rows: [N] number of the row in its source.
        variants: [N] which variant of the row.
        offsets, sizes: [N] where the record lies in its tar, in bytes.
        shapes: [N] number in `shape_names`.
        tokens, empty_tokens: [N] lengths of the prompt's and of the null prompt's embedding; 0 without a null prompt.
        prefixes: [N] leading tokens that both embeddings share.
        widths: [N] of a token's embedding.
        masked: [N] whether there is a loss mask.
        paired: [N] whether there is a rejected target.
        sources: [N] number in `source_names`.
        ends: [shards] where each shard's samples end.
        shape_names, source_names: each once.
    """

    keys: NDArray[np.uint8]
    hashes: NDArray[np.uint8]
    xxh3_128: NDArray[np.uint8]
    rows: NDArray[np.int64]
    variants: NDArray[np.int32]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    shapes: NDArray[np.int32]
    tokens: NDArray[np.int32]
    empty_tokens: NDArray[np.int32]
    prefixes: NDArray[np.int32]
    widths: NDArray[np.int32]
    masked: NDArray[np.bool_]
    paired: NDArray[np.bool_]
    sources: NDArray[np.int32]
    ends: NDArray[np.int64]
    shape_names: tuple[Shape, ...]
    source_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def columns(self) -> Columns:
        """What a plan needs."""
        return Columns(
            self.shapes,
            self.shape_names,
            self.rows,
            self.tokens,
            self.sources,
            self.ends,
            self.source_names or ("",),
            null_prompts=bool(self.empty_tokens.all()),
            single=not self.variants.any(),
        )

    def shard_of(self, position: int) -> int:
        """Number of the shard that holds a sample."""
        return int(np.searchsorted(self.ends, position, "right"))

    def since(self, position: int) -> Table:
        """The samples from a position on, and their shards."""
        columns = {name: getattr(self, name)[position:] for name in COLUMNS}
        return replace(self, ends=_since(self.ends, position), **columns)

    def of_shards(self, numbers: Sequence[int]) -> Table:
        """The samples of some shards, in that order."""
        stops = self.ends[list(numbers)]
        starts = np.append(0, self.ends)[list(numbers)]
        kept = np.concatenate([np.arange(start, stop) for start, stop in zip(starts, stops, strict=True)])
        columns = {name: getattr(self, name)[kept] for name in COLUMNS}
        return replace(self, ends=np.cumsum(stops - starts), **columns)

    def differences(self, other: Table) -> list[str]:
        """The columns in which two tables differ, whatever their numbering of shapes and sources."""
        found = [
            name
            for name in COLUMNS
            if name not in ("shapes", "sources") and not np.array_equal(getattr(self, name), getattr(other, name))
        ]
        if not np.array_equal(self.ends, other.ends):
            found.append("ends")
        if [self.shape_names[number] for number in self.shapes] != [other.shape_names[one] for one in other.shapes]:
            found.append("shapes")
        if [self.source_names[number] for number in self.sources] != [other.source_names[one] for one in other.sources]:
            found.append("sources")
        return found

    def key(self, position: int) -> str:
        return bytes(self.keys[position]).hex()

    def shape(self, position: int) -> Shape:
        return self.shape_names[int(self.shapes[position])]

    def sizes_of(self, position: int, recipe: Recipe) -> Sizes:
        """What decides the size of each tensor of a sample."""
        shape = self.shape(position)
        return Sizes(
            height=shape.target[0],
            width=shape.target[1],
            control_pixels=sum(h * w for h, w in shape.controls),
            tokens=int(self.tokens[position]),
            empty_tokens=int(self.empty_tokens[position]),
            prefix=int(self.prefixes[position]),
            token_width=int(self.widths[position]),
            masked=bool(self.masked[position]),
            thumbnail=recipe.thumbnail_size(shape) or (0, 0),
            paired=bool(self.paired[position]),
            text_alone=is_text_alone(recipe),
        )

    @classmethod
    def of(cls, index: ShardIndex, where: object) -> Table:
        """The samples of one shard.

        Raises:
            ShardError: the sizes that the index gives for a record do not fit each other.
        """
        shapes, shape_names = numbered([entry.shape for entry in index.samples])
        sources, source_names = numbered([entry.source for entry in index.samples])
        members = [index.files[member_name(entry.key)] for entry in index.samples]
        sizes = [
            _sizes(entry, member, index.recipe, where) for entry, member in zip(index.samples, members, strict=True)
        ]
        return cls(
            keys=_digests([entry.key for entry in index.samples], where),
            hashes=_digests([member.sha256 for member in members], where),
            xxh3_128=_digests([_xxh3_128(member) for member in members], where, XXH3_BYTES),
            rows=np.array([entry.row for entry in index.samples], np.int64),
            variants=np.array([entry.variant for entry in index.samples], np.int32),
            offsets=np.array([member.offset for member in members], np.int64),
            sizes=np.array([member.size for member in members], np.int64),
            shapes=shapes,
            tokens=np.array([one.tokens for one in sizes], np.int32),
            empty_tokens=np.array([one.empty_tokens for one in sizes], np.int32),
            prefixes=np.array([one.prefix for one in sizes], np.int32),
            widths=np.array([one.token_width for one in sizes], np.int32),
            masked=np.array([one.masked for one in sizes], np.bool_),
            paired=np.array([one.paired for one in sizes], np.bool_),
            sources=sources,
            ends=np.array([len(members)], np.int64),
            shape_names=shape_names,
            source_names=source_names,
        )

    @classmethod
    def joined(cls, tables: Sequence[Table]) -> Table:
        """Several shards, or sets of shards, one after the other."""
        if len(tables) == 1:
            return tables[0]
        shape_names = tuple(sorted({shape for table in tables for shape in table.shape_names}))
        source_names = tuple(dict.fromkeys(name for table in tables for name in table.source_names))
        columns = {name: np.concatenate([getattr(table, name) for table in tables]) for name in COLUMNS}
        starts = np.cumsum([0, *map(len, tables)])
        ends = np.concatenate([table.ends + start for table, start in zip(tables, starts, strict=False)])
        columns["shapes"] = np.concatenate([_numbers(table.shape_names, shape_names)[table.shapes] for table in tables])
        columns["sources"] = np.concatenate(
            [_numbers(table.source_names, source_names)[table.sources] for table in tables]
        )
        return cls(**columns, ends=ends, shape_names=shape_names, source_names=source_names)


class Growing:
    """Arrays of one length, in buffers that double: appending costs what is appended. What was given out stays."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._buffers = dict(arrays)
        self._length = len(next(iter(arrays.values())))

    def append(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """All of each, these last."""
        start, stop = self._length, self._length + len(next(iter(arrays.values())))
        for name, values in arrays.items():
            buffer = self._buffers[name]
            if len(buffer) < stop or buffer.dtype != values.dtype:
                self._buffers[name] = np.empty((2 * stop, *buffer.shape[1:]), values.dtype)
                self._buffers[name][:start] = buffer[:start]
            self._buffers[name][start:stop] = values
        self._length = stop
        return {name: buffer[:stop] for name, buffer in self._buffers.items()}

    def replace(self, name: str, array: NDArray[Any]) -> None:
        """Give an array other values; who holds the old ones keeps them."""
        self._buffers[name] = array


class GrowingTable:
    """A table that others are appended to: afterwards it equals `Table.joined` of them all."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._columns = Growing({name: getattr(table, name) for name in COLUMNS})
        self._ends = Growing({"ends": table.ends})

    def append(self, tables: Sequence[Table]) -> None:
        """Add the samples of further shards, at least one, behind those that are there."""
        # Joined with the last sample that is there, they are numbered as they will be.
        before = len(self.table)
        joined = Table.joined([self.table.since(before - 1), *tables])
        if joined.shape_names != self.table.shape_names:
            numbers = _numbers(self.table.shape_names, joined.shape_names)
            self._columns.replace("shapes", numbers[self.table.shapes])
        columns: dict[str, Any] = self._columns.append({name: getattr(joined, name)[1:] for name in COLUMNS})
        new = sum(len(table.ends) for table in tables)
        ends = self._ends.append({"ends": joined.ends[len(joined.ends) - new :] + (before - 1)})["ends"]
        self.table = replace(joined, ends=ends, **columns)


COLUMNS: dict[str, np.dtype] = {
    name: np.dtype(get_args(get_args(hint)[1])[0])
    for name, hint in get_type_hints(Table).items()
    if not name.endswith("_names") and name != "ends"
}
"""The columns of samples and their types."""


def numbers_of(ends: NDArray[np.int64]) -> NDArray[np.int32]:
    """[N] for each sample the number of its shard, of which [shards] `ends` are known."""
    return np.repeat(np.arange(len(ends), dtype=np.int32), np.diff(ends, prepend=0))


def ends_of(numbers: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Where stretches of equal numbers end."""
    return np.flatnonzero(np.append(numbers[1:] != numbers[:-1], True)[: len(numbers)]) + 1


def _since(ends: NDArray[np.int64], position: int) -> NDArray[np.int64]:
    return ends[np.searchsorted(ends, position, "right") :] - position


def _sizes(entry: Entry, member: Member, recipe: Recipe, where: object) -> Sizes:
    """The sizes of an entry. Raises ShardError unless they give what `tensor_bytes` says, and the record holds that."""
    found, (height, width) = entry.tensor_bytes, entry.shape.target
    token_width = found.get("prompt_embed", 0) // max(2 * entry.tokens, 1)
    sizes = Sizes(
        height=height,
        width=width,
        control_pixels=sum(h * w for h, w in entry.shape.controls),
        tokens=entry.tokens,
        empty_tokens=entry.empty_tokens,
        prefix=entry.empty_tokens - found.get("empty_prompt_embed", 0) // max(2 * token_width, 1),
        token_width=token_width,
        masked="loss_mask" in found,
        thumbnail=recipe.thumbnail_size(entry.shape) or (0, 0),
        paired="rejected_latent" in found,
        text_alone=is_text_alone(recipe),
    )
    fitting = token_width > 0 and 0 <= sizes.prefix <= entry.tokens < 2**31 and bytes_by_name(sizes) == found
    if not fitting or member.size < sum(found.values()) + 8:
        raise ShardError(
            "the index gives sizes that do not fit each other",
            where=f"{where}, {entry.key}",
            found=found,
            hint="delete the shard and its index and run qie-precompute again",
        )
    return sizes


def _digests(digests: Sequence[str], where: object, size: int = SHA256_BYTES) -> NDArray[np.uint8]:
    odd = [digest for digest in digests if not is_digest(digest, size)]
    if odd:
        raise ShardError("the index has a malformed hash", where=where, found=repr(odd[0][:80]))
    return np.frombuffer(bytes.fromhex("".join(digests)), np.uint8).reshape(-1, size)


def _xxh3_128(member: Member) -> str:
    return NONE.hex() if member.xxh3_128 is None else member.xxh3_128


def numbered(values: Sequence[T]) -> tuple[NDArray[np.int32], tuple[T, ...]]:
    """A number for each value, equal for equal ones, and the values by number."""
    names = tuple(dict.fromkeys(values))
    return _numbers(values, names), names


def _numbers(values: Iterable[object], names: Iterable[object]) -> NDArray[np.int32]:
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([numbers[value] for value in values], np.int32)
