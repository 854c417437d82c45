"""`metrics.jsonl` while a run writes it: each call reads only the lines that are new, and keeps columns of numbers."""

from __future__ import annotations

import json
import math
import os
from array import array
from pathlib import Path
from typing import Any, NamedTuple

METRICS = "metrics.jsonl"
COLUMNS = ("loss", "grad_norm", "lr", "samples_per_s", "step_time_s", "data_wait_s", "peak_memory_bytes", "mfu", "time")
_OF_PAIRS = ("accuracy", "margin", "target_reward", "rejected_reward")
OF_SOME = {name: f"preference_{name}" for name in _OF_PAIRS} | {"preserved_loss": "preserved_loss"}
"""Of runs that learn from pairs, or preserve a source: their names in the file."""
LEVELS = 4
"""Losses and margins are also told for this many parts of the noise levels."""
MOST = 1e18
"""A number beyond it is none that a run has."""
MOST_AT_ONCE_BYTES = 1 << 24


class ValidationLine(NamedTuple):
    """The numbers of a validation: NaN, or None, where there is none."""

    step: int
    loss: float
    by_level: list[float | None]
    of_some: dict[str, float]
    margin_by_level: list[float | None]


class MetricLines:
    """The numbers of a run's steps and validations, by their columns; NaN where a line has no number.

    Attributes:
        steps: of the lines of training steps. columns: their numbers, as many as there are steps.
        of_some: numbers that not every run has, as many. found: those of them that there are.
        levels, margin_levels: losses, and margins of pairs, in each part of the noise levels.
        damaged: lines that are none of qie's.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS
        self._forget()

    def _forget(self) -> None:
        self.steps = array("q")
        self.columns = {name: array("d") for name in COLUMNS}
        self.of_some, self.found = {name: array("d") for name in OF_SOME}, set[str]()
        self.levels, self.margin_levels = ([array("d") for _ in range(LEVELS)] for _ in range(2))
        self.validations: list[ValidationLine] = []
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
        for name, value in _of_some(values, "").items():
            self.of_some[name].append(value)
            self.found |= set() if math.isnan(value) else {name}
        parts = {"loss_by_level": self.levels, "preference_margin_by_level": self.margin_levels}
        for name, levels in parts.items():
            for column, part in zip(levels, _numbers(values.get(name)), strict=True):
                column.append(math.nan if part is None else part)

    def _take_validation(self, step: int, values: dict[str, Any]) -> None:
        while self.validations and self.validations[-1].step >= step:
            self.validations.pop()
        loss, of_some = finite_number(values["validation_loss"]), _of_some(values, "validation_")
        losses, margins = (
            _numbers(values.get(f"validation_{name}_by_level")) for name in ("loss", "preference_margin")
        )
        self.validations.append(ValidationLine(step, loss, losses, of_some, margins))

    def _drop_last(self) -> None:
        self.steps.pop()
        for column in (*self.columns.values(), *self.of_some.values(), *self.levels, *self.margin_levels):
            column.pop()


def finite_number(value: object) -> float:
    """A number of a file; NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= MOST:
        return math.nan
    return float(value)


def _of_some(values: dict[str, Any], before: str) -> dict[str, float]:
    return {name: finite_number(values.get(f"{before}{written}")) for name, written in OF_SOME.items()}


def _numbers(values: object) -> list[float | None]:
    """One for each part of the noise levels."""
    given = values if isinstance(values, list) and len(values) == LEVELS else [None] * LEVELS
    return [None if math.isnan(number := finite_number(value)) else number for value in given]
