"""Threads that end before the code that started them.

Python ends by keeping its lock. A thread that then comes out of native code and asks for the lock is unwound through
C++, which aborts the process ("terminate called without an active exception", exit -6), although its work was done. So
a thread is asked to stop, which ends whatever it waits for by `pause`, and is joined. Native code cannot be
interrupted: it is waited for, as long as what it does may take, such as a request to a store QIE_STORE_TIMEOUT_S. Only
Ctrl-C does not wait: it leaves the thread behind, and a command then ends by `leave`, without the interpreter's own
end.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar, copy_context
from typing import Any, NoReturn, TypeVar

_Result = TypeVar("_Result")

_LOOK_S = 0.1

_mine: ContextVar[Threads | None] = ContextVar("threads", default=None)
_left: list[threading.Event] = []
"""Of threads that nobody waited for: set when they have ended."""


class StoppedError(BaseException):
    """This thread was asked to stop while it waited. No error of its work: nothing is to be tried again for it."""


class Threads:
    """Threads that are stopped together. Those that one of them starts in turn are asked to stop with it."""

    def __init__(self) -> None:
        self._asked, self._above = threading.Event(), _mine.get()
        self._running: list[tuple[threading.Thread, threading.Event]] = []

    @property
    def asked(self) -> bool:
        """Whether they are to stop."""
        return self._asked.is_set() or (self._above is not None and self._above.asked)

    def start(self, name: str, work: Callable[..., object], *arguments: Any) -> None:
        """Run `work` in a thread of its own. Interrupted by a signal, it either never runs or is waited for."""
        ended, turn = threading.Event(), threading.Lock()

        def run() -> None:
            if not turn.acquire(blocking=False):
                return  # the start was interrupted before this line
            _mine.set(self)
            try:
                with suppress(StoppedError):
                    work(*arguments)
            finally:
                ended.set()

        # A daemon: a second Ctrl-C ends the process without waiting for the item at work.
        thread = threading.Thread(target=run, name=f"qie-{name}", daemon=True)
        try:
            self._running.append((thread, ended))
            thread.start()
        except BaseException:
            if turn.acquire(blocking=False):
                ended.set()
            _left.append(ended)
            raise

    def submit(self, pool: ThreadPoolExecutor, work: Callable[..., _Result], *arguments: Any) -> Future[_Result]:
        """Work for a pool, which is asked to stop with these threads. It is not waited for: the pool does that."""
        context = copy_context()
        context.run(_mine.set, self)
        return pool.submit(context.run, work, *arguments)

    def ask(self) -> None:
        """Ask them to stop."""
        self._asked.set()

    def leave_behind(self) -> None:
        """Wait for them no more: `leave` ends the process without them."""
        _left.extend(ended for _, ended in self._running)

    def stop(self) -> None:
        """Ask them to stop, and wait until they have."""
        self.ask()
        self.join()

    def join(self) -> None:
        """Wait until they have ended. Whatever interrupts that leaves them behind."""
        try:
            for thread, ended in self._running:
                ended.wait()  # an interrupted `join` takes a thread for one that has ended
                if thread.is_alive():  # not one whose start was interrupted
                    thread.join()
        except BaseException:
            self.leave_behind()
            raise


def pause(seconds: float) -> None:
    """Sleep. Raises StoppedError when this thread is to stop, before or meanwhile."""
    mine, until = _mine.get(), time.monotonic() + seconds
    if mine is None:
        time.sleep(seconds)
        return
    while not mine.asked:
        left = until - time.monotonic()
        if left <= 0:
            return
        mine._asked.wait(min(left, _LOOK_S))
    raise StoppedError


def submit(pool: ThreadPoolExecutor, work: Callable[..., _Result], *arguments: Any) -> Future[_Result]:
    """Work for a pool, where `pause` is what it is here."""
    return pool.submit(copy_context().run, work, *arguments)


def leave(status: int) -> NoReturn:
    """End the process; at once, if a thread that was left behind is still at work."""
    if all(ended.is_set() for ended in _left):
        sys.exit(status)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
