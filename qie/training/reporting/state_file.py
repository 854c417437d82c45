"""`state.json` of a run's folder: what the run does now, for `qie watch` and for scripts.

    {"state": "training", "step": 120, "steps": 2000, "pid": 4711, "host": "gpu3", "time": 1763900000.0}

Nothing is resumed from it; checkpoints have a state.json of their own.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from qie.errors import QieError
from qie.stores import LocalFolder

if TYPE_CHECKING:  # who only reads the file loads no torch
    from PIL import Image

    from qie.training.reporting.metrics import StepMetrics, Validation

RUN_STATE_FILE = "state.json"
EVERY_S = 5.0
"""The file is written at each change, and otherwise at most so often."""
SHARE = 100
"""To write it takes at most one part in so many of the run's time: a busy disk may need seconds to sync a file."""

Doing = Literal["training", "paused", "validating", "stopped", "finished", "failed"]


class StateFile:
    """Writes state.json, and says there how the run ended. A hook of the loop: see `qie.training.loop.Hooks`.

    A run that is killed with -9 leaves its last state, with a time that grows old and a process that is gone.

    Args:
        folder: of the run.
        steps: planned.
        enabled: False: write nothing.
        clock: seconds that never run backwards.
    """

    def __init__(self, folder: Path, steps: int, *, enabled: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._steps, self._enabled, self._clock = LocalFolder(folder), steps, enabled, clock
        self._doing: Doing | None = None
        self._step, self._next, self._notes = 0, clock() + EVERY_S, dict[str, str]()
        before = read_state(folder) or {}
        if before.get("state") == "finished" and before.get("step") == steps:
            self._doing = "finished"  # a run that has nothing left to do changes no file

    def __enter__(self) -> StateFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._notes["error"] = _first_line(error)
            self.at("failed", self._step)

    def at(self, doing: Doing, step: int) -> None:
        """The run does this, and `step` steps are done. Written if it is news, or if it is time."""
        news = doing != self._doing
        self._doing, self._step = doing, step
        if news or self._clock() >= self._next:
            self._write()

    def note(self, **notes: str | None) -> None:
        """Words that the file has from now on, beside the state; None takes them away."""
        self._notes = {name: words for name, words in (self._notes | notes).items() if words is not None}
        self._write()

    def _write(self) -> None:
        if not self._enabled or self._doing is None:
            return
        began = self._clock()
        values: dict[str, Any] = {"state": self._doing, "step": self._step, "steps": self._steps}
        values |= {"pid": os.getpid(), "host": socket.gethostname(), "time": round(time.time(), 3)}
        with suppress(QieError):  # who watches sees an old time; the run goes on
            self._folder.write(RUN_STATE_FILE, f"{json.dumps(values | self._notes, ensure_ascii=False)}\n".encode())
        self._next = began + max(EVERY_S, SHARE * (self._clock() - began))

    def step(self, metrics: StepMetrics) -> None:
        """A step is done."""
        self.at("training", metrics.step)

    def validation(self, step: int, found: Validation) -> None:
        """Nothing: the loop says when it begins to validate."""

    def images(self, step: int, images: Sequence[Image.Image]) -> None:
        """Nothing, for the same reason."""


def read_state(run: Path) -> dict[str, Any] | None:
    """The state.json of a run's folder; None where there is none, or none that a run writes."""
    try:
        values = json.loads(LocalFolder(run).read(RUN_STATE_FILE))
    except (QieError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) and isinstance(values.get("state"), str) else None


def _first_line(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted before a checkpoint was written"
    first = str(error).strip().partition("\n")[0]
    return first if isinstance(error, QieError) else f"{type(error).__name__}: {first}".rstrip(": ")
