"""The stream: the one iterable that training reads. It turns samples, and the plans of their epochs, into batches.

Samples lie in shards (`qie.shards.shard_set.ShardSet`) or are encoded from rows (`qie.data.live.LiveSamples`); plans
are known from the start (`FixedPlans`) or grow with their shards (`qie.data.follow.GrowingPlans`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from qie.data.batch import collate
from qie.data.kept_samples import KeptSamples
from qie.data.plan import Plan, PlannedBatch, count_rows, held_out
from qie.data.plan_settings import PlanSettings
from qie.data.read_ahead import ReadAhead
from qie.data.windows import WindowedPlan
from qie.errors import UsageError
from qie.quantities import human_count
from qie.recipe import Recipe
from qie.shards.cache import ShardCache
from qie.shards.excluded import EXCLUDED_NAME, positions_of
from qie.shards.index import Skipped
from qie.shards.reader import Tar
from qie.shards.sample_table import Columns
from qie.threads import Threads, submit
from qie.types import Batch, Sample

_END = PlannedBatch((), ())
EMPTY_EPOCHS = 100
"""After so many epochs without a sample that is not excluded, none is expected any more."""
REQUESTS = 16
"""Samples of a stream that are asked of a store at once: they fill a link of 1 GB/s at 160 ms for 10 MB each."""


class Samples(Protocol):
    """Samples by position, and the facts about them that a plan needs."""

    @property
    def columns(self) -> Columns: ...

    @property
    def digests(self) -> NDArray[np.uint8]:
        """[N, 32]: the keys."""

    @property
    def digest(self) -> str:
        """SHA-256 of the keys, 64 hex characters."""

    @property
    def recipe(self) -> Recipe: ...

    @property
    def skipped(self) -> Sequence[Skipped]:
        """Rows that are not among the samples, with reasons."""

    @property
    def excluded(self) -> frozenset[bytes]:
        """Keys, 32 bytes each, of samples that are left out of the batches of a plan that is made of all."""

    @property
    def masked(self) -> bool:
        """Whether a sample has a loss mask."""

    @property
    def paired(self) -> NDArray[np.bool_]:
        """[N]: whether a sample has a rejected target."""

    @property
    def distant(self) -> bool:
        """Whether `fetch` mostly waits, for a store: then many may wait at once."""

    @property
    def copies(self) -> ShardCache | None:
        """Where shards are copied to from a store, whole; None if none is."""

    def copied_tar(self, position: int) -> Tar | None:
        """The tar that is copied for the sample at a position; None without one."""

    def fetch(self, position: int, *, own: bool = False) -> Sample:
        """The sample at a position, with memory of its own if `own` asks for it and it can be; called from several
        threads."""


class Plans(Protocol):
    """The plans of a stream's epochs."""

    settings: PlanSettings

    @property
    def global_batch_size(self) -> int: ...

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the batches: a saved position is valid for plans of equal identity."""

    @property
    def held_out(self) -> NDArray[np.int64]:
        """Positions of the samples that no plan holds, rising."""

    @property
    def validation(self) -> Sequence[int]:
        """Positions of the validation samples, one for each row that is held out."""

    def of(self, epoch: int) -> Plan | WindowedPlan:
        """The plan of an epoch: its first batches, if it is not whole yet."""

    @property
    def whole(self) -> bool:
        """Whether plans are whole. If not, more of the first one comes."""

    def grow(self) -> bool:
        """Take in what came for a plan that is not whole; whether there was anything."""

    def wait(self) -> None:
        """Return when there is more of a plan that is not whole."""

    def close(self) -> None:
        """Stop what makes plans grow."""


class FixedPlans:
    """The plans of samples that are all known.

    Raises:
        UsageError: a weight is of no source, validation leaves nothing to train on, or there is no batch.
    """

    def __init__(self, samples: Samples, settings: PlanSettings) -> None:
        self.samples, self.settings = samples, settings
        columns, digests = samples.columns, samples.digests
        for name, weight in settings.weights.items():
            if weight != 1 and name not in columns.source_names:
                raise UsageError(
                    f"no sample comes from the source {name!r}, which has a weight",
                    expected=f"one of {', '.join(map(repr, columns.source_names))}",
                    hint="name the sources as they were named when the shards were written",
                )
        self.validation, rows = held_out(digests, columns, settings.validation_rows)
        self.held_out = _with_equals(rows, digests)
        if 0 < len(columns) == len(self.held_out):
            raise UsageError(
                "validation.rows leaves nothing to train on",
                expected=f"fewer than {count_rows(columns)} rows",
                found=settings.validation_rows,
            )
        self._columns = columns
        self._plans: dict[int, Plan | WindowedPlan] = {}
        self.of(0)

    @property
    def global_batch_size(self) -> int:
        return self.settings.global_batch_size

    @property
    def whole(self) -> bool:
        return True

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Hashed once: of many samples, to hash their keys takes longer than to read a batch."""
        columns = self._columns
        return self.settings.identity(len(columns), columns.ends) | {"samples": self.samples.digest[:16]}

    def of(self, epoch: int) -> Plan | WindowedPlan:
        """Two are kept: at an epoch's end, batches of the next one are on their way."""
        if epoch not in self._plans:
            while len(self._plans) > 1:
                del self._plans[next(iter(self._plans))]
            self._plans[epoch] = self.settings.plan(self._columns, epoch, self.held_out)
        return self._plans[epoch]

    def grow(self) -> bool:
        return False

    def wait(self) -> None:
        """There always is a further batch."""

    def close(self) -> None:
        """Nothing makes these plans grow."""


@dataclass(eq=False)
class Stream(IterableDataset[Batch]):
    """Batches of `samples`, in the order of `plans`. Iterating yields the remaining batches of the current epoch;
    iterating again, those of the next one.

    Its whole state is (epoch, batches yielded in it). Batches that are prepared in the background are not part of
    it. It replaces a torch DataLoader, or is wrapped by one with `batch_size=None` and no workers.

    Attributes:
        samples: the samples of all batches.
        plans: which samples each batch of each epoch holds.
        rank, world_size: which slice of each global batch this process takes.
        prefetch: batches that are prepared ahead.
        threads: how many are prepared at once.
        pinned: batches are in page-locked memory; by default when there is a GPU.
        accepted: how the recipe of the samples differs from the configuration's, which its owner accepts; for reports.
        kept: keeps samples in memory after their first use; None reads them again.
        excluded: keys of samples that are left out; None for what `samples` says. All processes need the same.
        preserved: names of sources that the model is to treat as before; its batches say which samples are theirs.
    """

    samples: Samples
    plans: Plans
    rank: int = 0
    world_size: int = 1
    prefetch: int = 2
    threads: int = 2
    pinned: bool = field(default_factory=torch.cuda.is_available)
    accepted: tuple[str, ...] = ()
    kept: KeptSamples | None = None
    excluded: frozenset[bytes] | None = None
    preserved: frozenset[str] = frozenset()
    epoch: int = field(default=0, init=False)
    position: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise UsageError("threads is too small", expected="at least 1", found=self.threads)
        require_rank(self.rank, self.world_size)
        assert self.plans.global_batch_size % self.world_size == 0
        if self.excluded is None:
            self.excluded = self.samples.excluded
        if self.preserved and self.plans.whole:
            _require_preserved(self.samples, self.preserved)

    @classmethod
    def over(
        cls,
        samples: Samples,
        batch_size: int = 1,
        *,
        rank: int = 0,
        world_size: int = 1,
        prefetch: int = 2,
        threads: int = 2,
        accepted: tuple[str, ...] = (),
        kept: KeptSamples | None = None,
        preserved: Collection[str] = (),
        **settings: Any,
    ) -> Self:
        """The stream of samples that are all known.

        Args:
            batch_size: samples per batch of this process.
            settings: further fields of `PlanSettings`, such as seed, tail, order, weights and validation_rows.
        """
        require_rank(rank, world_size)
        plans = FixedPlans(samples, PlanSettings(batch_size * world_size, **settings))
        return cls(
            samples,
            plans,
            rank,
            world_size,
            prefetch,
            threads,
            accepted=accepted,
            kept=kept,
            preserved=frozenset(preserved),
        )

    def __repr__(self) -> str:
        at = f"epoch {self.epoch}, position {self.position}, seed {self.plans.settings.seed}"
        rank = f", rank {self.rank} of {self.world_size}" if self.world_size > 1 else ""
        samples, size = human_count(len(self.samples.columns), "sample"), self.plans.global_batch_size
        return f"<Stream of {samples} in batches of {size}: {at}{rank}>"

    @property
    def plan(self) -> Plan | WindowedPlan:
        """All batches of the current epoch, of all processes."""
        return self.plans.of(self.epoch)

    @property
    def held_out(self) -> NDArray[np.int64]:
        """Positions of the samples that no batch of training holds, rising."""
        return self.plans.held_out

    def __len__(self) -> int:
        """Batches of the current epoch's plan. One whose samples are all excluded is not yielded."""
        return len(self.plan)

    def count(self, epochs: int) -> int:
        """Batches of the first so many epochs' plans, of samples that are all known; nothing is planned."""
        return self.plans.settings.count(self.samples.columns, epochs, self.held_out)

    def __iter__(self) -> Iterator[Batch]:
        return self._iter_batches(endless=False)

    def forever(self, needed: int = 1 << 62) -> Generator[Batch]:
        """Batches from the current position on, epoch after epoch, without end or pause between them.

        Args:
            needed: so many will be asked for. None behind them is prepared, or fetched, before it is.
        """
        return self._iter_batches(endless=True, needed=needed)

    def _iter_batches(self, *, endless: bool, needed: int = 1 << 62) -> Generator[Batch]:
        if get_worker_info() is not None:
            raise UsageError(
                "a stream cannot be used in DataLoader workers: each would yield every batch",
                hint="set num_workers=0: the stream itself prepares batches ahead",
            )
        self._pass_empty()
        # The inner one ends first: batches that are being prepared get what they asked for.
        with (
            ThreadPoolExecutor(REQUESTS, thread_name_prefix="qie-request") as requests,
            ThreadPoolExecutor(self.threads, thread_name_prefix="qie-stream") as pool,
            ReadAhead(
                self._iter_planned(endless), self._copied_tars, self.samples.copies, lambda: self.plans.whole, needed
            ) as upcoming,
        ):
            ahead: deque[Future[Batch]] = deque()
            loads, ended = Threads(), False
            try:
                while True:
                    while not ended and len(ahead) < max(min(self.prefetch + 1, needed), 1):
                        planned = next(upcoming, _END)
                        ended = planned is _END
                        if planned is None or ended:
                            break
                        ahead.append(loads.submit(pool, self.load, planned, requests))
                    if ahead:
                        batch = ahead.popleft().result()
                        needed -= 1
                        self._advance()
                        upcoming.loaded()
                        yield batch
                    elif ended:
                        return
                    elif not self._pass_empty():
                        self.plans.wait()
            finally:
                loads.stop()
                for future in ahead:
                    future.cancel()

    def close(self) -> None:
        """Stop background work for the stream, such as a writer of shards. The stream may yield no more batches."""
        self.plans.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def load(self, planned: PlannedBatch, requests: ThreadPoolExecutor | None = None) -> Batch:
        """The batch of a plan's entry. Samples that lie in a store are asked for at once, by the pool `requests`."""
        positions = list(dict.fromkeys(planned.positions))
        if len(planned.positions) == 1 and not self.kept and not self.pinned:  # it need not be copied once more
            return collate([self.samples.fetch(positions[0], own=True)], planned, self._preserved(planned))
        if requests and len(positions) > 1 and self.samples.distant:
            asked = [submit(requests, self._fetch, position) for position in positions]
            fetched = dict(zip(positions, (request.result() for request in asked), strict=True))
        else:
            fetched = {position: self._fetch(position) for position in positions}
        samples = [fetched[position] for position in planned.positions]
        return collate(samples, planned, self._preserved(planned), pinned=self.pinned)

    def _preserved(self, planned: PlannedBatch) -> tuple[bool, ...]:
        if not self.preserved:
            return ()
        return tuple(self.samples.columns.of_sources(self.preserved, planned.positions).tolist())

    def _fetch(self, position: int) -> Sample:
        read = self.samples.fetch
        return self.kept.fetch(position, read) if self.kept else read(position)

    def _copied_tars(self, planned: PlannedBatch) -> list[Tar]:
        """The tars that are copied for a batch: those of samples that are not kept in memory."""
        positions = [one for one in planned.positions if not (self.kept and self.kept.holds(one))]
        return [tar for tar in map(self.samples.copied_tar, positions) if tar]

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        self.epoch, self.position = epoch, 0

    def validation_batches(self) -> list[PlannedBatch]:
        """The rows that are kept out, each as it is (not its further variants), one per batch, by their keys."""
        return [PlannedBatch((one,), (1.0,)) for one in self.plans.validation if not self.is_excluded(one)]

    def state_dict(self) -> dict[str, Any]:
        """The position of the stream: two integers, and the identity of the plans that they are valid for."""
        return {"epoch": self.epoch, "position": self.position, "of": self.plans.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, with any number of processes and the same global batch size.

        Raises:
            UsageError: the state belongs to other samples, another seed or another batch size; names which.
        """
        if not {"epoch", "position", "of"} <= state.keys() or min(state["epoch"], state["position"]) < 0:
            raise UsageError("this is not the state of a stream", found=state)
        mine, theirs = self.plans.identity, state["of"]
        differing = [name for name in mine if mine[name] != theirs.get(name)]
        if differing:
            raise UsageError(
                f"the saved position belongs to another stream: {', '.join(differing)} changed",
                expected={name: mine[name] for name in differing},
                found={name: theirs.get(name) for name in differing},
                hint="resume with the same data and settings, or start a new run from the saved weights",
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])

    def _iter_planned(self, endless: bool) -> Iterator[PlannedBatch | None]:
        """This process's batches from where the stream stands, without moving it; None while the next is not known, and
        for those of the next epoch but one: plans of two are kept."""
        epoch, start = self.epoch, self.position
        while True:
            plan = self.plans.of(epoch)
            if start < len(plan):
                if planned := self._without_excluded(plan[start]):
                    yield planned.slice(self.rank, self.world_size)
                start += 1
            elif not self.plans.whole:
                if not self.plans.grow():
                    yield None
            elif endless and epoch > self.epoch:
                yield None
            elif endless:
                epoch, start = epoch + 1, 0
            else:
                return

    def _advance(self) -> None:
        self._pass_empty()  # those before the batch that is yielded
        self.position += 1
        if self.excluded:  # and those behind it, so that an epoch ends with its last batch
            while self.position < len(self.plan) and not self._without_excluded(self.plan[self.position]):
                self.position += 1
        if self.plans.whole and self.position >= len(self.plan):
            self.epoch, self.position = self.epoch + 1, 0

    def _pass_empty(self) -> bool:
        """Go on to the next batch that has a sample which is not excluded; whether that is another one.

        Raises:
            UsageError: there is none.
        """
        before = self.epoch, self.position
        while self.excluded and self.epoch - before[0] <= EMPTY_EPOCHS:
            if self.position < len(self.plan):
                if self._without_excluded(self.plan[self.position]):
                    break
                self.position += 1
            elif self.plans.whole:
                self.epoch, self.position = self.epoch + 1, 0
            else:
                break
        if self.epoch - before[0] > EMPTY_EPOCHS:
            raise UsageError(
                "all samples of all batches are excluded",
                expected=f"a sample that {EXCLUDED_NAME} leaves in",
                found=f"{len(self.excluded or ())} keys on the list",
                hint="take some from the list with qie-stats --include",
            )
        return before != (self.epoch, self.position)

    def _without_excluded(self, planned: PlannedBatch) -> PlannedBatch | None:
        """A global batch without excluded samples; None if nothing is left of it."""
        left = planned.without(self.is_excluded) if self.excluded else planned
        return left if left.positions else None

    def is_excluded(self, position: int) -> bool:
        """Whether a sample is left out."""
        return bool(self.excluded) and self.samples.digests[position].tobytes() in (self.excluded or ())


def require_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise UsageError("no such rank", expected=f"0 to {world_size - 1}", found=rank)


def _require_preserved(samples: Samples, preserved: frozenset[str]) -> None:
    """Raise UsageError when a preserved source has no sample, or one that is learnt, too; or when nothing is learnt."""
    columns = samples.columns
    for name in sorted(preserved - set(columns.source_names)):
        raise UsageError(
            f"no sample comes from the source {name!r}, which is to be preserved",
            expected=f"one of {', '.join(map(repr, columns.source_names))}",
            hint="name the sources as they were named when the shards were written",
        )
    mine = columns.of_sources(preserved)
    if mine.all():
        raise UsageError(
            "all samples are of preserved sources",
            expected="samples that are learnt",
            found=", ".join(map(repr, columns.source_names)),
        )
    kept = {digest.tobytes() for digest in samples.digests[mine]}
    if len(both := np.flatnonzero(~mine)[positions_of(samples.digests[~mine], kept)]):
        first = int(both[0])
        raise UsageError(
            f"{len(both)} samples that are learnt are of a preserved source, too",
            where=f"row {columns.rows[first]} of {columns.source_names[columns.sources[first]]!r}, and others",
            expected="other prompts in a preserved source, such as by replace: {sks dog: dog}",
            found="the same images with the same prompt",
            hint="give each learnt prompt a word that replace finds",
        )


def _with_equals(positions: NDArray[np.int64], digests: NDArray[np.uint8]) -> NDArray[np.int64]:
    """With the samples that are kept out, what equals one of them: a variant of a row of other content may."""
    kept_out = {digest.tobytes() for digest in digests[positions]}
    return np.unique(np.concatenate([positions, positions_of(digests, kept_out)]))
