"""Rows as half-open ranges, and the grid on which they are cut into shards."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Range = tuple[int, int]
"""Rows [start, stop)."""

SHARD_ROWS = 64
"""Rows of a shard, unless one says otherwise."""


def shard_ranges(start: int, stop: int, shard_size: int, published: Iterable[Range]) -> list[Range]:
    """The shards that together hold [start, stop), in order.

    A published shard that begins within the range is one of them; the caller checks whether its rows have changed. The
    other rows are cut at multiples of `shard_size`, so that every split of a dataset on such multiples gives the same
    shards.
    """
    there = sorted((first, last) for first, last in published if first < stop and last > start)
    ranges, at = [], start
    for first, last in [*there, (stop, stop)]:
        while at < first:
            end = min((at // shard_size + 1) * shard_size, first)
            ranges.append((at, end))
            at = end
        if start <= first < last:
            ranges.append((first, last))
        at = max(at, last)
    return ranges


def merged_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Half-open ranges in order, those that touch or overlap as one."""
    result: list[Range] = []
    for start, stop in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result


def count_within(ranges: Iterable[Range]) -> int:
    """How many rows there are in ranges that do not overlap."""
    return sum(stop - start for start, stop in ranges)


def missing_rows(rows: NDArray[np.int64]) -> list[Range]:
    """Ranges [start, stop) of rows from 0 on that are in none of [shards, 2] ranges, though one is of later rows."""
    rows = rows[np.lexsort(rows.T[::-1])]
    ends = np.append(0, np.maximum.accumulate(rows[:, 1])[:-1])[: len(rows)]
    places = np.flatnonzero(rows[:, 0] > ends)
    return list(zip(ends[places].tolist(), rows[places, 0].tolist(), strict=True))


def overlapping(rows: NDArray[np.int64]) -> tuple[int, int] | None:
    """Two of [shards, 2] ranges [start, stop) that share a row; None if none do."""
    order = np.arange(len(rows)) if (rows[1:, 0] >= rows[:-1, 0]).all() else np.lexsort(rows.T[::-1])
    shared = rows[order[1:], 0] < rows[order[:-1], 1]
    if not shared.any():
        return None
    place = int(np.argmax(shared))
    return int(order[place]), int(order[place + 1])
