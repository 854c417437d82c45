"""A preview of an epoch over shards: steps, padding, incomplete batches and bytes. Reads indexes only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qie.data.plan import Numbers, Plan, Tail, count_rows, require_batch_size
from qie.data.plan_settings import PlanSettings
from qie.errors import UsageError
from qie.shards.excluded import positions_of
from qie.shards.sample_table import Columns, Table
from qie.shards.shard_set import ShardSet, open_shards
from qie.stores import File


@dataclass(frozen=True)
class EpochPlan:
    """One epoch of optimizer steps without gradient accumulation.

    Attributes:
        tail: what becomes of samples that fill no batch, as `data.tail`.
        samples: in the shards, one variant of each row, without those that exclude lists leave out.
        steps: global batches with a sample that is not left out.
        fillers: places in them that repeat a sample with weight 0.
        dropped: samples that this epoch does not see.
        tokens: of prompts, padding included: in each process's batches all are as long as the longest.
        padding_tokens: of these, padding.
        bytes_per_step, largest_step_bytes: of the records that a step reads, in all processes: mean and largest.
    """

    tail: str
    samples: int
    steps: int
    fillers: int
    dropped: int
    tokens: int
    padding_tokens: int
    bytes_per_step: float
    largest_step_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"padding": self.padding}

    @property
    def padding(self) -> float:
        """The share of padding among all prompt tokens, 0 to 1."""
        return self.padding_tokens / self.tokens if self.tokens else 0.0


def preview_epoch(indexes: Sequence[File], *, batch_size: int, world: int, seed: int = 0) -> list[EpochPlan]:
    """The first epoch over shards, for either treatment of the tail.

    Args:
        indexes: their index files, or what a folder's compacted index says of them.
        batch_size: samples per batch of a process.
        world: processes.
        seed: decides the order, and with it a little of the padding.

    Raises:
        RecipeMismatchError: the shards are of several recipes.
        ShardError: an index is damaged, or the shards hold no sample.
        UsageError: the global batch is too large.
    """
    require_batch_size(batch_size * world)
    shards = ShardSet(open_shards(indexes))
    excluded = positions_of(shards.digests, shards.excluded)
    tails: tuple[Tail, ...] = ("pad", "drop")
    return [_planned(shards.table, tail, batch_size, world, seed, excluded) for tail in tails]


def _planned(
    table: Table, tail: Tail, batch_size: int, world: int, seed: int, excluded: NDArray[np.int64]
) -> EpochPlan:
    size, columns = batch_size * world, table.columns
    samples = count_rows(columns) - _rows_without(columns, excluded)
    try:
        plan = PlanSettings(size, seed, tail).plan(columns, 0, np.zeros(0, np.int64))
    except UsageError:  # no shape fills a batch, and what is left over is dropped
        return EpochPlan(tail, samples, 0, 0, samples, 0, 0, 0.0, 0)
    steps = real = padded = tokens = read = largest = 0
    for part in plan.windows():
        positions, filled = _without(part, excluded) if len(excluded) else (part.positions, part.filled)
        lengths = table.tokens[positions].astype(np.int64).reshape(-1, batch_size)
        padded += int(lengths.max(axis=1, initial=0).sum()) * batch_size
        tokens += int(lengths.sum())
        steps, real = steps + len(filled), real + int(filled.sum())
        step_bytes = table.sizes[positions].sum(axis=1)
        read, largest = read + int(step_bytes.sum()), max(largest, int(step_bytes.max(initial=0)))
    return EpochPlan(
        tail=tail,
        samples=samples,
        steps=steps,
        fillers=steps * size - real,
        dropped=samples - real,
        tokens=padded,
        padding_tokens=padded - tokens,
        bytes_per_step=read / steps if steps else 0.0,
        largest_step_bytes=largest,
    )


def _without(plan: Plan, excluded: NDArray[np.int64]) -> tuple[Numbers, NDArray[np.int32]]:
    """The positions of batches, and how many are real, as a stream makes them of a plan: see `PlannedBatch.without`."""
    positions, filled = plan.positions.copy(), plan.filled.copy()
    gone = set(excluded.tolist())
    for number in np.flatnonzero(np.isin(positions, excluded).any(axis=1)).tolist():
        left = plan[number].without(gone.__contains__)
        filled[number] = sum(weight > 0 for weight in left.weights)
        positions[number] = left.positions or positions[number]
    return positions[filled > 0], filled[filled > 0]


def _rows_without(columns: Columns, excluded: NDArray[np.int64]) -> int:
    """How many rows have no variant left. A row of which an epoch draws an excluded variant is not among them."""
    numbers, left = np.unique(columns.numbers[excluded], return_counts=True)
    return int(np.count_nonzero(left == np.bincount(columns.numbers)[numbers])) if len(excluded) else 0
