"""A worker's heartbeat: it writes the file of `qie.precompute.progress` from a thread of its own, while it encodes."""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import current_process, parent_process

from qie.precompute.counts import Report
from qie.precompute.progress import (
    PROGRESS_VERSION,
    PrecomputeRun,
    StageLoad,
    WorkerProgress,
    WorkerState,
    forget_others,
    write_progress,
)
from qie.shards.index import ShardIndex, shard_stem
from qie.stages import Load
from qie.stores import Folder, LocalFolder, ObjectFolder
from qie.threads import Threads

BEAT_S = 2.0
REMOTE_BEAT_S = 10.0
"""Seconds between two writings: on a disk, and in a store, where each is a request that costs."""

FIRST_BEAT_S = 1.0
"""A run that ends earlier and has published nothing leaves no trace."""

LAST_BEAT_S = 10.0
"""How long the end of a run waits for a store that does not take its last word."""

WINDOW_S = 60.0
_NEWEST = 4
_MOST_REASONS = 100
_MESSAGE = 500
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")

OnProgress = Callable[[Report, ShardIndex | None], object]
"""Called with the report, and the index of a shard that was just published."""


@contextmanager
def beating(output: Folder, run: PrecomputeRun | None) -> Iterator[OnProgress]:
    """Tell of this worker in `output` for as long as the context lasts, and at its end how it ended.

    No failure to write is an error. Nothing is told without a run, nor on the Hugging Face Hub, where each writing
    would be a commit.
    """
    if run is None or not isinstance(output, (LocalFolder, ObjectFolder)):
        yield lambda report, published: None
        return
    beat = _Heartbeat(output, run)
    try:
        beat.start()
        yield beat.pulse.at
    except Exception as error:
        ended = isinstance(error, (EOFError, BrokenPipeError))  # the command has ended this worker of its
        beat.end("stopped" if ended else "failed", None if ended else _first_line(error))
        raise
    except BaseException:
        beat.end("stopped")
        raise
    else:
        beat.end("finished")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:_MESSAGE]


class _Heartbeat:
    def __init__(self, output: Folder, run: PrecomputeRun) -> None:
        self._output, self._run = output, run
        self._every_s = BEAT_S if isinstance(output, LocalFolder) else REMOTE_BEAT_S
        self.pulse = Pulse(run, self._every_s)
        self._threads, self._ending, self._ended = Threads(), threading.Event(), threading.Event()
        self._started = False
        self._state: WorkerState = "running"
        self._message: str | None = None

    def start(self) -> None:
        self._threads.start("heartbeat", self._beat)
        self._started = True

    def end(self, state: WorkerState, message: str | None = None) -> None:
        """Write the last word, and return when the thread has ended."""
        self._state, self._message = state, message
        self._ending.set()
        try:
            if self._started:  # a signal may have come first
                self._ended.wait(LAST_BEAT_S)
        finally:
            self._threads.stop()

    def _beat(self) -> None:
        try:
            early = self._ending.wait(FIRST_BEAT_S)
            if early and self._state != "failed" and not self.pulse.shards_written:
                return
            self._write(forget=True)
            if early:
                return
            while not self._ending.wait(self._every_s):
                self._write()
            self._write(forget=True)
        finally:
            self._ended.set()

    def _write(self, forget: bool = False) -> None:
        with suppress(Exception):  # whatever a store does: the work does not depend on it
            write_progress(self._output, self.pulse.progress(self._state, self._message))
            if forget:
                forget_others(self._output, self._run)


class Pulse:
    """What a worker says, from the reports of its engine.

    Attributes:
        shards_written: by this worker.
    """

    def __init__(self, run: PrecomputeRun, interval_s: float, clock: Callable[[], float] = time.time) -> None:
        host = socket.gethostname()
        name = f"{host}-{os.getpid()}-{run.rows[0]}-{run.rows[1]}-{secrets.token_hex(4)}"
        self._worker, self._host = _NOT_IN_NAMES.sub("_", name), host
        self._task = current_process().name if parent_process() else os.environ.get("SLURM_ARRAY_TASK_ID")
        self._run, self._interval_s, self._clock = run, interval_s, clock
        self._started = self._advanced = clock()
        self._lock = threading.Lock()
        self._report = Report()
        self._rows = self._closed = self._kept = 0
        self.shards_written = self._bytes = self._rows_written = 0
        self._began: tuple[float, int] | None = None
        self._window: deque[tuple[float, int, dict[str, Load]]] = deque([(self._started, 0, {})])
        self._newest: deque[str] = deque(maxlen=_NEWEST)
        self._reasons, self._skipped = Counter[str](), 0

    def at(self, report: Report, published: ShardIndex | None = None) -> None:
        """Take in the engine's report, which may go on growing."""
        with self._lock:
            self._report = report
            if report.rows > self._rows:
                self._rows, self._advanced = report.rows, self._clock()
            if published is not None:
                self.shards_written += 1
                self._bytes += published.filesize
                self._rows_written += published.stop - published.start
                self._newest.appendleft(shard_stem(*published.rows))
            if published is not None or report.shards_kept > self._kept:  # an engine has one shard after the other
                self._closed, self._kept = report.rows, report.shards_kept
            if self._began is None and report.encoded:
                # To compare published rows is quick, and says nothing about the others.
                self._began = self._advanced, report.rows
                self._window.clear()
                self._window.append((*self._began, dict(report.loads)))

    def progress(self, state: WorkerState = "running", message: str | None = None) -> WorkerProgress:
        """What the worker says now."""
        with self._lock:
            report, now = self._report, self._clock()
            stages = self._stages(now, report.loads)
            return WorkerProgress(
                format_version=PROGRESS_VERSION,
                worker=self._worker,
                host=self._host,
                pid=os.getpid(),
                task=self._task,
                run=self._run,
                state=state,
                message=message,
                started=self._started,
                updated=now,
                interval_s=self._interval_s,
                advanced=self._advanced,
                rows=self._rows,
                rows_open=self._rows - self._closed,
                encoded=report.encoded,
                reused=report.reused,
                skipped=self._counted(report),
                rate_minute=_rate(now, self._rows, self._window[0][:2]) if self._began else None,
                rate=_rate(now, self._rows, self._began) if self._began else None,
                shards_written=self.shards_written,
                shards_kept=report.shards_kept,
                shards_busy=report.shards_busy,
                bytes_written=self._bytes,
                bytes_per_row=self._bytes / self._rows_written if self._rows_written else None,
                stages=stages,
                bottleneck=max(stages, key=lambda name: stages[name].busy, default=None),
                newest=list(self._newest),
            )

    def _stages(self, now: float, loads: dict[str, Load]) -> dict[str, StageLoad]:
        """Of the last minute, which moves on by this call."""
        self._window.append((now, self._rows, dict(loads)))
        while len(self._window) > 2 and self._window[1][0] <= now - WINDOW_S:
            self._window.popleft()
        since, _, before = self._window[0]
        found = {}
        for name, load in loads.items():
            was = before.get(name, Load())
            lately = Load(load.items - was.items, load.busy_s - was.busy_s, load.workers)
            if load.items:
                rate = lately.rate or load.rate
                found[name] = StageLoad(round(min(lately.share(now - since), 1.0), 4), round(rate, 3))
        return found

    def _counted(self, report: Report) -> dict[str, int]:
        fresh = report.skipped[self._skipped :]
        self._skipped += len(fresh)
        self._reasons.update(gone.reason for gone in fresh)
        return dict(self._reasons.most_common(_MOST_REASONS))


def _rate(now: float, rows: int, since: tuple[float, int]) -> float | None:
    """Rows a second; None before any time has passed."""
    seconds, done = now - since[0], rows - since[1]
    return round(done / seconds, 4) if seconds > 0 else None
