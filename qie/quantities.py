"""Quantities as people read them."""

from __future__ import annotations


def human_bytes(count: float) -> str:
    """1536 -> '1.5 kB', in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def human_count(count: int, unit: str) -> str:
    """(1200, "shard") -> '1,200 shards'."""
    return f"{count:,} {unit}{'' if count == 1 else 's'}"


def human_number(count: float) -> str:
    """1536000 -> '1.5 M'."""
    for unit in ("", " k", " M"):
        if count < 1000:
            return f"{count:.{1 if unit else 0}f}{unit}"
        count /= 1000
    return f"{count:.1f} B"


def human_time(seconds: float) -> str:
    """4000 -> '1 h 6 min'."""
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    if days >= 2:
        return f"{int(days)} d {int(hours % 24)} h"
    if hours >= 1:
        return f"{int(hours)} h {int(minutes % 60)} min"
    return f"{int(minutes)} min {int(seconds % 60)} s" if minutes >= 1 else f"{seconds:.1f} s"
