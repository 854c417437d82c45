"""All samples of many shards as columns: what planning and reading need of a million, in a hundred bytes each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qie.errors import ShardError
from qie.shards.index import ShardIndex, member_name
from qie.types import Shape

HASH_BYTES = 32

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, eq=False)
class Table:
    """One value per sample in each column; samples in the order of shards, rows and versions.

    Attributes:
        keys: [N, 32] content keys.
        hashes: [N, 32] SHA-256 of the records.
        shards: [N] number of the shard; non-decreasing.
        rows: [N] number of the row in its source.
        variants: [N] which version of the row.
        offsets, sizes: [N] where the record lies in its tar, in bytes.
        shapes: [N] number in `shape_names`.
        tokens, empty_tokens: [N] lengths of the prompt's and of the null prompt's embedding.
        prefixes: [N] leading tokens that both embeddings share.
        widths: [N] of a token's embedding.
        masked: [N] whether there is a loss mask.
        sources: [N] number in `source_names`.
        shape_names, source_names: each once.
    """

    keys: NDArray[np.uint8]
    hashes: NDArray[np.uint8]
    shards: NDArray[np.int32]
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
    sources: NDArray[np.int32]
    shape_names: tuple[Shape, ...]
    source_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        return {name: getattr(self, name) for name in COLUMNS}

    def key(self, position: int) -> str:
        return bytes(self.keys[position]).hex()

    @classmethod
    def of(cls, index: ShardIndex, where: object) -> Table:
        """The samples of one shard, its number being 0.

        Raises:
            ShardError: the sizes that the index gives for a record do not fit each other.
        """
        shape_names = tuple(dict.fromkeys(entry.shape for entry in index.samples))
        source_names = tuple(dict.fromkeys(entry.source for entry in index.samples))
        members = [index.files[member_name(entry.key)] for entry in index.samples]
        tensor = [entry.tensor_bytes for entry in index.samples]
        tokens = np.array([entry.tokens for entry in index.samples], np.int64)
        empty_tokens = np.array([entry.empty_tokens for entry in index.samples], np.int64)
        prompt_bytes = np.array([sizes.get("prompt_embed", 0) for sizes in tensor], np.int64)
        tail_bytes = np.array([sizes.get("empty_prompt_embed", 0) for sizes in tensor], np.int64)
        widths = prompt_bytes // np.maximum(2 * tokens, 1)
        tails = tail_bytes // np.maximum(2 * widths, 1)
        prefixes = empty_tokens - tails
        odd = (2 * tokens * widths != prompt_bytes) | (2 * tails * widths != tail_bytes)
        odd |= (prefixes < 0) | (prefixes > tokens) | (tokens == 0)
        if odd.any():
            raise ShardError(
                "the index gives sizes that do not fit each other",
                where=f"{where}, {index.samples[int(np.argmax(odd))].key}",
                hint="delete the shard and its index and run qie-precompute again",
            )
        return cls(
            keys=_digests([entry.key for entry in index.samples], where),
            hashes=_digests([member.sha256 for member in members], where),
            shards=np.zeros(len(members), np.int32),
            rows=np.array([entry.row for entry in index.samples], np.int64),
            variants=np.array([entry.variant for entry in index.samples], np.int32),
            offsets=np.array([member.offset for member in members], np.int64),
            sizes=np.array([member.size for member in members], np.int64),
            shapes=_numbers([entry.shape for entry in index.samples], shape_names),
            tokens=tokens.astype(np.int32),
            empty_tokens=empty_tokens.astype(np.int32),
            prefixes=prefixes.astype(np.int32),
            widths=widths.astype(np.int32),
            masked=np.array([sizes.get("loss_mask", 0) > 0 for sizes in tensor], np.bool_),
            sources=_numbers([entry.source for entry in index.samples], source_names),
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
        counts = [int(table.shards[-1]) + 1 if len(table) else 1 for table in tables]
        starts = np.concatenate([[0], np.cumsum(counts[:-1])])
        columns["shards"] = np.concatenate(
            [table.shards + np.int32(start) for table, start in zip(tables, starts, strict=True)]
        )
        columns["shapes"] = np.concatenate([_numbers(table.shape_names, shape_names)[table.shapes] for table in tables])
        columns["sources"] = np.concatenate(
            [_numbers(table.source_names, source_names)[table.sources] for table in tables]
        )
        return cls(**columns, shape_names=shape_names, source_names=source_names)


COLUMNS = tuple(field.name for field in fields(Table) if not field.name.endswith("_names"))


def _digests(digests: Sequence[str], where: object) -> NDArray[np.uint8]:
    if odd := next((digest for digest in digests if not _DIGEST.fullmatch(digest)), None):
        raise ShardError("the index holds a hash that is none", where=where, found=odd[:80])
    return np.frombuffer(bytes.fromhex("".join(digests)), np.uint8).reshape(-1, HASH_BYTES)


def _numbers(values: Iterable[object], names: Iterable[object]) -> NDArray[np.int32]:
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([numbers[value] for value in values], np.int32)
