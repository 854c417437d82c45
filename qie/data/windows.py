"""Plans of very many samples, made in two levels: shards by chance, then samples within windows of them.

A plan that is made at once holds every sample of an epoch. A plan in windows holds an order of shards, counts, and the
batches of the two windows that were asked for last. It is the same pure function of (columns, seed, epoch, global batch
size, settings), and any of its batches may be asked for first.

Which samples a window's batches hold is decided by counts, before anything is shuffled. In the order of shards, the
samples of a shape are a sequence; a window takes it up to the last whole batch, and what is left goes on to the next
window. So one pass over the samples, which keeps only counts, tells where each window's batches begin.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from qie.data.plan import (
    BATCHES,
    BLOCKS,
    DRAWS,
    Numbers,
    Order,
    Plan,
    PlannedBatch,
    Tail,
    apart,
    batches_of,
    narrow,
    no_batches,
    permutation,
    position_type,
    raw_bits,
    require_batch_size,
    shape_numbers,
    spread_apart,
    starts,
)
from qie.data.selection import Before, Draws, Selection
from qie.shards.sample_table import Columns

WINDOWS_VERSION = 3
"""Raised when the same samples and seed would be ordered otherwise: a breaking change."""

WINDOW = 2**20
"""Samples that are shuffled together, about."""

_KEPT = 2
"""Windows that are kept: batches are asked for ahead of those that are trained on."""


@dataclass(frozen=True)
class _Contents:
    """Draws of a window, one value each.

    Attributes:
        positions: samples, by their position in the stream.
        blocks: numbers of blocks in the window, in the order of blocks; otherwise 0.
        nth, often: the draw is the n-th of so many of its row or shard, counted from 0.
    """

    positions: Numbers
    blocks: NDArray[Any]
    nth: NDArray[np.integer[Any]]
    often: NDArray[np.integer[Any]]

    def at(self, places: NDArray[np.int64]) -> _Contents:
        return _Contents(self.positions[places], self.blocks[places], self.nth[places], self.often[places])


class WindowedPlan(Sequence[PlannedBatch]):
    """The batches of an epoch, made window by window as they are asked for, in any thread.

    Args:
        columns: the samples. No row lies in two shards. The plan keeps them.
        leave_out: positions of samples that no batch holds, rising.
        window: samples of a window, about: it ends with a shard, in `blocks` with a block. One that has more samples is
            a window of its own.
        others: as for `plan_epoch`. In a `sequence` the batches are those of `plan_epoch`. In `shuffle`, a shard whose
            rows a weight draws several times stands in the order of shards several times.

    Raises:
        UsageError: as `plan_epoch`.
    """

    def __init__(
        self,
        columns: Columns,
        *,
        seed: int,
        epoch: int,
        global_batch_size: int,
        tail: Tail = "pad",
        order: Order = "shuffle",
        block_size: int = 16,
        source_weights: Sequence[float] | None = None,
        leave_out: NDArray[np.int64] | None = None,
        similar_lengths: int = 64,
        window: int | None = None,
    ) -> None:
        require_batch_size(global_batch_size)
        out = np.zeros(0, np.int64) if leave_out is None else leave_out
        self._selection = Selection(columns, seed, epoch, source_weights, out, order == "sequence")
        self._columns, self._chance = columns, (seed, epoch)
        self._size, self._tail, self._order, self._block_size = global_batch_size, tail, order, block_size
        self._similar = 1 if order == "sequence" else similar_lengths
        if not len(columns):
            raise no_batches(columns, np.zeros(len(set(columns.shape_names)), np.int64), global_batch_size)
        self._level = _Level.of(self._selection, order, block_size, window or WINDOW)
        self._shapes = shape_numbers(columns)
        self._before: list[Before] = []
        self._counts = self._counts_in_sequence() if order == "sequence" else self._counts_by_chance()
        self._drawn = self._counts.cumsum(axis=0)
        self._stops = (self._drawn // global_batch_size).sum(axis=1)
        if tail == "pad":
            self._stops[-1] += np.count_nonzero(self._drawn[-1] % global_batch_size)
        if not len(self):
            raise no_batches(columns, self._drawn[-1], global_batch_size)
        self._made: dict[int, Plan] = {}
        self._left: dict[int, Numbers] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._stops[-1])

    @overload
    def __getitem__(self, number: int) -> PlannedBatch: ...

    @overload
    def __getitem__(self, number: slice) -> Plan: ...

    def __getitem__(self, number: int | slice) -> PlannedBatch | Plan:
        if isinstance(number, int):
            plan, place = self._found(range(len(self))[number])
            return plan[place]
        found = [self._found(one) for one in range(len(self))[number]]
        positions = [plan.positions[place] for plan, place in found]
        empty = np.zeros((0, self._size), position_type(self._columns))
        return Plan(
            np.stack(positions) if found else empty, np.array([plan.filled[at] for plan, at in found], np.int32)
        )

    def windows(self) -> Iterator[Plan]:
        """All batches, those of a window at a time."""
        return map(self.window, range(len(self._stops)))

    def window(self, number: int) -> Plan:
        """The batches of a window."""
        with self._lock:
            if number not in self._made:
                made = self._make(number)
                for kept in (self._made, self._left):
                    while len(kept) > _KEPT:
                        del kept[next(iter(kept))]
                self._made[number] = made
            return self._made[number]

    def _found(self, number: int) -> tuple[Plan, int]:
        """The window that holds a batch, and the batch's place in it."""
        window = int(np.searchsorted(self._stops, number, "right"))
        return self.window(window), number - (int(self._stops[window - 1]) if window else 0)

    def _counts_by_chance(self) -> NDArray[np.int64]:
        """[windows, shapes] how many samples are drawn, counted in the order of files, which is faster to read."""
        select, level, shapes = self._selection, self._level, int(self._shapes.max()) + 1
        counts = np.zeros(level.windows * shapes, np.int64)
        for copy in range(1 if level.copies is None else int(select.most.max())):
            windows = level.windows_of(copy)
            for first, stop in select.chunks():
                shards = first + np.flatnonzero(select.most[first:stop] > copy)
                copies = None if level.copies is None else np.full(len(shards), copy)
                drawn = select.draws(shards, copies, None)
                numbers = windows[shards][drawn.places] * shapes + self._shapes_of(drawn.positions)
                counts += np.bincount(numbers, minlength=len(counts))
        return counts.reshape(-1, shapes)

    def _counts_in_sequence(self) -> NDArray[np.int64]:
        """[windows, shapes] how many samples are drawn; notes what comes before each window."""
        counts, before = [], self._selection.before()
        for number in range(self._level.windows):
            self._before.append(before)
            drawn = self._draws(number)
            counts.append(np.bincount(self._shapes_of(drawn.positions), minlength=int(self._shapes.max()) + 1))
            before = before.after(drawn)
        return np.array(counts)

    def _shapes_of(self, positions: Numbers) -> NDArray[Any]:
        return self._shapes[self._columns.shapes[positions]]

    def _draws(self, window: int) -> Draws:
        """What is drawn of the shards of a window."""
        shards, copies = self._level.of_window(window)
        return self._selection.draws(shards, copies, self._before[window] if self._before else None)

    def _make(self, number: int) -> Plan:
        """The batches of a window: as `plan_epoch` makes them of what was left before and is not left over."""
        contents, last = self._contents(number), number == self._level.windows - 1
        if not last:
            left = self._last_of_shapes(contents.positions, self._drawn[number] % self._size)
            self._left[number + 1] = contents.positions[left]
            contents = contents.at(np.delete(np.arange(len(contents.positions)), left))
        if self._order != "sequence":
            raw = raw_bits(DRAWS, *self._chance, len(contents.positions), number)
            by_chance = permutation(spread_apart(raw, contents.nth, contents.often))
            contents = contents.at(by_chance[np.argsort(contents.blocks[by_chance], kind="stable")])
        positions, blocks = contents.positions, contents.blocks
        tail, most = self._tail if last else "drop", int(contents.often.max(initial=1))
        batches, filled, ended = batches_of(self._columns, positions, blocks, self._size, tail, self._similar, most)
        if self._order == "sequence":
            when = np.argsort(ended, kind="stable")
        else:
            by_chance = permutation(raw_bits(BATCHES, *self._chance, len(filled), number))
            when = by_chance[np.argsort(blocks[ended[by_chance]], kind="stable")]
        return Plan(positions[batches[when]], filled[when])

    def _contents(self, window: int) -> _Contents:
        """What the windows before a window left over, and what is drawn of its shards."""
        drawn, left = self._draws(window), self._left_before(window)
        nth, often = (values[drawn.places] for values in self._copies(window))
        if drawn.nth is not None and drawn.often is not None:
            nth, often = drawn.nth, drawn.often
        blocks = drawn.places // np.int32(self._block_size if self._order == "blocks" else len(drawn.places) + 1)
        none = np.zeros(len(left), np.uint8)
        return _Contents(
            np.concatenate([left, drawn.positions]),
            narrow(np.concatenate([none, blocks])),
            np.concatenate([none, nth]),
            np.concatenate([none + np.uint8(1), often]),
        )

    def _copies(self, window: int) -> tuple[NDArray[np.integer[Any]], NDArray[np.integer[Any]]]:
        """[shards of a window] each is the n-th of how many copies of its shard in the window."""
        shards, copies = self._level.of_window(window)
        if copies is None:
            return np.zeros(len(shards), np.uint8), np.ones(len(shards), np.uint8)
        by_shard = np.argsort(shards, kind="stable")
        first = starts(shards[by_shard])
        often = np.diff(first, append=len(shards))
        places = np.empty(len(shards), np.int64)
        places[by_shard] = np.arange(len(shards))
        return places - np.repeat(first, often)[places], np.repeat(often, often)[places]

    def _left_before(self, window: int) -> Numbers:
        """What the windows before one leave over, in their order. Looked for in those that hold any of it."""
        if window in self._left:
            return self._left[window]
        found = [np.zeros(0, position_type(self._columns))]
        missing = self._drawn[window - 1] % self._size if window else np.zeros(1, np.int64)
        while missing.any():
            window -= 1
            taken = np.minimum(self._counts[window], missing)
            if taken.any():
                positions = self._draws(window).positions
                found.append(positions[self._last_of_shapes(positions, taken)])
            missing = missing - taken
        return np.concatenate(found[::-1])

    def _last_of_shapes(self, positions: Numbers, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The last so many of each shape, by their place among the positions."""
        shapes = self._shapes_of(positions)
        by_shape = np.argsort(shapes, kind="stable")
        stops = np.cumsum(np.bincount(shapes, minlength=len(counts)))
        places = np.arange(counts.sum()) + np.repeat(stops - np.cumsum(counts), counts)
        return np.sort(by_shape[places])


@dataclass(frozen=True)
class _Level:
    """The order of an epoch's shards, in which they may stand several times, and the windows into which it is cut.

    Attributes:
        shards: their numbers, in this order.
        copies: which copy of its shard each is; None if all stand once.
        edges: [windows + 1] where windows begin, and the last one ends, in this order.
    """

    shards: Numbers
    copies: NDArray[np.int64] | None
    edges: NDArray[np.int64]

    @classmethod
    def of(cls, select: Selection, order: Order, block_size: int, window: int) -> _Level:
        most = select.most
        several = order == "shuffle" and int(most.max()) > 1
        shards = np.arange(len(most)) if order == "sequence" else _by_chance(select, most if several else None)
        copies = _numbered(shards) if several else None
        # A window is never cut within a block; otherwise a block is a shard.
        step = block_size if order == "blocks" else 1
        sizes = select.sizes(shards) * (1 if several else most[shards])
        sizes = np.add.reduceat(sizes, np.arange(0, len(sizes), step))
        total = int(sizes.sum())
        windows = max(1, round(total / window))
        edges = np.append(starts((np.cumsum(sizes) - sizes) * windows // total) * step, len(shards))
        return cls(shards.astype(np.int32 if len(most) < 2**31 else np.int64), copies, edges)

    @property
    def windows(self) -> int:
        return len(self.edges) - 1

    def windows_of(self, copy: int) -> NDArray[np.int32]:
        """[shards] the window of a copy of each that has so many."""
        windows = np.zeros(int(self.shards.max()) + 1, np.int32)
        numbers = np.repeat(np.arange(self.windows, dtype=np.int32), np.diff(self.edges))
        these = slice(None) if self.copies is None else self.copies == copy
        windows[self.shards[these]] = numbers[these]
        return windows

    def of_window(self, number: int) -> tuple[Numbers, NDArray[np.int64] | None]:
        """The shards of a window, and which copies."""
        these = slice(self.edges[number], self.edges[number + 1])
        return self.shards[these], None if self.copies is None else self.copies[these]


def _by_chance(select: Selection, times: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """The shards in an order by chance, or each so many times in it, far apart."""
    count = len(select.stops) if times is None else int(times.sum())
    order = permutation(apart(raw_bits(BLOCKS, select.seed, select.epoch, count), times))
    return order if times is None else np.repeat(np.arange(len(times)), times)[order]


def _numbered(shards: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each the number of equal ones before it."""
    order = np.argsort(shards, kind="stable")
    first = starts(shards[order])
    numbers = np.empty(len(shards), np.int64)
    numbers[order] = np.arange(len(shards)) - np.repeat(first, np.diff(first, append=len(shards)))
    return numbers
