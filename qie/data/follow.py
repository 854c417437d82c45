"""Training on shards while they are still being written.

The first epoch takes samples in the order of their rows, each batch as soon as its last sample is published; it waits
for what is not there yet. Which batches there are follows from the shards alone, not from when they came: every rank,
and a run that is resumed, sees the same. Later epochs are those of any other stream.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from qie.data.epoch import Plan, PlannedBatch, held_out, plan_epoch, sequence_prefix
from qie.data.stream import Stream, short_hash
from qie.errors import QieError, UsageError
from qie.recipe import Recipe
from qie.shards.cache import ShardCache
from qie.shards.index import Skipped
from qie.shards.shard_set import OpenShards, ShardSet, Verify, open_shards
from qie.shards.storage import published, rows_of
from qie.shards.table import Columns
from qie.stores import Folder
from qie.threads import pause
from qie.types import Sample


@dataclass(eq=False)
class GrowingSamples:
    """The samples of rows [0, `rows`) that are published without a gap from row 0 on.

    Attributes:
        folder: where the shards come.
        rows: how many rows there will be.
        verify, cache: see `ShardSet`.
        timeout_s: how long to wait for the next shard.
        poll_s: seconds between looks.
        alive: raises when nobody will write any more.
        current: up to which row shards are known to be what their rows are now; others may be left from an older run.
        say: told what is waited for, every half minute.
        stop: ends whoever writes the shards for these samples alone.
    """

    folder: Folder
    rows: int
    verify: Verify = "first"
    cache: ShardCache | None = None
    timeout_s: float = 3600.0
    poll_s: float = 1.0
    alive: Callable[[], object] = lambda: None
    current: Callable[[], int] = lambda: 1 << 62
    say: Callable[[str], object] = lambda line: None
    stop: Callable[[], object] = lambda: None
    covered: int = field(default=0, init=False)
    _parts: list[OpenShards] = field(default_factory=list, init=False, repr=False)
    _shards: ShardSet | None = field(default=None, init=False, repr=False)
    _closed: threading.Event = field(default_factory=threading.Event, init=False, repr=False)

    def __post_init__(self) -> None:
        self._stopping = finalize(self, self.stop)  # at the latest when the interpreter ends

    def close(self) -> None:
        """Wait no longer, and stop the writer, if it writes for these samples alone."""
        self._closed.set()
        self._stopping()

    @property
    def complete(self) -> bool:
        return self.covered >= self.rows

    @property
    def columns(self) -> Columns:
        return self._there.columns

    @property
    def digests(self) -> NDArray[np.uint8]:
        return self._there.digests

    @property
    def recipe(self) -> Recipe:
        return self._there.recipe

    @property
    def skipped(self) -> list[Skipped]:
        return self._there.skipped

    @property
    def masked(self) -> bool:
        return self._there.masked

    @property
    def _there(self) -> ShardSet:
        assert self._shards is not None, "wait for the first shard before"
        return self._shards

    def fetch(self, position: int) -> Sample:
        return self._there.fetch(position)

    def grow(self) -> bool:
        """Take in what was published meanwhile; whether there was anything."""
        if self.complete:
            return False
        new, current = [], self.current()
        for index in published(self.folder):
            start, stop = rows_of(index)
            if start == self.covered and stop <= current:
                new.append(index)
                self.covered = stop
        if not new:
            return False
        self._parts += open_shards(new, self.cache)
        if any(len(part.table) for part in self._parts):
            shards = ShardSet(self._parts, self.verify)
            if self._shards is not None:
                shards.trust(self._shards)
            self._shards = shards
        return True

    def wait(self) -> None:
        """Return when there is more.

        Raises:
            QieError: nothing came for `timeout_s`, all shards came and hold no samples, or the stream was closed.
        """
        started = told = time.monotonic()
        while not self.grow():
            self.alive()
            now = time.monotonic()
            if now - started > self.timeout_s:
                raise QieError(
                    "no further shard was published",
                    where=self.folder,
                    expected=f"a shard that starts at row {self.covered}, of {self.rows}",
                    found=f"nothing for {self.timeout_s:.0f} s",
                    hint="is qie-precompute still running, on the same source and folder?",
                )
            if now - told > 30:
                told = now
                self.say(f"waiting for the shard of row {self.covered} in {self.folder}")
            pause(self.poll_s)
            if self._closed.is_set():
                raise QieError("the stream was closed while it waited for a shard", where=self.folder)


@dataclass(eq=False)
class FollowingStream(Stream):
    """A stream whose first epoch goes in the order of rows, over shards that are still being written.

    Rows for validation are drawn from the first shard, since the others are not known when training starts.
    """

    def __post_init__(self) -> None:
        self._check()
        samples = self._growing
        while samples._shards is None:
            samples.wait()
        first = int(np.searchsorted(samples.columns.blocks, 1))
        if self.validation_rows >= len(np.unique(samples.columns.rows[:first])):
            raise UsageError(
                "validation.rows leaves nothing of the first shard, from which they are drawn with --follow",
                expected=f"fewer than {len(np.unique(samples.columns.rows[:first]))}",
                found=self.validation_rows,
            )
        self._first = np.array(samples.digests[:first])
        self._validation, self._first_held_out = held_out(
            self._first, samples.columns.rows[:first], self.validation_rows
        )
        self.held_out = self._mask()
        self._plans = {}
        self._begun: tuple[int, Plan] | None = None

    @property
    def _growing(self) -> GrowingSamples:
        assert isinstance(self.samples, GrowingSamples)
        return self.samples

    def _mask(self) -> NDArray[np.bool_]:
        mask = np.zeros(len(self.samples.columns), np.bool_)
        mask[: len(self._first_held_out)] = self._first_held_out
        return mask

    def _iter_planned(self, endless: bool) -> Iterator[PlannedBatch | None]:
        """None for: the next batch is not there yet."""
        epoch, start = self.epoch, self.position
        while True:
            if epoch == 0 and start >= len(self._plan(0)) and not self._growing.complete:
                if not self._growing.grow():
                    yield None
                continue
            plan = self._plan(epoch)
            if start < len(plan):
                yield plan[start].slice(self.rank, self.world_size)
                start += 1
            elif endless:
                epoch, start = epoch + 1, 0
            else:
                return

    def _wait(self) -> None:
        self._growing.wait()

    def close(self) -> None:
        self._growing.close()

    def _advance(self) -> None:
        self.position += 1
        if (self.epoch or self._growing.complete) and self.position >= len(self.plan):
            self.epoch, self.position = self.epoch + 1, 0

    def _plan(self, epoch: int) -> Plan:
        """The plan of an epoch; of the first one, what is known of it."""
        if epoch > 0:
            while not self._growing.complete:
                self._growing.wait()
            self._columns, self.held_out = self.samples.columns, self._mask()
            return super()._plan(epoch)
        if self._begun is None or self._begun[0] != self._growing.covered:
            self._begun = self._growing.covered, self._sequence()
        return self._begun[1]

    def _sequence(self) -> Plan:
        columns, size, mask = self.samples.columns, self.batch_size * self.world_size, self._mask()
        if not self._growing.complete:
            return sequence_prefix(columns, global_batch_size=size, seed=self.seed, epoch=0, leave_out=mask)
        return plan_epoch(
            columns, seed=self.seed, epoch=0, global_batch_size=size, tail=self.tail, order="sequence", leave_out=mask
        )

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return self._settings() | {"samples": short_hash(self._first), "follow": self._growing.rows}
