"""Training on shards while they are still being written.

The first epoch takes samples in the order of their rows. It yields each batch as soon as its last sample is published,
and waits for shards that are still missing. The batches follow from the shards alone, not from the time of
their arrival: every rank, and a resumed run, sees the same. Later epochs are those of any other stream.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from qie.data.plan import Plan, PlanSettings, held_out, sequence_prefix
from qie.data.stream import short_hash
from qie.errors import QieError, UsageError
from qie.recipe import Recipe
from qie.shards.cache import ShardCache
from qie.shards.discovery import published, rows_of
from qie.shards.index import Skipped
from qie.shards.sample_table import Columns
from qie.shards.shard_set import OpenShards, ShardSet, Verify, open_shards
from qie.stores import Folder
from qie.threads import pause
from qie.types import Sample


@dataclass(eq=False)
class GrowingSamples:
    """The samples of rows [0, `rows`) that are published without a gap from row 0 on.

    Attributes:
        folder: where the shards appear.
        rows: how many rows there will be.
        verify, cache: see `ShardSet`.
        timeout_s: how long to wait for the next shard.
        poll_s: seconds between looks.
        alive: raises when the writer has ended.
        current: up to which row shards are known to be what their rows are now; others may be left from an older run.
        say: told every half minute which shard the stream waits for.
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
    def empty(self) -> bool:
        """Whether no sample is there yet."""
        return self._shards is None

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
    def distant(self) -> bool:
        return self._there.distant

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


class GrowingPlans:
    """The plans of samples whose shards are still being written. The first epoch goes in the order of rows.

    Rows for validation are drawn from the first shard, since the others are not known when training starts.

    Raises:
        UsageError: these would be all rows of the first shard.
    """

    def __init__(self, samples: GrowingSamples, settings: PlanSettings) -> None:
        self.samples, self.settings = samples, settings
        while samples.empty:
            samples.wait()
        first = int(np.searchsorted(samples.columns.blocks, 1))
        rows = samples.columns.rows[:first]
        if settings.validation_rows >= len(np.unique(rows)):
            raise UsageError(
                "validation.rows leaves nothing of the first shard, from which they are drawn with --follow",
                expected=f"fewer than {len(np.unique(rows))}",
                found=settings.validation_rows,
            )
        digests = np.array(samples.digests[:first])
        self.validation, self._first_held_out = held_out(digests, rows, settings.validation_rows)
        self.identity = settings.identity | {"samples": short_hash(digests), "follow": samples.rows}
        self._first: tuple[int, Plan] | None = None
        self._fixed: dict[int, Plan] = {}

    @property
    def global_batch_size(self) -> int:
        return self.settings.global_batch_size

    @property
    def held_out(self) -> NDArray[np.bool_]:
        mask = np.zeros(len(self.samples.columns), np.bool_)
        mask[: len(self._first_held_out)] = self._first_held_out
        return mask

    @property
    def whole(self) -> bool:
        return self.samples.complete

    def of(self, epoch: int) -> Plan:
        """Waits for all shards, unless it is the first epoch."""
        if epoch == 0:
            if self._first is None or self._first[0] != self.samples.covered:
                self._first = self.samples.covered, self._sequence()
            return self._first[1]
        while not self.whole:
            self.wait()
        if epoch not in self._fixed:
            while len(self._fixed) > 1:
                del self._fixed[next(iter(self._fixed))]
            self._fixed[epoch] = self.settings.plan(self.samples.columns, epoch, self.held_out)
        return self._fixed[epoch]

    def _sequence(self) -> Plan:
        columns, settings = self.samples.columns, self.settings
        if self.whole:
            return replace(settings, order="sequence", weights={}).plan(columns, 0, self.held_out)
        return sequence_prefix(
            columns,
            global_batch_size=settings.global_batch_size,
            seed=settings.seed,
            epoch=0,
            leave_out=self.held_out,
        )

    def grow(self) -> bool:
        return self.samples.grow()

    def wait(self) -> None:
        self.samples.wait()

    def close(self) -> None:
        self.samples.close()
