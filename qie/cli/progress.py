"""Progress: a bar that fits its terminal, and shows the numbers that matter first; plain lines in a log."""

from __future__ import annotations

import sys
import time

from qie.cli.terminal import echo, erase_line, is_terminal


class Progress:
    """Progress on stderr: a bar on a terminal, a line every `every_s` seconds in a log, nothing when quiet.

    Args:
        what: name of the work.
        total: how many units there are.
        unit: what is counted.
        quiet: show nothing.
        every_s: seconds between lines when stderr is not a terminal.
    """

    def __init__(self, what: str, total: int, unit: str, *, quiet: bool, every_s: float = 10.0) -> None:
        self._what, self._total, self._unit, self._every_s = what, total, unit, every_s
        self._done, self._started, self._printed = 0, time.monotonic(), time.monotonic()
        self._before, self._quiet = 0, quiet
        self._lines = not quiet and not is_terminal(sys.stderr)
        self._bar = None
        if not quiet and not self._lines:
            from qie.cli.bar import Bar  # with tqdm, which --help does without

            self._bar = Bar(what, total, unit)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()
            erase_line()

    def begin(self, done: int, total: int) -> None:
        """Start with `done` of `total` units done before."""
        self._before, self._done, self._total, self._started = done, done, total, time.monotonic()
        if self._bar is not None:
            self._bar.notes = ()
            self._bar.reset(total)
            self._bar.initial = self._bar.n = self._bar.last_print_n = done

    def at(self, done: int, *notes: str) -> None:
        """`done` units are done; notes follow the numbers, and where there is no room for all, the first ones."""
        if self._bar is not None:
            self._bar.notes = notes
            self._bar.update(done - self._bar.n)
        elif self._lines and (time.monotonic() - self._printed >= self._every_s or done == self._total != self._done):
            from qie.cli.bar import pace_of

            rate = (done - self._before) / max(time.monotonic() - self._started, 1e-9)
            pace = pace_of(rate, self._total - done, self._unit)
            echo(", ".join([f"{self._what}: {done}/{self._total} {self._unit}", *pace, *filter(None, notes)]), err=True)
            self._printed = time.monotonic()
        self._done = done

    def say(self, line: str) -> None:
        """A line that stays, above the bar; when quiet, only a warning."""
        if not self._quiet or line.startswith("warning: "):
            echo(line, err=True)
