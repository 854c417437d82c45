"""The plan: the list of batches of one epoch. Pure: numbers in, numbers out, nothing is read.

An epoch's order is a function of (shapes of the samples, seed, epoch, global batch size), whoever computes it. A
process takes its slice of each global batch, so the number of processes changes nothing but who computes what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from qie.errors import UsageError
from qie.types import Shape

PLAN_VERSION = 1
"""Raised when the same samples and seed would be ordered otherwise: a breaking change."""

Tail = Literal["pad", "drop"]


@dataclass(frozen=True)
class PlannedBatch:
    """One global batch.

    Attributes:
        positions: samples, by their position in the stream.
        weights: 0 for a sample that only fills the batch up, and equal for all others, so that the mean of weighted
            losses over the batch, in however many parts it is computed, is the mean loss of the real samples.
    """

    positions: tuple[int, ...]
    weights: tuple[float, ...]

    def slice(self, rank: int, world_size: int) -> PlannedBatch:
        """The part of process `rank` of `world_size`."""
        share = len(self.positions) // world_size
        mine = slice(rank * share, (rank + 1) * share)
        return PlannedBatch(self.positions[mine], self.weights[mine])


def plan_epoch(
    shapes: Sequence[Shape],
    *,
    seed: int,
    epoch: int,
    global_batch_size: int,
    tail: Tail = "pad",
    leave_out: frozenset[int] = frozenset(),
) -> list[PlannedBatch]:
    """The batches of an epoch, every one of a single shape.

    Args:
        shapes: shape of the sample at each position.
        seed, epoch: decide the order.
        global_batch_size: samples per batch over all processes.
        tail: what becomes of the last samples of a shape when they fill no batch: `pad` repeats samples of the shape
            with weight 0, so that every sample is seen exactly once; `drop` leaves them out of this epoch.
        leave_out: positions that belong to no batch, such as those kept for validation.

    Raises:
        UsageError: no batch at all comes out; names the shapes and their numbers of samples.
    """
    buckets: dict[Shape, list[int]] = {}
    for position, shape in enumerate(shapes):
        if position not in leave_out:
            buckets.setdefault(shape, []).append(position)
    # Philox is counter-based: its state is its key, so an epoch's order needs no other epoch's.
    random = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    batches = []
    for shape in sorted(buckets):
        batches += _cut(random.permutation(buckets[shape]).tolist(), global_batch_size, tail)
    if not batches:
        sizes = ", ".join(f"{len(positions)} of {shape}" for shape, positions in sorted(buckets.items()))
        raise UsageError(
            "0 batches: no shape has enough samples for one",
            expected=f"{global_batch_size} samples of one shape",
            found=sizes or "no samples",
            hint="lower data.batch_size, or set data.tail to pad",
        )
    return [batches[number] for number in random.permutation(len(batches))]


def _cut(positions: list[int], size: int, tail: Tail) -> list[PlannedBatch]:
    """Consecutive batches of `size`; the last one by the tail's policy."""
    whole = len(positions) - len(positions) % size
    batches = [PlannedBatch(tuple(positions[start : start + size]), (1.0,) * size) for start in range(0, whole, size)]
    rest = positions[whole:]
    if rest and tail == "pad":
        filling = [positions[number % len(positions)] for number in range(size - len(rest))]
        batches.append(PlannedBatch(tuple(rest + filling), (size / len(rest),) * len(rest) + (0.0,) * len(filling)))
    return batches


def other_versions(rows: Sequence[int], *, seed: int, epoch: int) -> frozenset[int]:
    """Positions to leave out of an epoch so that it has one version of each row, drawn evenly.

    Args:
        rows: the row of the sample at each position; versions of a row have one number.
        seed, epoch: decide which.
    """
    if not rows or len(set(rows)) == len(rows):
        return frozenset()
    order = np.argsort(rows, kind="stable")
    _, starts, counts = np.unique(np.asarray(rows)[order], return_index=True, return_counts=True)
    # Another counter than the order's, which stays what it is without versions.
    random = np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, 1]))
    chosen = order[starts + np.floor(random.random(len(starts)) * counts).astype(np.int64)]
    return frozenset(range(len(rows))) - frozenset(chosen.tolist())


def held_out(keys: Sequence[str], count: int) -> frozenset[int]:
    """Positions of `count` samples to keep out of training: those with the smallest keys.

    A key is a hash, so this is a fair draw; and it is a function of content alone, so the same samples are kept out
    when rows are reordered, and equal samples (equal keys) never stand on both sides.
    """
    chosen = set(sorted(set(keys))[:count])
    return frozenset(position for position, key in enumerate(keys) if key in chosen)
