"""`metrics.jsonl` while a run writes it: each call reads only the lines that are new, and keeps columns of numbers."""

from __future__ import annotations

import json
import math
import os
from array import array
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
COLUMNS = ("loss", "grad_norm", "lr", "samples_per_s", "step_time_s", "data_wait_s", "peak_memory_bytes", "mfu", "time")
LEVELS = 4
"""Losses are also told for this many parts of the noise levels."""
MOST = 1e18
"""A number beyond it is none that a run has."""
MOST_AT_ONCE_BYTES = 1 << 24


class MetricLines:
    """The numbers of a run's steps and validations, by their columns; NaN where a line has no number.

    Attributes:
        steps: of the lines of training steps. columns: their numbers, as many as there are steps.
        levels: losses in each part of the noise levels.
        validations: (step, loss, losses by level).
        damaged: lines that are none of qie's.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS
        self._forget()

    def _forget(self) -> None:
        self.steps = array("q")
        self.columns = {name: array("d") for name in COLUMNS}
        self.levels = [array("d") for _ in range(LEVELS)]
        self.validations: list[tuple[int, float, list[float | None]]] = []
        self.damaged = 0
        self._at, self._file, self._rest = 0, (0, 0), b""

    @property
    def seen(self) -> tuple[object, ...]:
        """How far which file has been read: as long as it is equal, so are the numbers."""
        return self._file, self._at

    def update(self) -> None:
        """Read what is new. A resumed run writes the file anew: then it is read from its start."""
        try:
            with self._path.open("rb") as file:
                facts = os.fstat(file.fileno())
                if (facts.st_dev, facts.st_ino) != self._file or facts.st_size < self._at:
                    self._forget()
                    self._file = facts.st_dev, facts.st_ino
                file.seek(self._at)
                while content := file.read(MOST_AT_ONCE_BYTES):
                    self._at += len(content)
                    *lines, self._rest = (self._rest + content).split(b"\n")
                    for line in lines:
                        self._take(line)
        except OSError:
            if self._at and not self._path.exists():
                self._forget()

    def _take(self, line: bytes) -> None:
        try:
            values = json.loads(line)
            step = values["step"]
            if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MOST:
                raise TypeError
        except (ValueError, TypeError, KeyError, RecursionError):
            self.damaged += bool(line.strip())
            return
        if "validation_loss" in values:
            self._take_validation(step, values)
        if "loss" not in values:
            return
        while self.steps and self.steps[-1] >= step:  # of a killed run, which another went on from an earlier step
            self._drop_last()
        self.steps.append(step)
        for name, column in self.columns.items():
            column.append(finite_number(values.get(name)))
        for column, value in zip(self.levels, _numbers(values.get("loss_by_level")), strict=True):
            column.append(math.nan if value is None else value)

    def _take_validation(self, step: int, values: dict[str, Any]) -> None:
        while self.validations and self.validations[-1][0] >= step:
            self.validations.pop()
        loss = finite_number(values["validation_loss"])
        self.validations.append((step, loss, _numbers(values.get("validation_loss_by_level"))))

    def _drop_last(self) -> None:
        self.steps.pop()
        for column in (*self.columns.values(), *self.levels):
            column.pop()


def finite_number(value: object) -> float:
    """A number of a file; NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= MOST:
        return math.nan
    return float(value)


def _numbers(values: object) -> list[float | None]:
    """One for each part of the noise levels."""
    given = values if isinstance(values, list) and len(values) == LEVELS else [None] * LEVELS
    return [None if math.isnan(number := finite_number(value)) else number for value in given]
