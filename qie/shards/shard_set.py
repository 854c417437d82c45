"""Many shards of one recipe as one sequence of samples, ready to be planned and read a million at a time.

A folder's shards are opened by its compacted index where that is right, else by the index of each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from qie.errors import ShardError
from qie.recipe import Recipe
from qie.shards.cache import ShardCache
from qie.shards.compact_index import COMPACT_NAME, Compact, CompactShard, ManifestFolder, read_compact
from qie.shards.discovery import find_indexes, indexes_in
from qie.shards.index import Entry, Skipped
from qie.shards.reader import Shard, Tar, checked_sample
from qie.shards.sample_table import Columns, GrowingTable, Table
from qie.stores import File, Folder, StoreError
from qie.types import Facts, Sample

T = TypeVar("T")

Verify = Literal["off", "first", "always"]


@dataclass(frozen=True, eq=False)
class OpenShards:
    """Shards of one recipe, and the rows [start, stop) of each. `table` numbers them as they stand in `tars`."""

    recipe: Recipe
    tars: tuple[Tar, ...]
    rows: tuple[tuple[int, int], ...]
    table: Table
    skipped: tuple[Skipped, ...]


Blame = Callable[[File, ShardError], object]
"""Told of an index that cannot be used, and why."""


class ShardSet:
    """Samples by position, in the order of shards and rows.

    Attributes:
        recipe: of all shards.
        table: what their indexes say of the samples.
        skipped: rows that are not among them.
        verify: when a record's hash is checked: never, when it is first read, or always. Its header is checked in any
            case.

    Raises:
        RecipeMismatchError: the shards are of several recipes; says which and how they differ.
        ShardError: two shards claim the same row, or there is no sample at all.
    """

    def __init__(self, parts: Iterable[OpenShards], verify: Verify = "first") -> None:
        parts = list(parts)
        require_disjoint((tar.file, rows) for part in parts for tar, rows in zip(part.tars, part.rows, strict=True))
        filled = [part for part in parts if len(part.table)]
        if not filled:
            raise ShardError("the shards hold no samples", hint="see their skipped rows with qie-stats")
        self.recipe: Recipe = filled[0].recipe
        self.table = filled[0].table
        self.verify: Verify = verify
        self.skipped: list[Skipped] = []
        self._tars: list[Tar] = []
        self._seen = bytearray()
        self._growing: GrowingTable | None = None
        self.append(parts)

    def append(self, parts: Iterable[OpenShards]) -> None:
        """Take in further shards, of rows behind all others in their folder: costs what these hold, not what is there.

        Other threads may read meanwhile. What was checked is not checked again.
        """
        parts = list(parts)
        filled = [part for part in parts if len(part.table)]
        tars = [part.tars[number] for part in filled for number in range(int(part.table.shards[-1]) + 1)]
        for part in filled:
            first = (self._tars or tars)[0].file
            self.recipe.require_equal(part.recipe, part.tars[0].file, f"train on one recipe at a time; {first} differs")
        self.skipped += [gone for part in parts for gone in part.skipped]
        self._tars += tars
        tables = [part.table for part in filled]
        self._seen += bytes(sum(map(len, tables)))
        if self._growing is None:
            self._growing = GrowingTable(Table.joined(tables))
        elif tables:
            self._growing.append(tables)
        self.table = self._growing.table
        for known in ("keys", "entries", "distant"):  # computed when they are first asked for
            self.__dict__.pop(known, None)

    @classmethod
    def open(
        cls, places: str | Path | Iterable[str | Path], *, verify: Verify = "first", cache: ShardCache | None = None
    ) -> ShardSet:
        """The shards in one or several folders, globs or brace patterns.

        Args:
            places: paths or URLs.
            verify: see `ShardSet`.
            cache: where remote shards are kept on the local disk; without one, each sample is a request.
        """
        return cls(open_shards(find_indexes(places), cache), verify)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def columns(self) -> Columns:
        return replace(self.table.columns, latent_scale=self.recipe.latent_scale)

    @property
    def digests(self) -> NDArray[np.uint8]:
        """[N, 32]: the keys."""
        return self.table.keys

    @property
    def masked(self) -> bool:
        """Whether a sample has a loss mask."""
        return bool(self.table.masked.any())

    @cached_property
    def distant(self) -> bool:
        """Whether samples are requests to a store, which wait more than they work."""
        return any(tar.distant for tar in self._tars)

    @cached_property
    def keys(self) -> list[str]:
        return [self.table.key(position) for position in range(len(self))]

    def facts(self, position: int) -> Facts:
        """What its index says of a sample."""
        shape = self.table.shape(position)
        masked = bool(self.table.masked[position])
        return Facts(self.table.key(position), shape, int(self.table.tokens[position]), masked)

    @cached_property
    def entries(self) -> list[Entry]:
        """What the indexes say, whole: read again, and large."""
        shards = [Shard(tar.file.with_suffix(".json")) for tar in self._tars]
        return [entry for shard in shards for entry in shard.index.samples]

    def load(self, position: int) -> Sample:
        """The sample at a position, 0 to len - 1, its record checked by `verify`, its header and sizes in any case.

        Raises:
            ShardError: the record is damaged or another sample's; names shard, key and offset.
            StoreError: it cannot be fetched.
        """
        return self._read(position, check=self.verify != "off")

    def fetch(self, position: int) -> Sample:
        """The same, for training: with `verify="first"`, the record is checked the first time alone."""
        return self._read(
            position, check=self.verify == "always" or (self.verify == "first" and not self._seen[position])
        )

    def _read(self, position: int, *, check: bool) -> Sample:
        tar, start, stop = self._place(position)
        key, table = self.table.key(position), self.table
        where = f"{tar.name}, {key}, at {start}"
        record = self._record(position, tar, start, stop, where, check=check)
        sample = checked_sample(record, key, table.shape(position), where, table.sizes_of(position, self.recipe))
        self._seen[position] = 1
        return sample

    def _place(self, position: int) -> tuple[Tar, int, int]:
        start = int(self.table.offsets[position])
        return self._tars[self.table.shards[position]], start, start + int(self.table.sizes[position])

    def _record(self, position: int, tar: Tar, start: int, stop: int, where: str, *, check: bool) -> memoryview:
        record = tar.read(start, stop)
        if not check:
            return record
        expected = bytes(self.table.hashes[position])
        sound = hashlib.sha256(record).digest() == expected
        if not sound and tar.forget_copy():
            record = tar.read(start, stop)  # once more: the copy on this disk may be at fault
            sound = hashlib.sha256(record).digest() == expected
        if not sound:
            raise ShardError(
                "a record is damaged",
                where=where,
                expected=f"SHA-256 {expected.hex()}",
                hint="copy the shard again, or delete it with its index and run qie-precompute again",
            )
        return record


def open_shards(
    indexes: Sequence[File], cache: ShardCache | None = None, blame: Blame | None = None
) -> Iterator[OpenShards]:
    """All shards of `indexes`, in their order; with `blame`, which is told of the others, those that can be opened.

    Raises:
        ShardError: an index is damaged, or a tar is missing or of another size than its index says.
    """
    for _, files in groupby(indexes, key=lambda index: index.folder.url):
        group = list(files)
        compact = _blamed(blame, File(group[0].folder, COMPACT_NAME), partial(current_compact, group[0].folder))
        for compacted, run in groupby(group, key=lambda index: compact is not None and index.stem in compact[1]):
            if compacted:
                assert compact is not None
                yield _from_compact(*compact, list(run), cache)
            else:
                for index in run:
                    if part := _blamed(blame, index, partial(open_by_index, index, cache)):
                        yield part


def _blamed(blame: Blame | None, index: File, opened: Callable[[], T]) -> T | None:
    try:
        return opened()
    except ShardError as error:
        if blame is None:
            raise
        blame(index, error)
        return None


def compacted(folder: Folder) -> Compact:
    """What the indexes of a folder say, as its compacted index holds it.

    Raises:
        ShardError: the folder holds no shards, or one of them is damaged, of another recipe, or of another's rows.
    """
    stamps = folder.stamps()
    shards, tables = list[CompactShard](), list[Table]()
    recipe: Recipe | None = None
    for file in indexes_in(folder):
        if file.name not in stamps:  # it came just now
            continue
        # One at a time: a parsed index takes ten times the memory of its table.
        shard = Shard(file)
        recipe = recipe or shard.index.recipe
        recipe.require_equal(shard.index.recipe, shard.file, "shards of two recipes belong into two folders")
        shards.append(CompactShard.of(file.stem, shard.index, stamps[file.name]))
        tables.append(Table.of(shard.index, shard.file))
    if recipe is None:
        raise ShardError("no shards found", where=folder)
    require_disjoint((File(folder, f"{shard.stem}.tar"), shard.rows) for shard in shards)
    return Compact(recipe, tuple(shards), Table.joined(tables))


def require_disjoint(shards: Iterable[tuple[File, tuple[int, int]]]) -> None:
    """Raise ShardError when two shards of one folder, given by a file of each and its rows, hold the same rows."""
    for (first, mine), (second, theirs) in pairwise(sorted(shards, key=lambda one: (one[0].folder.url, one[1]))):
        if first.folder.url == second.folder.url and theirs[0] < mine[1]:
            raise ShardError(
                "two shards hold the same rows",
                where=second,
                found=f"rows [{theirs[0]}, {mine[1]}) are in {first.name}, too",
                hint="delete one of the two with its index; qie-precompute writes what is then missing",
            )


def current_compact(folder: Folder) -> tuple[Compact, dict[str, int]] | None:
    """A folder's compacted index, and the numbers in it of the shards that are still what they were, by stem.

    None without one. A web server lists nothing to compare it with: there it counts where shards were found by it, and
    only there.

    Raises:
        ShardError: it is damaged.
    """
    if isinstance(folder, ManifestFolder):
        return folder.compact, {shard.stem: number for number, shard in enumerate(folder.compact.shards)}
    try:
        stamps = folder.stamps()
    except StoreError:
        return None
    compact = read_compact(folder) if COMPACT_NAME in stamps else None
    if compact is None:
        return None
    return compact, {
        shard.stem: number
        for number, shard in enumerate(compact.shards)
        if stamps.get(f"{shard.stem}.json") == shard.stamp
        and stamps.get(f"{shard.stem}.tar", "").partition(" ")[0] == str(shard.filesize)
    }


def _from_compact(
    compact: Compact, numbers: dict[str, int], indexes: list[File], cache: ShardCache | None
) -> OpenShards:
    chosen = [numbers[index.stem] for index in indexes]
    shards = [compact.shards[number] for number in chosen]
    tars = [
        Tar(index.with_suffix(".tar"), shard.filesize, shard.sha256, cache)
        for index, shard in zip(indexes, shards, strict=True)
    ]
    everything = chosen == list(range(len(compact.shards)))
    table = compact.table if everything else compact.table.of_shards(chosen)
    skipped = tuple(gone for shard in shards for gone in shard.skipped)
    return OpenShards(compact.recipe, tuple(tars), tuple(shard.rows for shard in shards), table, skipped)


def open_by_index(index: File, cache: ShardCache | None) -> OpenShards:
    """One shard by its own index; raises what `open_shards` does."""
    shard = Shard(index)
    return open_shard(shard, Tar(shard.file, shard.index.filesize, shard.index.sha256, cache))


def open_shard(shard: Shard, tar: Tar) -> OpenShards:
    """One shard by its own index, read through `tar`. Raises ShardError when sizes in the index do not fit."""
    index = shard.index
    return OpenShards(index.recipe, (tar,), (index.rows,), Table.of(index, shard.file), index.skipped)
