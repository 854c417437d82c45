"""Published records by key, in the output and in the shards of older runs."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from qie.errors import ShardError
from qie.shards.discovery import find_indexes, published
from qie.shards.index import Entry, ShardIndex
from qie.shards.reader import Shard
from qie.stores import File, Folder, MissingError

_KEY = re.compile(rb'"key":"([0-9a-f]{16})[0-9a-f]{48}"')
_READERS = 32
_OPEN_SHARDS = 64
_KEPT_SHARDS = 256
_BUFFER = 1 << 14


class Records:
    """Finds the record of a key. A key includes its recipe, so a record found is one of the same recipe.

    Memory holds the first 8 bytes of each key and the number of its shard: 12 bytes a record. The first look-up reads
    the indexes. It does not parse them but searches them for keys, which takes seconds for a million.

    Args:
        output: where this run writes. Its records are found, too, unless `search_output` is false.
        places: shards of older runs: folders, globs or brace patterns, paths or URLs.

    Raises:
        UsageError: one of `places` holds no shards.
    """

    def __init__(self, output: Folder, places: Sequence[str | Path] = (), *, search_output: bool = True) -> None:
        self._indexes: list[File] = find_indexes(places)
        self._output = output if search_output else None
        self._sorted: list[tuple[np.ndarray, np.ndarray]] = []
        self._recent: dict[int, int] = {}
        self._open: dict[int, Shard] = {}
        self._kept: dict[str, Shard] = {}
        self._searched = False
        self._lock = threading.Lock()

    def find(self, key: str) -> tuple[Entry, bytes, bytes | None] | None:
        """The entry, the record, checked against its hash, and the pictures of a key; None for an unknown key.

        Raises:
            ShardError: the shard that holds it is damaged.
        """
        for number in self._numbers(key):
            for shard in self._shards(number):
                entry = shard.by_key.get(key)
                if entry:
                    try:
                        return entry, shard.verified_record(entry), shard.pictures_jpeg(entry)
                    except ShardError:
                        if not self._replaced(number, shard):
                            raise
        return None

    def entry(self, key: str) -> Entry | None:
        """The entry of a key, without reading its record."""
        shards = (shard for number in self._numbers(key) for shard in self._shards(number))
        return next((entry for shard in shards if (entry := shard.by_key.get(key))), None)

    def _numbers(self, key: str) -> list[int]:
        with self._lock:
            if not self._searched:
                self._search()
            return self._look_up(int(key[:16], 16))

    def keep(self, shard: Shard) -> None:
        """Keep a shard of the output readable that is about to be replaced: its rows may have moved to other shards.

        On a local disk only, and for the last shards only: to move rows far, write to a new folder and reuse this one.
        """
        shard.tar.keep_open()
        with self._lock:
            while len(self._kept) >= _KEPT_SHARDS:
                del self._kept[next(iter(self._kept))]
            self._kept[str(shard.file)] = shard

    def add(self, index: ShardIndex, file: File) -> None:
        """Add a shard that this run has published."""
        with self._lock:
            self._indexes.append(file)
            self._recent.update((int(name[:16], 16), len(self._indexes) - 1) for name in index.files)
            if len(self._recent) >= _BUFFER:
                self._sorted.append(_table(list(self._recent), list(self._recent.values())))
                self._recent = {}

    def _search(self) -> None:
        self._searched = True
        if self._output is not None:
            self._indexes += published(self._output)
        with ThreadPoolExecutor(_READERS) as pool:
            found = list(pool.map(_prefixes, self._indexes))
        numbers = [number for number, keys in enumerate(found) for _ in range(len(keys))]
        if numbers:
            self._sorted.append(_table(np.concatenate(found), numbers))

    def _look_up(self, prefix: int) -> list[int]:
        numbers = [self._recent[prefix]] if prefix in self._recent else []
        for keys, shards in self._sorted:
            at = int(np.searchsorted(keys, np.uint64(prefix)))
            while at < len(keys) and int(keys[at]) == prefix:
                numbers.append(int(shards[at]))
                at += 1
        return numbers

    def _shards(self, number: int) -> Iterator[Shard]:
        """A shard as it was before this run replaced it, if it has, and as it is now, if it exists."""
        file = self._indexes[number]
        with self._lock:
            kept = self._kept.get(str(file.with_suffix(".tar")))
            shard = self._open.get(number)
        if kept is not None:
            yield kept
        if shard is None:
            shard = Shard.published(file)
            if shard is None:
                return
            shard.tar.keep_open()
            with self._lock:
                while len(self._open) >= _OPEN_SHARDS:
                    del self._open[next(iter(self._open))]
                self._open[number] = shard
        yield shard

    def _replaced(self, number: int, shard: Shard) -> bool:
        """Whether another shard has taken the place of this one, which is then forgotten."""
        with self._lock:
            self._open.pop(number, None)
        now = Shard.published(self._indexes[number])
        return now is None or now.index != shard.index


def _prefixes(index: File) -> np.ndarray:
    """The first 8 bytes of all keys in an index, those of skipped rows included, which have no record."""
    try:
        content = index.read()
    except MissingError:  # replaced by another run just now
        return np.empty(0, np.uint64)
    return np.array([int(prefix, 16) for prefix in _KEY.findall(content)], np.uint64)


def _table(keys: Sequence[int] | np.ndarray, shards: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    prefixes = np.array(keys, np.uint64)
    order = np.argsort(prefixes, kind="stable")
    return prefixes[order], np.array(shards, np.uint32)[order]
