"""What the indexes of a folder say of its shards, kept up with what is written: each index is read once.

A look at a folder in which nothing happened is one question to the disk. Which rows there are, names say at once; what
the indexes say, skipped rows and bytes, is read bit by bit in a folder that has many.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import chain

from pydantic import TypeAdapter, ValidationError

from qie.errors import QieError
from qie.shards.compact_index import COMPACT_NAME
from qie.shards.discovery import index_names
from qie.shards.grid import Range, merged_ranges
from qie.shards.index import Skipped, parse_stem
from qie.shards.record import Whole
from qie.shards.shard_set import current_compact
from qie.stores import Folder, LocalFolder, MissingError

READ_S = 0.4
"""How long a look may read indexes; those that are left are for the next one."""

COMPARE_EVERY = 15
"""Of so many looks at a folder that changed, one finds indexes that were written again."""

_READ_AT_ONCE = 16
_EXAMPLES = 12
_ARRIVED = 64
_SETTLED_NS = 10**9
"""Within a tick of the disk's clock, a folder may change a second time under one date."""


@dataclass(frozen=True)
class _Told:
    """What is kept of an index."""

    start: Whole
    stop: Whole
    filesize: Whole
    skipped: tuple[Skipped, ...]


_TOLD = TypeAdapter(_Told)


@dataclass
class IndexFollower:
    """The shards of a folder, as they are at the last look.

    Attributes:
        folder: of the shards.
        rows: their ranges, those that touch as one.
        tar_bytes, counted_rows: of the tars whose index was read, and the rows that these hold or skip.
        reasons: why rows were skipped -> how many.
        arrived: the last shards that came since the first look, in their order.
        faults: by the name of an index.
    """

    folder: Folder
    rows: list[Range] = field(default_factory=list)
    tar_bytes: int = 0
    counted_rows: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    arrived: list[str] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)
    _unread: dict[str, None] = field(default_factory=dict)
    _told: dict[str, _Told] = field(default_factory=dict)
    _skipping: dict[str, _Told] = field(default_factory=dict)
    _stamps: dict[str, str] = field(default_factory=dict)
    _uncovered: bool = False
    _dated: int | None = None
    _looks: int = 0

    def look(self, first: Iterable[str] = ()) -> None:
        """Take in what has changed; of many indexes, those of the names in `first` before others.

        Raises:
            StoreError: the folder cannot be listed.
        """
        date = self._date()
        if date is None or date != self._dated:
            self._list()
            self._dated = date
        self._read([stem for stem in first if stem in self._unread])
        if self._uncovered:
            self._cover()

    @property
    def shards(self) -> int:
        return len(self._told) + len(self._unread)

    @property
    def unread(self) -> int:
        """How many indexes are still to be read."""
        return len(self._unread)

    def last(self, count: int) -> list[str]:
        """The shards of the last rows, the very last one first."""
        return nlargest(count, chain(self._told, self._unread))

    def skipped(self, reason: str) -> list[Skipped]:
        """Some of the rows that were skipped for a reason, in their order."""
        found: list[Skipped] = []
        for told in sorted(self._skipping.values(), key=lambda told: told.start):
            found += [gone for gone in told.skipped if gone.reason == reason]
            if len(found) >= _EXAMPLES:
                break
        return found[:_EXAMPLES]

    def _date(self) -> int | None:
        """When the folder last changed, on a disk; None where that is not known, or where it may change once more."""
        if not isinstance(self.folder, LocalFolder):
            return None
        with suppress(OSError):
            date = self.folder.root.stat().st_mtime_ns
            return date if abs(time.time_ns() - date) > _SETTLED_NS else None
        return None

    def _list(self) -> None:
        compared = self._looks % COMPARE_EVERY == 0
        stamps = self.folder.stamps() if compared else None
        names = set(self.folder.names() if stamps is None else stamps)
        fresh = names - self._names
        tars = {f"{name[:-5]}.tar" for name in fresh if name.endswith(".json")} & names
        stems = [name[:-5] for name in index_names([*fresh, *(tars - fresh)])]
        self.rows = merged_ranges([*self.rows, *filter(None, map(parse_stem, stems))])
        for stem in stems:
            self._unread[stem] = None
            if self._looks:
                self.arrived.append(stem)
        del self.arrived[:-_ARRIVED]
        for name in self._names - names:
            self._forget(name.removesuffix(".json"))
        if stamps is not None:
            self._compare(stamps)
        self._names = names
        self._looks += 1
        if self._looks == 1 and COMPACT_NAME in names:
            self._take_compact()

    def _compare(self, stamps: dict[str, str]) -> None:
        """Read again what was written again. What came since the last comparison is read twice."""
        for stem in [*self._told]:
            if self._stamps.get(stem) != stamps.get(f"{stem}.json"):
                self._forget(stem)
                self._unread[stem] = None
        there = (stem for stem in (*self._unread, *self._told) if f"{stem}.json" in stamps)
        self._stamps = {stem: stamps[f"{stem}.json"] for stem in there}

    def _take_compact(self) -> None:
        """What a compacted index says of the shards that are still what they were."""
        with suppress(QieError):
            found = current_compact(self.folder)
            for stem, number in found[1].items() if found else ():
                if found and stem in self._unread:
                    shard = found[0].shard(number)
                    self._take(stem, _Told(*shard.rows, shard.filesize, shard.skipped))

    def _read(self, first: Sequence[str]) -> None:
        """Read indexes for a while, the last ones first: who looks wants to see what was written last."""
        until = time.monotonic() + READ_S
        waiting = [*first, *sorted(self._unread.keys() - set(first), reverse=True)]
        local = isinstance(self.folder, LocalFolder)
        step = 1 if local else _READ_AT_ONCE
        with ThreadPoolExecutor(step) as pool:
            for at in range(0, len(waiting), step):
                part = waiting[at : at + step]
                contents = map(self._content, part) if local else pool.map(self._content, part)
                for stem, content in zip(part, contents, strict=True):
                    self._parse(stem, content)
                if time.monotonic() > until:
                    break

    def _content(self, stem: str) -> bytes | QieError | None:
        try:
            return self.folder.read(f"{stem}.json")
        except MissingError:  # deleted since, or about to be replaced
            return None
        except QieError as error:
            return error

    def _parse(self, stem: str, content: bytes | QieError | None) -> None:
        self.faults.pop(stem, None)
        if content is None:
            self._forget(stem)
            self._names.discard(f"{stem}.json")
        elif isinstance(content, QieError):
            self._blame(stem, content.what)
        else:
            try:
                told = _TOLD.validate_json(content)
            except ValidationError:
                self._blame(stem, "the index is damaged or was not written by qie")
                return
            if parse_stem(stem) not in (None, (told.start, told.stop)):
                self._blame(stem, "the index has another range than its name")
                return
            self._take(stem, told)

    def _blame(self, stem: str, fault: str) -> None:
        self.faults[stem] = fault
        self._take(stem, _Told(*(parse_stem(stem) or (0, 0)), 0, ()))

    def _take(self, stem: str, told: _Told) -> None:
        self._unread.pop(stem, None)
        self._told[stem] = told
        if told.skipped:
            self._skipping[stem] = told
        self._uncovered |= parse_stem(stem) is None  # somebody renamed it: its index alone says its rows
        if told.filesize:
            self.tar_bytes += told.filesize
            self.counted_rows += told.stop - told.start
        self.reasons.update(gone.reason for gone in told.skipped)

    def _forget(self, stem: str) -> None:
        self._uncovered |= stem in self._unread or stem in self._told
        self._unread.pop(stem, None)
        self.faults.pop(stem, None)
        self._skipping.pop(stem, None)
        told = self._told.pop(stem, None)
        if told is None:
            return
        if told.filesize:
            self.tar_bytes -= told.filesize
            self.counted_rows -= told.stop - told.start
        self.reasons -= Counter(gone.reason for gone in told.skipped)

    def _cover(self) -> None:
        self._uncovered = False
        ranges = [(told.start, told.stop) for told in self._told.values() if told.stop > told.start]
        self.rows = merged_ranges([*ranges, *filter(None, map(parse_stem, self._unread))])
