"""A preview of an epoch over shards: steps, padding, incomplete batches and bytes. Reads indexes only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from qie.data.plan import Tail, count_rows, require_batch_size
from qie.data.plan_settings import PlanSettings
from qie.errors import UsageError
from qie.shards.sample_table import Table
from qie.shards.shard_set import ShardSet, open_shards
from qie.stores import File


@dataclass(frozen=True)
class EpochPlan:
    """One epoch of optimizer steps without gradient accumulation.

    Attributes:
        tail: what becomes of samples that fill no batch, as `data.tail`.
        samples: in the shards, one variant of each row.
        steps: global batches.
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
    table = ShardSet(open_shards(indexes)).table
    tails: tuple[Tail, ...] = ("pad", "drop")
    return [_planned(table, tail, batch_size, world, seed) for tail in tails]


def _planned(table: Table, tail: Tail, batch_size: int, world: int, seed: int) -> EpochPlan:
    size, columns = batch_size * world, table.columns
    samples = count_rows(columns)
    try:
        plan = PlanSettings(size, seed, tail).plan(columns, 0, np.zeros(0, np.int64))
    except UsageError:  # no shape fills a batch, and what is left over is dropped
        return EpochPlan(tail, samples, 0, 0, samples, 0, 0, 0.0, 0)
    real = padded = tokens = read = largest = 0
    for part in plan.windows():
        lengths = table.tokens[part.positions].astype(np.int64).reshape(-1, batch_size)
        padded += int(lengths.max(axis=1, initial=0).sum()) * batch_size
        tokens += int(lengths.sum())
        real += int(part.filled.sum())
        step_bytes = table.sizes[part.positions].sum(axis=1)
        read, largest = read + int(step_bytes.sum()), max(largest, int(step_bytes.max(initial=0)))
    return EpochPlan(
        tail=tail,
        samples=samples,
        steps=len(plan),
        fillers=len(plan) * size - real,
        dropped=samples - real,
        tokens=padded,
        padding_tokens=padded - tokens,
        bytes_per_step=read / len(plan),
        largest_step_bytes=largest,
    )
