"""The plan: the list of global batches of one epoch. Pure: numbers in, numbers out, nothing is read.

An epoch is a function of (columns, seed, epoch, global batch size, settings), whoever computes it. A process takes its
slice of each global batch, so the number of processes changes nothing but who computes what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from qie.data.draws import BATCHES, BLOCKS, DRAWS, Numbers, apart, draw, held_out, narrow, permutation, raw_bits, starts
from qie.errors import UsageError
from qie.shards.table import Columns

PLAN_VERSION = 2
"""Raised when the same samples and seed would be ordered otherwise: a breaking change."""

__all__ = ["PLAN_VERSION", "Order", "Plan", "PlannedBatch", "Tail", "held_out", "plan_epoch", "sequence_prefix"]

Tail = Literal["pad", "drop"]
Order = Literal["shuffle", "blocks", "sequence"]

MAX_GLOBAL_BATCH = 65_536

_NAMED_SHAPES = 8


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
        """The part of process `rank` of `world_size`, which divides the batch."""
        share, over = divmod(len(self.positions), world_size)
        assert not over, f"{len(self.positions)} samples for {world_size} processes"
        mine = slice(rank * share, (rank + 1) * share)
        return PlannedBatch(self.positions[mine], self.weights[mine])


@dataclass(frozen=True, eq=False)
class Plan(Sequence[PlannedBatch]):
    """The batches of an epoch, as arrays.

    Attributes:
        positions: [batches, global batch size] int32, or int64 from 2³¹ samples on.
        filled: [batches] how many of a batch's samples are real; those behind repeat them with weight 0.
    """

    positions: Numbers
    filled: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, number: int) -> PlannedBatch: ...

    @overload
    def __getitem__(self, number: slice) -> Plan: ...

    def __getitem__(self, number: int | slice) -> PlannedBatch | Plan:
        if isinstance(number, slice):
            return Plan(self.positions[number], self.filled[number])
        positions, real = self.positions[number].tolist(), int(self.filled[number])
        weights = (len(positions) / real,) * real + (0.0,) * (len(positions) - real)
        return PlannedBatch(tuple(positions), weights)


def plan_epoch(
    columns: Columns,
    *,
    seed: int,
    epoch: int,
    global_batch_size: int,
    tail: Tail = "pad",
    order: Order = "shuffle",
    block_size: int = 16,
    source_weights: Sequence[float] | None = None,
    leave_out: NDArray[np.bool_] | None = None,
    similar_lengths: int = 64,
) -> Plan:
    """The batches of an epoch, each of a single shape.

    Args:
        columns: the samples.
        seed, epoch: decide the order, which rows a fractional weight draws, and which variant of a row is shown.
        global_batch_size: samples per batch over all processes.
        tail: what becomes of the last samples of a shape when they fill no batch: `pad` repeats them with weight 0, so
            that everything drawn is seen; `drop` leaves them out of this epoch. Which they are is left to chance, but
            in a sequence.
        order: `shuffle` everything; `blocks`, for stores where reading far apart is slow: shards are shuffled, and
            samples and batches within each `block_size` of them in turn, what fills no batch going on to the next; or
            `sequence`: samples by position, a batch when its last sample comes, incomplete ones at the end.
        source_weights: of each source, how often an epoch draws each of its rows; None is once. See `draw`.
        leave_out: [N] samples that belong to no batch. A row with nothing else counts for no weight.
        similar_lengths: so many batches of a shape are filled by length, so that they pad little; not in a sequence.

    Raises:
        UsageError: a weight is not positive; the batch is too large; or no batch at all comes out, then it names the
            largest shapes.
    """
    require_batch_size(global_batch_size)
    assert block_size > 0
    drawn, times = draw(columns, seed, epoch, source_weights, leave_out, shuffled=order != "sequence")
    windows: NDArray[Any] = np.zeros(len(drawn), np.uint8)
    if order != "sequence":
        drawn = drawn[permutation(apart(raw_bits(DRAWS, seed, epoch, len(drawn)), times))]
    if order == "blocks":
        windows = _windows(columns.blocks, seed, epoch, block_size)[drawn]
        by_window = np.argsort(windows, kind="stable")
        drawn, windows = drawn[by_window], windows[by_window]
    similar = 1 if order == "sequence" else similar_lengths
    most = 1 if times is None else int(times.max(initial=1))
    batches, filled, last = _batches(columns, drawn, windows, global_batch_size, tail, similar, most)
    if not len(filled):
        raise _no_batches(columns, drawn, global_batch_size)
    if order == "sequence":
        when = np.argsort(last, kind="stable")
    else:
        by_chance = permutation(raw_bits(BATCHES, seed, epoch, len(filled)))
        when = by_chance[np.argsort(windows[last[by_chance]], kind="stable")]
    return Plan(drawn[batches[when]], filled[when])


def sequence_prefix(
    columns: Columns,
    *,
    global_batch_size: int,
    seed: int = 0,
    epoch: int = 0,
    leave_out: NDArray[np.bool_] | None = None,
) -> Plan:
    """The batches of `order="sequence"` that are complete, perhaps none: what stays when more samples come behind.

    For whoever follows shards that are still being written. `seed` and `epoch` decide only which variants are shown.
    """
    require_batch_size(global_batch_size)
    drawn, _ = draw(columns, seed, epoch, None, leave_out, shuffled=False)
    windows = np.zeros(len(drawn), np.uint8)
    batches, filled, last = _batches(columns, drawn, windows, global_batch_size, "drop", 1, 1)
    when = np.argsort(last)
    return Plan(drawn[batches[when]], filled[when])


def require_batch_size(global_batch_size: int) -> None:
    """Raise UsageError for a global batch that no plan can hold: a place in it costs memory, filled or not."""
    assert global_batch_size > 0
    if global_batch_size > MAX_GLOBAL_BATCH:
        raise UsageError(
            "the global batch is too large",
            expected=f"at most {MAX_GLOBAL_BATCH} samples: data.batch_size, or --batch-size, times processes",
            found=global_batch_size,
            hint="lower the batch size",
        )


def _windows(blocks: NDArray[np.int32], seed: int, epoch: int, size: int) -> NDArray[Any]:
    """[N] which window of `size` shards, in an order by chance, each sample's shard is in."""
    first = starts(blocks)
    windows = np.empty(len(first), np.int64)
    windows[permutation(raw_bits(BLOCKS, seed, epoch, len(first)))] = np.arange(len(first)) // size
    return narrow(np.repeat(windows, np.diff(first, append=len(blocks))))


def _batches(
    columns: Columns, drawn: Numbers, windows: NDArray[Any], size: int, tail: Tail, similar: int, most: int
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
    """Batches of indices into `drawn`, how many of each are real, and the index at which each was complete.

    Args:
        windows: the window of each draw, in their order.
        similar: stretches of so many batches are sorted by length.
        most: how often a row is drawn at most; stretches are made so short that its draws are in different ones.
    """
    place = {shape: number for number, shape in enumerate(sorted(set(columns.shape_names)))}
    shapes = narrow(np.array([place[shape] for shape in columns.shape_names], np.int64))[columns.shapes[drawn]]
    by_shape = np.argsort(shapes, kind="stable")
    counts = np.bincount(shapes, minlength=len(place))
    rest = counts % size
    incomplete = np.flatnonzero(rest)
    # The tail is what the shuffle put last. It is cut off before sorting by length, or it would be the longest.
    column, real = np.arange(size), rest[incomplete, None]
    tails = (np.cumsum(counts) - rest)[incomplete, None] + column % real
    whole = np.ones(len(drawn), np.bool_)
    whole[tails[column < real]] = False
    full = by_shape[whole].reshape(-1, size)
    last = full[:, -1].copy()
    if similar > 1:
        full = _sorted_by_length(full, columns.lengths[drawn[full]], shapes[last], windows[last], similar, most)
    filled = np.full(len(full), size, np.int32)
    if tail == "drop":
        return full, filled, last
    # A tail is filled with its own samples, which are read anyway and pad nothing further.
    return (
        np.concatenate([full, by_shape[tails]]),
        np.concatenate([filled, rest[incomplete].astype(np.int32)]),
        np.concatenate([last, np.full(len(tails), len(drawn) - 1)]),
    )


def _sorted_by_length(
    full: NDArray[np.int64],
    lengths: NDArray[np.int32],
    shapes: NDArray[Any],
    windows: NDArray[Any],
    similar: int,
    most: int,
) -> NDArray[np.int64]:
    """Batches [B, size] filled anew by length, in stretches of at most `similar` of one shape and window."""
    runs = np.flatnonzero(np.append(True, (shapes[1:] != shapes[:-1]) | (windows[1:] != windows[:-1]))[: len(full)])
    sizes = np.diff(runs, append=len(full))
    stretch = np.repeat(np.clip(sizes // most, 1, similar), sizes)
    number = np.cumsum((np.arange(len(full)) - np.repeat(runs, sizes)) % stretch == 0)
    by_length = np.lexsort((narrow(lengths.ravel()), np.repeat(narrow(number), full.shape[1])))
    return full.ravel()[by_length].reshape(full.shape)


def _no_batches(columns: Columns, drawn: Numbers, size: int) -> UsageError:
    counts = np.bincount(columns.shapes[drawn], minlength=len(columns.shape_names)).tolist()
    found = sorted((-count, shape) for count, shape in zip(counts, columns.shape_names, strict=True) if count)
    named = [f"{-count} of {shape}" for count, shape in found[:_NAMED_SHAPES]]
    more = [f"and {len(found) - _NAMED_SHAPES} more shapes"] if len(found) > _NAMED_SHAPES else []
    return UsageError(
        "0 batches: no shape has enough samples for one",
        expected=f"{size} samples of one shape",
        found=", ".join(named + more) or "no samples",
        hint="lower data.batch_size, or set data.tail to pad",
    )
