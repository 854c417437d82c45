"""Naming samples to leave out, by key or by row, in the lists beside their shards."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from qie.errors import UsageError
from qie.shards.excluded import EXCLUDED_NAME, noted, positions_of, read_excluded, write_excluded
from qie.shards.reader import Shard
from qie.shards.sample_table import CHUNK, Table
from qie.shards.shard_set import OpenShards, open_shards
from qie.stores import File, Folder

LEAST_PREFIX = 8

_ROW = re.compile(r"\d{1,9}", re.ASCII)
_PREFIX = re.compile(rf"[0-9a-f]{{{LEAST_PREFIX},64}}", re.ASCII)
_SHOWN = 4


@dataclass(frozen=True)
class NamedSample:
    """A sample in a folder of shards."""

    folder: Folder
    key: str
    row: int
    variant: int
    name: str


@dataclass(frozen=True)
class Exclusion:
    """What a change of exclude lists did.

    Attributes:
        excluded, included: the samples that were named, in the order of their shards.
        lists: (exclude list, keys on it now) of each folder.
    """

    excluded: list[NamedSample]
    included: list[NamedSample]
    lists: list[tuple[File, int]]


def change_excluded(indexes: Sequence[File], exclude: Sequence[str], include: Sequence[str] = ()) -> Exclusion:
    """Put samples on the exclude lists of their folders, and take others off. Nothing is written if one is unknown.

    Args:
        indexes: of the shards.
        exclude, include: each a key, its first 8 characters or more, or the number of a row, which stands for all its
            variants. A number of up to nine digits is a row.

    Raises:
        UsageError: one of them is no such thing, is not there, or may be several; says which.
        ShardError: an index or a list is damaged.
        StoreError: a list cannot be written.
    """
    shards = _Shards.of(indexes)
    out = {key for name in exclude for key in shards.keys(name)}
    listed = {key for keys in shards.lists.values() for key in keys}
    back = {key for name in include for key in shards.keys(name, listed)}
    if both := out & back:
        raise UsageError("a sample cannot be excluded and included at once", found=min(both))
    excluded, included = shards.samples(out), shards.samples(back)
    for url, folder in shards.folders.items():
        # Of several samples of a key, the note names the first.
        notes = {one.key: noted(one.row, one.name) for one in reversed(excluded) if one.folder.url == url}
        before = shards.lists[url]
        after = {key: note for key, note in before.items() if key not in back}
        after |= {key: notes[key] for key in reversed(notes) if key not in after}
        if after != before:
            write_excluded(folder, after)
        shards.lists[url] = after
    lists = [(File(folder, EXCLUDED_NAME), len(shards.lists[url])) for url, folder in shards.folders.items()]
    return Exclusion(excluded, included, lists)


@dataclass(frozen=True)
class _Shards:
    """Shards by folder, and the lists beside them, by the folders' URLs."""

    folders: dict[str, Folder]
    parts: dict[str, list[OpenShards]]
    lists: dict[str, dict[str, str]]

    @classmethod
    def of(cls, indexes: Sequence[File]) -> _Shards:
        folders = {index.folder.url: index.folder for index in indexes}
        parts = {url: list(open_shards([one for one in indexes if one.folder.url == url])) for url in folders}
        return cls(folders, parts, {url: read_excluded(folder) for url, folder in folders.items()})

    def keys(self, name: str, listed: Collection[str] | None = None) -> set[str]:
        """The keys that a name stands for; with `listed`, of these."""
        if _ROW.fullmatch(name):
            return self._of_row(int(name), listed)
        prefix = name.lower()
        if not _PREFIX.fullmatch(prefix):
            raise UsageError(
                "this names no sample",
                found=name,
                expected=f"the number of a row, or a key from its first {LEAST_PREFIX} characters on",
            )
        found = self._beginning(prefix) if listed is None else {key for key in listed if key.startswith(prefix)}
        if len(found) != 1:
            some = ", ".join(sorted(found)[:_SHOWN]) + (f", … ({len(found)} keys)" if len(found) > _SHOWN else "")
            raise UsageError(
                "several samples have a key that begins so" if found else _none("key that begins so", listed),
                where=", ".join(self.folders),
                expected=f"one that begins with {name}",
                found=some or "none",
                hint="give more of the key" if found else None,
            )
        return found

    def samples(self, keys: set[str]) -> list[NamedSample]:
        """All samples of some keys."""
        wanted = {bytes.fromhex(key) for key in keys}
        return [
            self._named(url, part, position)
            for url, parts in self.parts.items()
            for part in parts
            for position in positions_of(part.table.keys, wanted).tolist()
        ]

    def _of_row(self, row: int, listed: Collection[str] | None) -> set[str]:
        found: dict[str, set[str]] = {}
        for url, parts in self.parts.items():
            keys = {part.table.key(one) for part in parts for one in np.flatnonzero(part.table.rows == row).tolist()}
            if keys := {key for key in keys if listed is None or key in listed}:
                found[url] = keys
        if len(found) != 1:
            raise UsageError(
                "several folders have a row of this number" if found else _none("row of this number", listed),
                where=", ".join(found or self.folders),
                found=f"row {row}",
                hint="name one folder, or the sample's key" if found else "a skipped row has no sample: see qie-stats",
            )
        return next(iter(found.values()))

    def _beginning(self, prefix: str) -> set[str]:
        tables = [part.table for parts in self.parts.values() for part in parts]
        return {table.key(position) for table in tables for position in _iter_beginning(table, prefix)}

    def _named(self, url: str, part: OpenShards, position: int) -> NamedSample:
        table = part.table
        index = Shard(part.tars[table.shard_of(position)].file.with_suffix(".json")).index
        row, variant = int(table.rows[position]), int(table.variants[position])
        name = next((one.name for one in index.samples if (one.row, one.variant) == (row, variant)), "")
        return NamedSample(self.folders[url], table.key(position), row, variant, name)


def _iter_beginning(table: Table, prefix: str) -> Iterator[int]:
    whole = bytes.fromhex(prefix[: len(prefix) // 2 * 2])
    for start in range(0, len(table), CHUNK):
        keys = table.keys[start : start + CHUNK, : len(whole)]
        for position in np.flatnonzero((keys == np.frombuffer(whole, np.uint8)).all(axis=1)).tolist():
            if table.key(start + position).startswith(prefix):
                yield start + position


def _none(what: str, listed: object) -> str:
    return f"no {'sample has a' if listed is None else 'excluded sample has a'} {what}"
