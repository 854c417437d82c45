"""What a run did, and what it spent its time on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from qie.shards.index import Skipped
from qie.stages import Load


@dataclass
class Report:
    """What a run did, as it goes. Rows of several variants count as one row and as several samples.

    Attributes:
        rows: that are done: in a shard, or skipped.
        encoded: samples that were encoded.
        reused: samples that were there already, in their place or elsewhere.
        skipped: rows, or variants of them, that cannot be encoded.
        shards_written, shards_kept: written; left as they were.
        shards_busy: that another run is writing, for which this one is waiting; 0 at the end.
        bytes_written: of tars.
        clipped: values clipped to FP16's range.
        loads: what each stage did.
        seconds: since the first row; of processes side by side, the longest.
    """

    rows: int = 0
    encoded: int = 0
    reused: int = 0
    shards_written: int = 0
    shards_kept: int = 0
    shards_busy: int = 0
    bytes_written: int = 0
    clipped: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    loads: dict[str, Load] = field(default_factory=dict)
    seconds: float = 0.0

    def __add__(self, other: Report) -> Report:
        """Of two processes side by side."""
        counts = {
            name: getattr(self, name) + getattr(other, name)
            for name in (
                "rows",
                "encoded",
                "reused",
                "shards_written",
                "shards_kept",
                "shards_busy",
                "bytes_written",
                "clipped",
                "skipped",
            )
        }
        loads = {
            name: self.loads.get(name, Load(workers=0)) + other.loads.get(name, Load(workers=0))
            for name in {**self.loads, **other.loads}
        }
        counts["skipped"].sort(key=lambda gone: (gone.row, gone.variant))
        return Report(**counts, loads=loads, seconds=max(self.seconds, other.seconds))

    @property
    def bottleneck(self) -> str | None:
        """The stage that was at work for the largest share of the time; None before anything was done."""
        busiest = max(self.loads, key=lambda name: self.loads[name].share(self.seconds), default=None)
        return busiest if busiest and self.loads[busiest].items else None

    def to_dict(self) -> dict[str, Any]:
        """For a log: counts, rates and the share of time that each stage was at work."""
        return {
            "seconds": round(self.seconds, 3),
            "rows": self.rows,
            "rows_per_s": round(self.rows / self.seconds, 3) if self.seconds else None,
            "encoded": self.encoded,
            "reused": self.reused,
            "skipped": len(self.skipped),
            "shards_written": self.shards_written,
            "shards_kept": self.shards_kept,
            "shards_busy": self.shards_busy,
            "bytes_written": self.bytes_written,
            "clipped": self.clipped,
            "bottleneck": self.bottleneck,
            "stages": {
                name: {
                    "items": load.items,
                    "busy": round(load.share(self.seconds), 4),
                    "items_per_busy_s": round(load.rate, 3) if load.busy_s else None,
                }
                for name, load in self.loads.items()
            },
        }


Progress = Callable[[Report], object]


@dataclass
class Pace:
    """How long a run still takes.

    Of a run that was started again, rows that are there already come first. To compare them is quick and says nothing
    of the others, so once samples are encoded only the time since then counts.

    Attributes:
        total: rows of the run.
        compared, compared_s: rows that were done, and seconds that had passed, before the first sample was encoded.
        remaining_s: about; None before anything is known.
    """

    total: int
    compared: int = 0
    compared_s: float = 0.0
    remaining_s: float | None = None
    _encodes: bool = False

    def at(self, report: Report) -> bool:
        """See how far a run is. True once: when it begins to encode behind rows that are there already."""
        begins = not self._encodes and bool(report.encoded)
        self._encodes = self._encodes or begins
        done, seconds = report.rows, report.seconds
        if self._encodes:
            done, seconds = done - self.compared, seconds - self.compared_s
        else:
            self.compared, self.compared_s = done, seconds
        self.remaining_s = round((self.total - report.rows) * seconds / done, 1) if done else None
        return begins and self.compared > 0

    def to_dict(self) -> dict[str, Any]:
        """For a log, beside the report."""
        return {"rows_total": self.total, "remaining_s": self.remaining_s}
