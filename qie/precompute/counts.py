"""The report of a run: its counts, and where its time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from qie.shards.index import Skipped
from qie.stages import Load


@dataclass
class Report:
    """The counts of a run so far. A row with several variants counts as one row and several samples.

    Attributes:
        rows: in a shard, or skipped.
        encoded: samples encoded by this run.
        reused: samples whose record existed, in their place or elsewhere.
        skipped: rows, or variants of rows, that cannot be encoded.
        shards_written, shards_kept: written by this run; left unchanged.
        shards_busy: shards of another run that this one waits for; 0 at the end.
        bytes_written: of tars.
        clipped: values clipped to FP16's range.
        notes: what encoding did to rows that their owner may want to know -> samples encoded by this run.
        loads: the work of each stage.
        seconds: since the first row; for several processes, the longest.
    """

    rows: int = 0
    encoded: int = 0
    reused: int = 0
    shards_written: int = 0
    shards_kept: int = 0
    shards_busy: int = 0
    bytes_written: int = 0
    clipped: int = 0
    notes: Counter[str] = field(default_factory=Counter)
    skipped: list[Skipped] = field(default_factory=list)
    loads: dict[str, Load] = field(default_factory=dict)
    seconds: float = 0.0

    def __add__(self, other: Report) -> Report:
        """The report of two processes together."""
        return Report.of_all([self, other])

    @classmethod
    def of_all(cls, reports: Sequence[Report]) -> Report:
        """The report of several processes together, each skipped row handled once."""
        whole = cls(seconds=max((report.seconds for report in reports), default=0.0))
        for report in reports:
            for name in _NUMBERS:
                setattr(whole, name, getattr(whole, name) + getattr(report, name))
            whole.notes.update(report.notes)
            whole.skipped += report.skipped
            for name, load in report.loads.items():
                whole.loads[name] = whole.loads.get(name, Load(workers=0)) + load
        whole.skipped.sort(key=lambda gone: (gone.row, gone.variant))
        return whole

    @property
    def bottleneck(self) -> str | None:
        """The stage that worked for the largest share of the time; None before the first row."""
        busiest = max(self.loads, key=lambda name: self.loads[name].share(self.seconds), default=None)
        return busiest if busiest and self.loads[busiest].items else None

    def to_dict(self) -> dict[str, Any]:
        """For a log: counts, rates, and the share of time in which each stage worked."""
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


_NUMBERS = ("rows", "encoded", "reused", "shards_written", "shards_kept", "shards_busy", "bytes_written", "clipped")

OnReport = Callable[[Report], object]


@dataclass
class Pace:
    """The time that remains to a run.

    A run that was started again first compares its published rows. That is quick and says nothing about the others, so
    from the first encoded sample on only the time since then counts.

    Attributes:
        total: rows of the run.
        compared, compared_s: rows done, and seconds passed, before the first sample was encoded.
        remaining_s: about; None before the first row.
    """

    total: int
    compared: int = 0
    compared_s: float = 0.0
    remaining_s: float | None = None
    _encodes: bool = False

    def at(self, report: Report) -> bool:
        """Take in a report. True once: when the run begins to encode after published rows."""
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
        """For a log, next to the report."""
        return {"rows_total": self.total, "remaining_s": self.remaining_s}
