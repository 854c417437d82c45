"""What a run reports: one JSON line per step in `metrics.jsonl`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from qie.stores import LocalFolder

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class StepMetrics:
    """What one optimizer step reports. Times are wall clock, in seconds; `samples` are this process's."""

    step: int
    epoch: int
    loss: float
    grad_norm: float
    lr: float
    step_time_s: float
    data_wait_s: float
    samples: int


class MetricsFile:
    """`metrics.jsonl` of a run, from `first_step` on: lines of later steps, left by a run that was killed, are dropped.

    With `enabled` false nothing is written.
    """

    def __init__(self, folder: Path, first_step: int, enabled: bool) -> None:
        self._path, self._first_step, self._enabled = folder / METRICS_FILE, first_step, enabled

    def __enter__(self) -> MetricsFile:
        if self._enabled:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            LocalFolder(self._path.parent).write(self._path.name, "".join(self._kept()).encode())
            self._file = self._path.open("a", encoding="utf-8", buffering=1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._enabled:
            self._file.close()

    def write(self, values: dict[str, Any]) -> None:
        if self._enabled:
            self._file.write(json.dumps(values) + "\n")

    def _kept(self) -> list[str]:
        if self._first_step == 0 or not self._path.is_file():
            return []
        return [f"{json.dumps(values)}\n" for values in read_metrics(self._path) if values["step"] <= self._first_step]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; one that was cut short by a kill is left out."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines
