"""The rows of a run, as its command line names them."""

from __future__ import annotations

import re

from qie.errors import UsageError
from qie.shards.grid import Range

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
