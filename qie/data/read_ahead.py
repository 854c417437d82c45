"""Shards fetched ahead: while batches are trained on, those that hold the next ones come into the folder on this disk.

What is ahead is a window of the plan: the batches that are not loaded yet, as far as their shards fit into
`ShardCache.ahead_bytes`. It is announced, so that no process of the machine takes its place, and fetched in the order
of the plan. A shard that another process is fetching is passed over. What cannot be fetched is left to whoever reads a
sample of it, and meets the error then.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from qie.data.plan import PlannedBatch
from qie.shards.cache import PARALLEL_PARTS, PART_BYTES, Ahead, Announcement, ShardCache
from qie.shards.reader import Tar
from qie.threads import Threads

BATCHES_A_LOOK = 32
"""The plan is walked so far with each batch: it costs each a little, and none a lot."""
SHARDS_AHEAD = 1024
SAMPLES_AHEAD = 65_536
WORKERS = 8
PARTS_AT_ONCE = 4 * PARALLEL_PARTS
"""Four large shards: while one is hashed to its end, the others fill the link."""


@dataclass(eq=False)
class _Soon:
    """A shard of the window, and how many of its batches need it."""

    tar: Tar
    batches: int = 0

    @property
    def parts(self) -> int:
        """How many of its parts are on their way at once."""
        return min(-(-self.tar.size // PART_BYTES), PARALLEL_PARTS)


class ReadAhead(Iterator[PlannedBatch | None]):
    """The batches of a plan, of which the shards of those that follow are fetched in the background until it is closed.

    All but the background is one thread's.

    Args:
        planned: batches in their order; None where the next is not known yet.
        tars: the tars that are copied whole for the samples of a batch.
        cache: where to; without one, nothing is fetched ahead.
        may_look: whether batches that nobody asked for may be taken from `planned` now.
        needed: how many batches will be asked for; for none behind them anything is fetched ahead.
    """

    def __init__(
        self,
        planned: Iterator[PlannedBatch | None],
        tars: Callable[[PlannedBatch], Sequence[Tar]],
        cache: ShardCache | None,
        may_look: Callable[[], bool],
        needed: int,
    ) -> None:
        self._planned, self._tars, self._cache, self._may_look, self._needed = planned, tars, cache, may_look, needed
        self._next: tuple[PlannedBatch, dict[str, Tar]] | None = None
        self._ended = False
        self._queue: deque[PlannedBatch] = deque()
        # Shared with the background, under the lock of `_changed`:
        self._changed = threading.Condition()
        self._window: dict[str, _Soon] = {}
        self._bytes = self._samples = 0
        self._loading: deque[tuple[Sequence[str], int]] = deque()
        self._waiting: deque[_Soon] = deque()
        self._put_off: list[_Soon] = []
        self._parts = 0
        self._version = self._announced = 0
        self._full = self._closed = False
        self._announcement = cache and Announcement(cache)
        self._threads = Threads()

    def __enter__(self) -> Self:
        if self._cache and self._announcement:
            self._threads.start("announce", self._announce, self._announcement)
            for _ in range(WORKERS):
                self._threads.start("read-ahead", self._work, self._cache)
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the background: what is on its way is given up."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._threads.stop()
        if self._announcement:
            self._announcement.close()

    def __next__(self) -> PlannedBatch | None:
        self._look()
        if self._queue:
            return self._queue.popleft()
        found = self._peek()
        if found is None:
            if self._ended:
                raise StopIteration
            return None
        self._pass_on()  # it does not fit into the window: its shards are fetched when they are read
        with self._changed:
            self._loading.append(((), 0))
        return found[0]

    def loaded(self) -> None:
        """The first of the batches that were given, and not loaded yet, is loaded: the run has moved on."""
        with self._changed:
            names, samples = self._loading.popleft()
            self._samples -= samples
            for name in names:
                shard = self._window[name]
                shard.batches -= 1
                if not shard.batches:
                    del self._window[name]
                    self._bytes -= shard.tar.size
                    self._version += 1
            self._waiting.extendleft(reversed(self._put_off))
            self._put_off.clear()
            self._full = False
            self._changed.notify_all()
        self._look()

    def _look(self) -> None:
        """Take further batches into the window."""
        if self._cache is None or not self._may_look():
            return
        for _ in range(min(BATCHES_A_LOOK, self._needed)):
            found = self._peek()
            if found is None or not self._admit(*found, self._cache.ahead_bytes):
                return
            self._queue.append(found[0])
            self._pass_on()

    def _peek(self) -> tuple[PlannedBatch, dict[str, Tar]] | None:
        """The first batch that is not in the window, and its tars by hash; None if there is none, or none known."""
        if self._next is None and not self._ended:
            try:
                planned = next(self._planned)
            except StopIteration:
                self._ended = True
            else:
                if planned is not None:
                    self._next = planned, {tar.sha256: tar for tar in self._tars(planned)}
        return self._next

    def _pass_on(self) -> None:
        self._next = None
        self._needed -= 1

    def _admit(self, planned: PlannedBatch, tars: dict[str, Tar], most_bytes: int) -> bool:
        samples = len(planned.positions)
        with self._changed:
            new = [tar for name, tar in tars.items() if name not in self._window]
            size = self._bytes + sum(tar.size for tar in new)
            if (
                size > most_bytes
                or len(self._window) + len(new) > SHARDS_AHEAD
                or self._samples + samples > SAMPLES_AHEAD
            ):
                return False
            self._bytes, self._samples = size, self._samples + samples
            for tar in new:
                shard = self._window[tar.sha256] = _Soon(tar)
                self._waiting.append(shard)
            for name in tars:
                self._window[name].batches += 1
            self._loading.append((tuple(tars), samples))
            if new:
                self._version += 1
                self._changed.notify_all()
        return True

    def _announce(self, announcement: Announcement) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._announced < self._version)
                if self._closed:
                    return
                names, version = list(self._window), self._version
            try:
                announcement.tell(names)
            except Exception:  # the folder cannot be written: whoever reads a sample meets the error
                version = -1
            with self._changed:
                self._announced, self._closed = version, self._closed or version < 0
                self._changed.notify_all()

    def _work(self, cache: ShardCache) -> None:
        while (shard := self._take()) is not None:
            outcome = None
            try:
                with suppress(Exception):  # whoever reads a sample of it meets the error, if it is still one then
                    outcome = cache.fetch_ahead(shard.tar.file, shard.tar.size, shard.tar.sha256)
            finally:
                self._settle(shard, outcome)

    def _take(self) -> _Soon | None:
        """The next shard to fetch, when it is announced and there is room for its parts; None at the end."""
        with self._changed:
            while not self._closed:
                while self._waiting and not self._waiting[0].batches:  # the run was faster
                    self._waiting.popleft()
                free = self._waiting and not self._full and self._announced == self._version
                if free and self._parts + self._waiting[0].parts <= PARTS_AT_ONCE:
                    shard = self._waiting.popleft()
                    self._parts += shard.parts
                    return shard
                self._changed.wait()
        return None

    def _settle(self, shard: _Soon, outcome: Ahead | None) -> None:
        with self._changed:
            self._parts -= shard.parts
            if outcome in (Ahead.BUSY, Ahead.FULL):
                self._put_off.append(shard)
            self._full |= outcome is Ahead.FULL
            self._changed.notify_all()
