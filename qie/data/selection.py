"""Which samples an epoch draws of any shards, from these alone: the selection behind plans in windows.

Whether a row is drawn and which of its variants is shown depend on the position of the row's first sample, not on how
many rows come before: a row of weight 0.5 comes every other epoch, whatever else there is. Only in a sequence do they
follow the numbers of rows and draws before, so that it equals the one that `qie.data.plan.plan_epoch` makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import floor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qie.data.plan import COPIES, PASSES, VARIANTS, Numbers, exact_weight, position_type, raw_bits
from qie.shards.sample_table import CHUNK, Columns


@dataclass(frozen=True)
class Draws:
    """Samples that an epoch draws of a list of shards, one value each, in the order of shards and rows.

    Attributes:
        positions: samples, by their position in the stream.
        places: the place of the sample's shard in the list.
        nth, often: the draw is the n-th of so many of its row, counted from 0; None where none comes twice.
        rows: how many rows of each source there are, in a sequence where they count.
    """

    positions: Numbers
    places: NDArray[np.int32]
    nth: NDArray[np.int64] | None
    often: NDArray[np.int64] | None
    rows: NDArray[np.int64]


@dataclass(frozen=True)
class Before:
    """What comes before a shard of a sequence: rows by source, and draws."""

    rows: NDArray[np.int64]
    draws: int = 0

    def after(self, drawn: Draws) -> Before:
        return Before(self.rows + drawn.rows, self.draws + len(drawn.positions))


@dataclass(frozen=True, eq=False)
class Selection:
    """The samples that an epoch draws.

    Attributes:
        columns: all samples. No row lies in two shards.
        seed, epoch: decide which rows a fractional weight draws, and which variant of a row is shown.
        source_weights: of each source, how often an epoch draws each of its rows; None is once.
        leave_out: positions that are not drawn, rising.
        sequence: rows are drawn in their order.
    """

    columns: Columns
    seed: int
    epoch: int
    source_weights: Sequence[float] | None
    leave_out: NDArray[np.int64]
    sequence: bool

    @cached_property
    def stops(self) -> NDArray[np.int64]:
        """[shards] where the samples of a shard end, of those that have any: these are numbered from 0."""
        filled = np.diff(self.columns.ends, prepend=0) > 0
        return self.columns.ends if filled.all() else self.columns.ends[filled]

    def begins(self, shards: Numbers) -> NDArray[np.int64]:
        """Where the samples of some shards begin."""
        return np.where(shards > 0, self.stops[shards - 1], 0)

    def sizes(self, shards: Numbers) -> NDArray[np.int64]:
        """How many these samples are."""
        return self.stops[shards] - self.begins(shards)

    @cached_property
    def weights(self) -> NDArray[np.int64] | None:
        """[2, sources] numerators and denominators; None if all weights are 1."""
        exact = [exact_weight(weight) for weight in self.source_weights or ()]
        if all(weight == 1 for weight in exact):
            return None
        return np.array([weight.as_integer_ratio() for weight in exact], np.int64).T

    @cached_property
    def most(self) -> NDArray[np.int64]:
        """[shards] how often a row of each is drawn at most; read-only."""
        often = np.ones(1, np.int64) if self.weights is None else -(-self.weights[0] // self.weights[1])
        if (often == often[0]).all():
            return np.broadcast_to(often[0], len(self.stops))
        most = np.empty(len(self.stops), np.int64)
        for first, stop in self.chunks():
            begins = self.begins(np.arange(first, stop))
            sources = self.columns.sources[begins[0] : self.stops[stop - 1]]
            most[first:stop] = np.maximum.reduceat(often[sources], begins - begins[0])
        return most

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """[sources] how many rows there are that are not left out."""
        rows = np.zeros(len(self.columns.source_names), np.int64)
        for first, stop in self.chunks():
            positions, places = self._samples(np.arange(first, stop))
            rows += self._by_source(positions[self._firsts(positions, places)])
        return rows

    @property
    def plain(self) -> bool:
        """Every sample is drawn once."""
        return self.weights is None and self.columns.single

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Ranges of shards with about `CHUNK` samples."""
        edges = np.searchsorted(self.stops, np.arange(0, len(self.columns), CHUNK), "right")
        return pairwise([*np.unique(edges).tolist(), len(self.stops)])

    def before(self) -> Before:
        """What comes before the first shard of a sequence."""
        return Before(np.zeros(len(self.columns.source_names), np.int64))

    def draws(self, shards: Numbers, copies: NDArray[np.int64] | None, before: Before | None) -> Draws:
        """What is drawn of some shards.

        Args:
            shards: their numbers.
            copies: which of the parts, of about equal size, into which the draws of each shard are split, as many as
                `most` says: no row is drawn twice in one. None: all draws.
            before: in a sequence, what comes before these shards.
        """
        positions, places = self._samples(shards)
        if self.plain:
            return Draws(positions, places, None, None, self.before().rows)
        first = self._firsts(positions, places)
        heads = positions[first].astype(np.int64)
        times, start = self._times(heads, before), np.zeros(len(first), np.int64)
        if copies is not None:
            of_rows = places[first]
            times, start = self._in_copy(heads, times, copies[of_rows], self.most[shards][of_rows])
        row, nth, several = np.arange(len(first)), start, False
        if (times != 1).any():
            row, several = np.repeat(row, times), bool(times.max() > 1)
            nth = np.arange(len(row)) - np.repeat(np.cumsum(times) - times - start, times)
        chosen = first[row]
        if not self.columns.single:
            variants = np.diff(first, append=len(positions))[row]
            chosen = chosen + (self._fractions_of_draws(heads[row], nth, before) * variants >> 32)
        return Draws(
            positions[chosen],
            places[chosen],
            nth if several else None,
            times[row] if several else None,
            self._by_source(heads) if before else self.before().rows,
        )

    def _samples(self, shards: Numbers) -> tuple[Numbers, NDArray[np.int32]]:
        """The samples of shards that are not left out, and the place of each one's shard."""
        sizes, kind = self.sizes(shards), position_type(self.columns)
        shift = self.begins(shards) - (np.cumsum(sizes) - sizes)
        positions = np.arange(sizes.sum(), dtype=kind)
        positions += np.repeat(shift.astype(kind), sizes)
        places = np.repeat(np.arange(len(shards), dtype=np.int32), sizes)
        if len(self.leave_out):
            after = np.searchsorted(self.leave_out, positions, "right")
            kept = self.leave_out[after - 1] != positions
            positions, places = positions[kept], places[kept]
        return positions, places

    def _firsts(self, positions: Numbers, places: NDArray[np.int32]) -> NDArray[np.int64]:
        """Which of the samples are the first of their row."""
        if self.columns.single:
            return np.arange(len(positions))
        rows = self.columns.rows[positions]
        new = np.ones(len(positions), np.bool_)
        new[1:] = (rows[1:] != rows[:-1]) | (places[1:] != places[:-1])
        return np.flatnonzero(new)

    def _by_source(self, heads: Numbers) -> NDArray[np.int64]:
        return np.bincount(self.columns.sources[heads], minlength=len(self.columns.source_names))

    def _times(self, heads: NDArray[np.int64], before: Before | None) -> NDArray[np.int64]:
        """How often each row is drawn, by its first sample.

        A weight of p/q draws a row ⌊(p(e+1)+u)/q⌋ − ⌊(pe+u)/q⌋ times in epoch e, u being any number from 0 to q − 1.
        """
        if self.weights is None:
            return np.ones(len(heads), np.int64)
        sources = self.columns.sources[heads]
        if (sources == sources[:1]).all():
            sources = sources[:1]  # dividing by one number is several times faster
        if (self.weights[1, sources] == 1).all():
            return np.broadcast_to(self.weights[0, sources], len(heads))
        if self.sequence:
            assert before is not None
            return self._times_in_sequence(self.columns.sources[heads], before)
        over = np.array([above * self.epoch % below for above, below in self.weights.T.tolist()], np.int64)
        above, below = self.weights[:, sources]
        over = over[sources] + (_fractions(PASSES, self.seed, 0, heads) * below >> 32)
        times: NDArray[np.int64] = (over + above) // below - over // below
        return times

    def _times_in_sequence(self, sources: NDArray[np.int32], before: Before) -> NDArray[np.int64]:
        """As in `plan_epoch`: a source of n rows is their endless repetition, of which an epoch takes a stretch."""
        exact = [exact_weight(weight) for weight in self.source_weights or ()]
        begin, end = (
            np.array([floor(n * weight * epoch) for n, weight in zip(self.rows.tolist(), exact, strict=True)], np.int64)
            for epoch in (self.epoch, self.epoch + 1)
        )
        by_source = np.argsort(sources, kind="stable")
        counts = np.bincount(sources, minlength=len(exact))
        rank = np.empty(len(sources), np.int64)
        rank[by_source] = np.arange(len(sources)) - np.repeat(np.cumsum(counts) - counts - before.rows, counts)
        n = self.rows[sources]
        times: NDArray[np.int64] = (rank - begin[sources]) // n - (rank - end[sources]) // n
        return times

    def _in_copy(
        self, heads: NDArray[np.int64], times: NDArray[np.int64], copy: NDArray[np.int64], copies: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """How often a row is drawn in one of its shard's copies, 0 or 1, and how often in those before."""
        if (times == copies).all():
            return np.ones(len(heads), np.int64), copy
        by_chance = _fractions(COPIES, self.seed, self.epoch, heads) * copies >> 32
        start = (copy * times + by_chance) // copies
        return ((copy + 1) * times + by_chance) // copies - start, start

    def _fractions_of_draws(
        self, heads: NDArray[np.int64], nth: NDArray[np.int64], before: Before | None
    ) -> NDArray[np.int64]:
        """A random number from 0 to 2³² − 1 for each draw."""
        if before is None:
            return _fractions(VARIANTS, self.seed, self.epoch, heads + (nth << 40))
        raw = raw_bits(VARIANTS, self.seed, self.epoch, len(heads), after=before.draws)
        return (raw >> np.uint64(32)).view(np.int64)


def _fractions(use: int, seed: int, number: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """The upper halves of `raw_at`: fractions of 2³²."""
    return (raw_at(use, seed, number, places) >> np.uint64(32)).view(np.int64)


def raw_at(use: int, seed: int, number: int, places: NDArray[Any]) -> NDArray[np.uint64]:
    """Random numbers of 64 bits by their place in a row of them: any costs the same.

    They are those of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), whose state
    at the start is one of Philox's numbers.
    """
    mixed = (places.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed += raw_bits(use, seed, number, 1)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    return mixed ^ mixed >> np.uint64(31)
