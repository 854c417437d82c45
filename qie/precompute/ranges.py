"""The shards of a run: its range of rows, cut on the grid, around published shards."""

from __future__ import annotations

import re
from collections.abc import Iterable

from qie.errors import UsageError

Range = tuple[int, int]

_PART = re.compile(r"(\d{1,9})/(\d{1,9})", re.ASCII)


def resolve_range(start: int, stop: int | None, rows: int) -> Range:
    """[start, stop) within a source of `rows` rows. Raises UsageError when it holds no row."""
    end = rows if stop is None else min(stop, rows)
    if not 0 <= start < end:
        raise UsageError(
            "the range holds no rows",
            expected=f"0 ≤ start-idx < end-idx, within the source's {rows} rows",
            found=f"--start-idx {start} --end-idx {'(all)' if stop is None else stop}",
        )
    return start, end


def resolve_part(part: str, rows: int, shard_size: int) -> Range:
    """The rows of part "I/N" of a source, from "1/N" to "N/N". Parts are whole shards of the grid and differ by at most
    one shard. They hold every row once; with fewer shards than parts, some parts are empty.

    Raises UsageError when the part does not exist.
    """
    match = _PART.fullmatch(part)
    number, parts = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= parts:
        hint = "of a SLURM array --array=1-64: --part $SLURM_ARRAY_TASK_ID/64"
        raise UsageError("no such part", where="--part", expected="1/N to N/N", found=part, hint=hint)
    shards = -(-rows // shard_size)
    start, stop = (min(shards * end // parts * shard_size, rows) for end in (number - 1, number))
    return start, stop


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
