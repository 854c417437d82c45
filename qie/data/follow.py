"""Training on shards while they are still being written.

The first epoch takes samples in the order of their rows. It yields each batch as soon as its last sample is published,
and waits for shards that are still missing. The batches follow from the shards alone, not from the time of
their arrival: every rank, and a resumed run, sees the same. Later epochs are those of any other stream.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from qie.data.announcements import Announcements
from qie.data.plan import Plan, SequencePrefix, held_out, row_starts
from qie.data.plan_settings import PlanSettings
from qie.data.windows import WindowedPlan
from qie.errors import QieError, UsageError
from qie.recipe import Recipe
from qie.shards.cache import ShardCache
from qie.shards.discovery import published, rows_of
from qie.shards.excluded import excluded_keys
from qie.shards.index import Skipped, shard_stem
from qie.shards.reader import Tar
from qie.shards.sample_table import Columns
from qie.shards.shard_set import OpenShards, ShardSet, Verify, open_by_index, open_shards
from qie.stores import File, Folder
from qie.threads import pause
from qie.types import Sample

SHARDS_A_LOOK = 64
"""So many shards are listed for each look that missed the expected one."""
ASK_S = 0.2
"""Seconds between questions to the process that looks, which cost it 10 µs."""


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
        announcements: by which one process of a run tells the others of shards; without, each looks for itself.
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
    announcements: Announcements | None = None
    covered: int = field(default=0, init=False)
    _empty: list[OpenShards] = field(default_factory=list, init=False, repr=False)
    _shards: ShardSet | None = field(default=None, init=False, repr=False)
    _columns: Columns | None = field(default=None, init=False, repr=False)
    _largest: int = field(default=0, init=False, repr=False)
    _missed: int = field(default=0, init=False, repr=False)
    _closed: threading.Event = field(default_factory=threading.Event, init=False, repr=False)

    def __post_init__(self) -> None:
        self._stopping = finalize(self, self.stop)  # at the latest when the interpreter ends

    def close(self) -> None:
        """Wait no longer, and stop the writer, if it writes for these samples alone."""
        if self.announcements and self.announcements.first and not self._closed.is_set():
            with suppress(QieError):  # the others are gone already
                self.announcements.end()
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
        """Of all samples that are there; only what came since they were last asked for is looked at."""
        table, known = self._there.table, len(self._columns or ())
        if self._columns is None or known < len(table):
            new = table.since(known).columns
            self._columns = replace(
                new,
                shapes=table.shapes,
                rows=table.rows,
                lengths=table.tokens,
                sources=table.sources,
                ends=table.ends,
                null_prompts=new.null_prompts and (self._columns is None or self._columns.null_prompts),
                single=new.single and (self._columns is None or self._columns.single),
                latent_scale=self.recipe.latent_scale,
            )
        return self._columns

    @property
    def digests(self) -> NDArray[np.uint8]:
        return self._there.digests

    @property
    def digest(self) -> str:
        return self._there.digest

    @property
    def recipe(self) -> Recipe:
        return self._there.recipe

    @property
    def skipped(self) -> list[Skipped]:
        return self._there.skipped

    @cached_property
    def excluded(self) -> frozenset[bytes]:
        """Keys on the folder's exclude list, as it was when this was first asked for."""
        return excluded_keys([self.folder])

    @property
    def masked(self) -> bool:
        return self._there.masked

    @property
    def paired(self) -> NDArray[np.bool_]:
        return self._there.paired

    @property
    def distant(self) -> bool:
        return self._there.distant

    @property
    def copies(self) -> ShardCache | None:
        return self._there.copies

    def copied_tar(self, position: int) -> Tar | None:
        return self._there.copied_tar(position)

    @property
    def _asked(self) -> Announcements | None:
        """What tells this process of shards, if another looks for them."""
        return self.announcements if self.announcements and not self.announcements.first else None

    @property
    def _there(self) -> ShardSet:
        assert self._shards is not None, "wait for the first shard before"
        return self._shards

    def fetch(self, position: int, *, own: bool = False) -> Sample:
        return self._there.fetch(position, own=own)

    def grow(self) -> bool:
        """Take in what was published meanwhile; whether there was anything."""
        new = list(self._iter_told(self._asked)) if self._asked else self._found()
        if self._shards is not None and new:
            self._shards.append(new)
        elif any(len(part.table) for part in new):
            self._shards = ShardSet(self._empty + new, self.verify)
        else:
            self._empty += new
        return bool(new)

    def _iter_told(self, told: Announcements) -> Iterator[OpenShards]:
        """The next shards, of those that the first process has found."""
        while name := told.next():
            index = File(self.folder, name)
            try:
                shard = open_by_index(index, self.cache)
            except QieError:
                if index.size() is None:  # not seen from this machine yet, as on NFS
                    return
                raise
            self._takes(index, self.current())
            told.done()
            yield shard

    def _found(self) -> list[OpenShards]:
        """The next shards, after a look at the folder; others are told before they are opened."""
        current = self.current()
        try:
            new = [open_by_index(index, self.cache) for index in self._iter_expected(current)]
            if new or self.complete:
                return new
            listed = self._listed(current)
        finally:
            if self.announcements:
                self.announcements.send()
        return list(open_shards(listed, self.cache))

    def _iter_expected(self, current: int) -> Iterator[File]:
        """The next shards by the names that they have on the grid of those before, while they are there."""
        while self._largest and not self.complete:
            stop = min((self.covered // self._largest + 1) * self._largest, self.rows)
            index = File(self.folder, f"{shard_stem(self.covered, stop)}.json")
            if index.size() is None or not self._takes(index, current):
                return
            yield index

    def _listed(self, current: int) -> list[File]:
        """The next shards of the folder, whatever their names.

        To list a full folder takes long, and a shard that is not on the grid is rare: the more shards there are, the
        more looks for the expected one come first.
        """
        self._missed += 1
        if self._missed * self._largest * SHARDS_A_LOOK < self.covered:
            return []
        self._missed = 0
        return [index for index in published(self.folder) if self._takes(index, current)]

    def _takes(self, index: File, current: int) -> bool:
        start, stop = rows_of(index)
        if start != self.covered or stop > current:
            return False
        self.covered, self._largest, self._missed = stop, max(self._largest, stop - start), 0
        if self.announcements and self.announcements.first:
            self.announcements.add(index.name)
        return True

    def wait(self) -> None:
        """Return when there is more.

        Raises:
            QieError: nothing came for `timeout_s`, all shards came and hold no samples, or the stream was closed.
        """
        started = told = time.monotonic()
        while not self.grow():
            self.alive()
            self._require_more()
            now = time.monotonic()
            if now - started > self.timeout_s:
                if self._looked_once_more():
                    return
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
            pause(min(self.poll_s, ASK_S) if self._asked else self.poll_s)
            if self._closed.is_set():
                raise QieError("the stream was closed while it waited for a shard", where=self.folder)

    def _looked_once_more(self) -> bool:
        """Whether a look at all names finds more. Whoever was told of shards looks for itself from now on: the first
        process may be saving for hours."""
        if self._asked:
            self.announcements = None
        self._missed = self.rows
        return self.grow()

    def _require_more(self) -> None:
        told = self._asked
        if told and told.ended and told.next() is None:
            raise QieError(
                "the first process of the run looks for no more shards",
                where=self.folder,
                expected=f"a shard that starts at row {self.covered}, of {self.rows}",
                hint="see what it said when it ended",
            )


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
        first = int(samples.columns.ends[0])
        rows = len(row_starts(samples.columns, 0, first))
        if settings.validation_rows >= rows:
            raise UsageError(
                "validation.rows leaves nothing of the first shard, from which they are drawn with --follow",
                expected=f"fewer than {rows}",
                found=settings.validation_rows,
            )
        digests = np.array(samples.digests[:first])
        self.validation, self.held_out = held_out(digests, samples.columns, settings.validation_rows)
        of_first = hashlib.sha256(digests.data).hexdigest()[:16]
        self.identity = settings.identity(samples.rows) | {"samples": of_first, "follow": samples.rows}
        self._first: tuple[int, Plan | WindowedPlan] | None = None
        self._prefix = SequencePrefix(settings.global_batch_size, settings.seed)
        self._fixed: dict[int, Plan | WindowedPlan] = {}

    @property
    def global_batch_size(self) -> int:
        return self.settings.global_batch_size

    @property
    def whole(self) -> bool:
        return self.samples.complete

    def of(self, epoch: int) -> Plan | WindowedPlan:
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

    def _sequence(self) -> Plan | WindowedPlan:
        columns, settings = self.samples.columns, self.settings
        if self.whole:
            return replace(settings, order="sequence", weights={}).plan(columns, 0, self.held_out)
        return self._prefix.extend(columns, self.held_out)

    def grow(self) -> bool:
        return self.samples.grow()

    def wait(self) -> None:
        self.samples.wait()

    def close(self) -> None:
        self.samples.close()
