"""Measurements in a process of their own: one that dies or hangs loses its own line; the next gets a new process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Protocol

Line = dict[str, Any]
START_S = 180
"""In which a process imports its libraries, from a cold disk, too."""


class Limited(Protocol):
    """What is known of a measurement here."""

    @property
    def name(self) -> str: ...
    @property
    def limit_s(self) -> float: ...
    @property
    def alone(self) -> bool: ...


def apart(
    command: Sequence[str], wanted: Iterable[Limited], deadline: float, log: Path
) -> Iterator[tuple[Limited, Line | None]]:
    """Each measurement with its line; None: there was no time for it before `deadline`, of time.monotonic.

    Args:
        command: starts a process that calls `serve`; the number of its file descriptor is appended.
        wanted: by name, in this order.
        deadline: what is not done then is ended, and has no line.
        log: gets what the processes print.

    Raises:
        RuntimeError: a process does not start.
    """
    worker: _Worker | None = None
    try:
        for one in wanted:
            if deadline - time.monotonic() < one.limit_s / 2:
                yield one, None
                continue
            if worker and one.alone:
                worker.close()
                worker = None
            worker = worker or _Worker(command, log)
            yield one, worker.ask(one, deadline)
            if worker.spent:
                worker.close()
                worker = None
    finally:
        if worker:
            worker.close()


class _Worker:
    """A process that measures what it is asked for, until it is spent."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.spent = False
        self._log = log
        self._pipe, theirs = Pipe()
        with log.open("wb") as file, theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if self._received(time.monotonic() + START_S) is None:
            reason = self._last_words()
            self.close()
            raise RuntimeError(f"the process that measures does not start: {reason}")

    def ask(self, one: Limited, deadline: float) -> Line | None:
        """Its line; None if the deadline ended it before its limit."""
        started = time.monotonic()
        with suppress(BrokenPipeError):
            self._pipe.send_bytes(one.name.encode())
        answer = self._received(min(started + one.limit_s, deadline))
        if answer is not None:
            line: Line = json.loads(answer)
            self.spent = line.pop("spent")
            return line
        self.spent, code = True, self._process.poll()
        if code is None and started + one.limit_s > deadline:
            return None
        error = f"took longer than {one.limit_s:.0f} s"
        if code is not None:
            error = f"the process ended with {code}: {self._last_words()}"
        return {"error": error, "took_s": round(time.monotonic() - started, 1)}

    def close(self) -> None:
        """End the process, and those that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._pipe.close()

    def _received(self, end: float) -> bytes | None:
        """What comes before `end`; None if nothing does, or the process ends."""
        # A process that it has started may hold the pipe open after its death.
        while not self._pipe.poll(max(0.0, min(0.5, end - time.monotonic()))):
            if time.monotonic() >= end or (self._process.poll() is not None and not self._pipe.poll(0)):
                return None
        try:
            return self._pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            return None

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it printed nothing")


def serve(descriptor: int, measured: Callable[[str], Line]) -> None:
    """In the process: answer names with lines, of which "spent" says that the next needs another process."""
    pipe = Connection(descriptor)
    pipe.send_bytes(b"ready")
    with suppress(EOFError):
        while True:
            line = measured(pipe.recv_bytes().decode())
            pipe.send_bytes(json.dumps(line).encode())
    sys.stdout.flush()
