"""The stream: the one iterable that training reads, whether its samples lie in shards or are encoded from rows."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self, get_args

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from qie.data.batches import collate
from qie.data.epoch import PLAN_VERSION, Order, Plan, PlannedBatch, Tail, held_out, plan_epoch
from qie.data.samples import Samples
from qie.errors import UsageError
from qie.threads import submit
from qie.types import Batch

_END = PlannedBatch((), ())


@dataclass(eq=False)
class Stream(IterableDataset[Batch]):
    """Batches of `samples`. Iterated, it gives those of the current epoch that are left; again, those of the next one.

    Its whole state is (epoch, batches handed out in it). What is on its way in the background is not part of it. It
    takes the place of a torch DataLoader, or goes into one with `batch_size=None` and no workers.

    Attributes:
        samples: where they come from.
        batch_size: samples per batch of this process.
        seed: decides every epoch's order.
        tail, order, block_size, similar_lengths: see `plan_epoch`.
        weights: how often the rows of a source are drawn per epoch, by its name; once without.
        validation_rows: number of rows kept out, see `held_out`.
        rank, world_size: which slice of each global batch this process takes.
        prefetch: batches that are prepared ahead.
        threads: how many are prepared at once.
        pinned: batches are in page-locked memory; by default when there is a GPU.
        accepted: how the recipe of the samples differs from the configuration's, which its owner accepts; for reports.
    """

    samples: Samples
    batch_size: int
    seed: int = 0
    tail: Tail = "pad"
    order: Order = "shuffle"
    block_size: int = 16
    similar_lengths: int = 64
    weights: Mapping[str, float] = field(default_factory=dict)
    validation_rows: int = 0
    rank: int = 0
    world_size: int = 1
    prefetch: int = 2
    threads: int = 2
    pinned: bool = field(default_factory=torch.cuda.is_available)
    accepted: tuple[str, ...] = ()
    epoch: int = field(default=0, init=False)
    position: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._check()
        columns, digests = self.samples.columns, self.samples.digests
        self._columns = columns
        unknown = [name for name, weight in self.weights.items() if weight != 1 and name not in columns.source_names]
        if unknown:
            raise UsageError(
                f"no sample is of the source {unknown[0]!r}, which has a weight",
                expected=f"one of {', '.join(map(repr, columns.source_names))}",
                hint="give the sources the names that they had when the shards were written",
            )
        self._validation, self.held_out = held_out(digests, columns.rows, self.validation_rows)
        _hold_out_equals(self.held_out, digests)
        if len(columns) and self.held_out.all():
            raise UsageError(
                "validation.rows leaves nothing to train on",
                expected=f"fewer than {len(np.unique(columns.rows))} rows",
                found=self.validation_rows,
            )
        self._plans: dict[int, Plan] = {}
        self._plan(self.epoch)

    def _check(self) -> None:
        choices = {"tail": get_args(Tail), "order": get_args(Order)}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise UsageError(f"no such {name}", expected=" or ".join(allowed), found=getattr(self, name))
        for name in ("batch_size", "block_size", "threads"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is too small", expected="at least 1", found=getattr(self, name))
        if not 0 <= self.rank < self.world_size:
            raise UsageError("no such rank", expected=f"0 to {self.world_size - 1}", found=self.rank)

    @property
    def plan(self) -> Plan:
        """All batches of the current epoch, of all processes."""
        return self._plan(self.epoch)

    def __len__(self) -> int:
        """Batches of the current epoch."""
        return len(self.plan)

    def __iter__(self) -> Iterator[Batch]:
        return self._iter_batches(endless=False)

    def forever(self) -> Generator[Batch]:
        """Batches from where the stream stands, epoch after epoch, without end or pause between them."""
        return self._iter_batches(endless=True)

    def _iter_batches(self, *, endless: bool) -> Generator[Batch]:
        if get_worker_info() is not None:
            raise UsageError(
                "a stream is not for DataLoader workers: each would give every batch",
                hint="num_workers=0: a stream prepares batches ahead by itself",
            )
        with ThreadPoolExecutor(self.threads, thread_name_prefix="qie-stream") as pool:
            ahead: deque[Future[Batch]] = deque()
            upcoming = self._iter_planned(endless)
            planned: PlannedBatch | None = None
            try:
                while True:
                    while len(ahead) <= self.prefetch and (planned := next(upcoming, _END)):
                        if planned is _END:
                            break
                        ahead.append(submit(pool, self.load, planned))
                    if not ahead and planned is _END:
                        return
                    if not ahead:
                        self._wait()
                        continue
                    batch = ahead.popleft().result()
                    self._advance()
                    yield batch
            finally:
                for future in ahead:
                    future.cancel()

    def close(self) -> None:
        """Stop what works for the stream in the background, such as a writer of shards. No more batches may come."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def load(self, planned: PlannedBatch) -> Batch:
        """The batch of a plan's entry."""
        fetched = {position: self.samples.fetch(position) for position in dict.fromkeys(planned.positions)}
        return collate([fetched[position] for position in planned.positions], planned, pinned=self.pinned)

    def set_epoch(self, epoch: int) -> None:
        """Stand at the start of an epoch."""
        self.epoch, self.position = epoch, 0

    def validation_batches(self) -> list[PlannedBatch]:
        """The rows that are kept out, each as it is (not its further variants), one per batch, by their keys."""
        return [PlannedBatch((position,), (1.0,)) for position in self._validation]

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: two integers, and what they are only valid with."""
        return {"epoch": self.epoch, "position": self.position, "of": self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, with any number of processes of the same global batch size.

        Raises:
            UsageError: the state belongs to other samples, another seed or another batch size; names which.
        """
        if not {"epoch", "position", "of"} <= state.keys() or min(state["epoch"], state["position"]) < 0:
            raise UsageError("this is no position of a stream", found=state)
        mine, theirs = self._identity, state["of"]
        differing = [name for name in mine if mine[name] != theirs.get(name)]
        if differing:
            raise UsageError(
                f"the saved position belongs to another stream: {', '.join(differing)} changed",
                expected={name: mine[name] for name in differing},
                found={name: theirs.get(name) for name in differing},
                hint="resume with the same data and settings, or start a new run from the saved weights",
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])

    def _wait(self) -> None:
        """Until there is a further batch: here, there always is."""

    def _iter_planned(self, endless: bool) -> Iterator[PlannedBatch | None]:
        """This process's batches from where the stream stands, without moving it; None while there is none yet."""
        epoch, start = self.epoch, self.position
        while True:
            plan = self._plan(epoch)
            yield from (plan[number].slice(self.rank, self.world_size) for number in range(start, len(plan)))
            if not endless:
                return
            epoch, start = epoch + 1, 0

    def _advance(self) -> None:
        self.position += 1
        if self.position == len(self.plan):
            self.epoch, self.position = self.epoch + 1, 0

    def _plan(self, epoch: int) -> Plan:
        """The plan of an epoch. Two are kept: at an epoch's end, batches of the next one are on their way."""
        if epoch not in self._plans:
            while len(self._plans) > 1:
                del self._plans[next(iter(self._plans))]
            self._plans[epoch] = plan_epoch(
                self._columns,
                seed=self.seed,
                epoch=epoch,
                global_batch_size=self.batch_size * self.world_size,
                tail=self.tail,
                order=self.order,
                block_size=self.block_size,
                source_weights=[self.weights.get(name, 1.0) for name in self._columns.source_names],
                leave_out=self.held_out,
                similar_lengths=self.similar_lengths,
            )
        return self._plans[epoch]

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """Hashed once: of many samples, to hash their keys takes longer than to read a batch."""
        return self._settings() | {"samples": short_hash(self.samples.digests)}

    def _settings(self) -> dict[str, Any]:
        """What decides the batches, but for the samples."""
        return {
            "seed": self.seed,
            "global_batch_size": self.batch_size * self.world_size,
            "tail": self.tail,
            "order": [self.order, self.block_size, self.similar_lengths],
            "weights": dict(self.weights),
            "validation_rows": self.validation_rows,
            "plan_version": PLAN_VERSION,
        }


def short_hash(digests: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(digests).data).hexdigest()[:16]


def _hold_out_equals(mask: np.ndarray, digests: np.ndarray) -> None:
    """Keep out, too, what equals a sample that is kept out: a variant of a row of other content may."""
    kept_out = {bytes(digest) for digest in digests[mask]}
    if kept_out:
        heads = np.ascontiguousarray(digests[:, :8]).view(np.uint64).ravel()
        # "sort": the other way takes the difference of the largest and the smallest, which NumPy 2.0 lets overflow.
        for position in np.flatnonzero(np.isin(heads, heads[mask], kind="sort") & ~mask):
            mask[position] = bytes(digests[position]) in kept_out
