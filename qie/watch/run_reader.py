"""What the files of a run say: its state, its numbers, its pictures and its checkpoints.

They are read where they are: while qie-train writes them, after its end, in a copy, or on a disk that another machine
shares. Nothing is written.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from qie.watch.alerts import told_alerts
from qie.watch.curves import Curve, smoothed, thinned
from qie.watch.live_page import LiveFacts
from qie.watch.metric_lines import METRICS, MOST, MetricLines, ValidationLine, finite_number
from qie.watch.run_pictures import RunPictures

RUN_FILE, STATE_FILE, ADAPTER = "run.json", "state.json", "pytorch_lora_weights.safetensors"
LIVE = ("training", "validating", "paused")
STATES = (*LIVE, "stopped", "finished", "failed")
RECENT = 100
"""Steps whose mean a figure is."""
MOST_FILE_BYTES = 1 << 24

_CHECKPOINT = re.compile(r"checkpoint-(\d{6,18})", re.ASCII)


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's, or was."""
    if (folder / METRICS).is_file() or _is_state(_json(folder / STATE_FILE)):
        return True
    if (folder / "control").is_dir() or (folder / RUN_FILE).is_file():
        return True
    return any(_CHECKPOINT.fullmatch(path.name) for path in folder.glob("checkpoint-*"))


class RunReader:
    """Reads one run's folder again and again.

    Args:
        folder: train.output_dir.
        now: Unix seconds.
    """

    def __init__(self, folder: Path, now: Callable[[], float] = time.time) -> None:
        self.folder, self._now = folder, now
        self.lines, self.pictures = MetricLines(folder), RunPictures(folder)
        self._sizes: dict[tuple[str, float], int] = {}
        self._seen_steps, self._changed = -1, 0.0
        self._drawn: tuple[tuple[object, ...], dict[str, dict[str, Any]]] = (), {}

    def read(self) -> LiveFacts:
        """Everything that is known now, as JSON values."""
        self.lines.update()
        told, report = _json(self.folder / STATE_FILE), _json(self.folder / RUN_FILE)
        told = told if _is_state(told) else {}
        config = _object(report.get("config"))
        seen = self._last_sign(told)
        state = _state(told, report, seen, self._now())
        step, steps = self._steps(told, config)
        facts = {
            "place": str(self.folder),
            "name": self.folder.resolve().name,
            "time": self._now(),
            "state": state,
            "host": told.get("host"),
            "pid": told.get("pid"),
            "silent_s": None if seen is None else max(self._now() - seen, 0.0),
            "step": step,
            "steps": steps,
            "count": len(self.lines.steps),
            "span": self._span,
            "recent": self._recent(step, steps),
            "curves": self._curves(),
            "further": sorted(self.lines.found),
            "validations": [_told_validation(one) for one in self.lines.validations],
            "checkpoints": (checkpoints := self._checkpoints()),
            "adapter": bool(checkpoints) and (self.folder / checkpoints[-1]["name"] / ADAPTER).is_file(),
            "pictures": self.pictures.read(),
            "asked": sorted(_asked(self.folder)),
            "config": config,
            "report": {name: report.get(name) for name in ("base_model", "family", "samples", "devices", "started")},
            "finished": report.get("finished"),
            "disk_free_bytes": _free(self.folder),
            "damaged_lines": self.lines.damaged,
            "notes": {name: text for name, text in told.items() if name != "state" and isinstance(text, str)},
        }
        return facts | {"alerts": told_alerts(facts, self.lines)}

    @property
    def _span(self) -> int:
        """So many steps make a value of the smoothed loss."""
        return max(1, min(RECENT, len(self.lines.steps) // 20))

    def _last_sign(self, told: dict[str, Any]) -> float | None:
        """When the run was last seen to do something, by its own clock or, while one looks, by this machine's."""
        count = len(self.lines.steps) + len(self.lines.validations)
        if self._seen_steps not in (-1, count):
            self._changed = self._now()
        self._seen_steps = count
        times = [*self.lines.columns["time"][-1:], finite_number(told.get("time"))]
        known = [one for one in times if not math.isnan(one)]
        if not known:
            with suppress(OSError):
                known.append((self.folder / METRICS).stat().st_mtime)
        return max([*known, *([self._changed] if self._changed else [])], default=None)

    def _steps(self, told: dict[str, Any], config: dict[str, Any]) -> tuple[int, int | None]:
        found = [self.lines.steps[-1] if self.lines.steps else 0]
        found += [one.step for one in self.lines.validations[-1:]]
        planned = told.get("steps")
        if planned is None:
            planned = _object(config.get("train")).get("max_steps")
        known = isinstance(planned, int) and 0 < planned <= MOST
        return max(found), planned if known else None

    def _recent(self, step: int, steps: int | None) -> dict[str, float | None]:
        """Figures of the last steps."""
        columns = self.lines.columns
        found = {name: _mean(column[-RECENT:]) for name, column in columns.items() if name != "time"}
        waited, took = found.pop("data_wait_s"), found["step_time_s"]
        found["waiting"] = waited / took if waited is not None and took else None
        found["lr"] = _plain(columns["lr"][-1]) if self.lines.steps else None
        found["accuracy"] = _mean(self.lines.of_some["accuracy"][-RECENT:])
        memory = [value for value in columns["peak_memory_bytes"] if not math.isnan(value)]
        found["peak_memory_bytes"] = max(memory, default=None)
        left = steps - step if steps is not None else None
        found["left_s"] = took * left if took is not None and left is not None else None
        return found

    def _curves(self) -> dict[str, dict[str, Any]]:
        if self._drawn[0] != self.lines.seen:
            self._drawn = self.lines.seen, self._new_curves()
        return self._drawn[1]

    def _new_curves(self) -> dict[str, dict[str, Any]]:
        lines = self.lines
        span = self._span
        waiting = [
            waited / took if took else math.nan
            for waited, took in zip(lines.columns["data_wait_s"], lines.columns["step_time_s"], strict=True)
        ]
        found = {
            "loss": thinned("", lines.steps, lines.columns["loss"], band=True),
            "smooth_loss": thinned("", lines.steps, smoothed(lines.columns["loss"], span)),
            "waiting": thinned("", lines.steps, waiting, band=True),
        }
        for number, column in enumerate(lines.levels):
            found[f"loss_{number}"] = thinned("", lines.steps, smoothed(column, 2 * span))
        for name in ("grad_norm", "lr", "samples_per_s", "peak_memory_bytes", "mfu"):
            found[name] = thinned("", lines.steps, lines.columns[name], band=name not in ("lr", "peak_memory_bytes"))
        for name in sorted(lines.found):
            found[name] = thinned("", lines.steps, smoothed(lines.of_some[name], span))
        if "margin" in lines.found:
            for number, column in enumerate(lines.margin_levels):
                found[f"margin_{number}"] = thinned("", lines.steps, smoothed(column, 2 * span))
        return {name: _plain_curve(curve) for name, curve in found.items()}

    def _checkpoints(self) -> list[dict[str, Any]]:
        found = []
        for path in self.folder.glob("checkpoint-*"):
            match = _CHECKPOINT.fullmatch(path.name)
            if match is None:
                continue
            with suppress(OSError):
                written = path.stat().st_mtime
                key = path.name, written
                if key not in self._sizes:
                    self._sizes[key] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                found.append({"name": path.name, "step": int(match[1]), "bytes": self._sizes[key], "time": written})
        return sorted(found, key=lambda one: one["step"])


def _state(told: dict[str, Any], report: dict[str, Any], seen: float | None, now: float) -> str:
    """One of STATES; "gone": its process ended without a word; "waiting": nothing was written yet; "silent"."""
    if told:
        state = str(told["state"])
        return "gone" if state in LIVE and _process_is_gone(told) else state
    if report.get("finished"):
        return "finished"
    if seen is None:
        return "waiting"
    return "training" if now - seen < 600 else "silent"


def _process_is_gone(told: dict[str, Any]) -> bool:
    """Whether a process of this machine is no more; of another machine's nothing is known."""
    pid = told.get("pid")
    if told.get("host") != socket.gethostname() or not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _asked(folder: Path) -> list[str]:
    """The requests to the run that are there: see `qie.training.control`."""
    try:
        return [entry.name for entry in os.scandir(folder / "control")]
    except OSError:
        return []


def _is_state(values: dict[str, Any]) -> bool:
    return values.get("state") in STATES


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one if there is no such file, or something else in it."""
    try:
        if path.stat().st_size > MOST_FILE_BYTES:
            return {}
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return _object(values)


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _mean(values: Sequence[float]) -> float | None:
    there = [value for value in values if not math.isnan(value)]
    return sum(there) / len(there) if there else None


def _told_validation(one: ValidationLine) -> dict[str, Any]:
    of_some = {name: _plain(value) for name, value in one.of_some.items()}
    loss = {"step": one.step, "loss": _plain(one.loss), "by_level": one.by_level}
    return loss | of_some | {"margin_by_level": one.margin_by_level}


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else value


def _plain_curve(curve: Curve) -> dict[str, Any]:
    lists = {"steps": curve.steps, "values": curve.values, "low": curve.low, "high": curve.high}
    return {name: list(values) for name, values in lists.items()}
