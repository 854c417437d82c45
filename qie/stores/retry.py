"""Timeouts and retries of stores."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from qie.errors import UsageError
from qie.threads import Threads, pause

CONNECT_S = 10.0
REQUEST_S = 60.0
RETRY_S = 180.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 15.0

_Result = TypeVar("_Result")

# Not the module's generator: its state belongs to the training.
_chance = random.SystemRandom()


@dataclass(frozen=True)
class Limits:
    """`request_s`: how long a store may be silent. `retry_s`: after how long nothing is tried again."""

    request_s: float
    retry_s: float

    @property
    def connect_s(self) -> float:
        return min(CONNECT_S, self.request_s)

    @property
    def longest_pause_s(self) -> float:
        return min(LONGEST_PAUSE_S, self.retry_s / 4)


def limits() -> Limits:
    """The limits that QIE_STORE_TIMEOUT_S and QIE_STORE_RETRY_S set. Raises UsageError for anything but a number."""
    return Limits(_seconds("QIE_STORE_TIMEOUT_S", REQUEST_S), _seconds("QIE_STORE_RETRY_S", RETRY_S))


def patiently(act: Callable[[], _Result], transient: Callable[[Exception], bool]) -> _Result:
    """Call `act`, and call it again after transient errors, with pauses that double, until the time for retries is up.

    Raises:
        Exception: the last error of `act`, as it is.
    """
    allowed = limits()
    deadline = time.monotonic() + allowed.retry_s
    for attempt in count():
        try:
            return act()
        except Exception as error:
            longest = min(FIRST_PAUSE_S * 2 ** min(attempt, 16), allowed.longest_pause_s)
            seconds = longest * _chance.uniform(0.5, 1)
            if not transient(error) or time.monotonic() + seconds >= deadline:
                raise
        pause(seconds)
    raise AssertionError("unreachable")


def interruptibly(act: Callable[[], _Result]) -> _Result:
    """Act in a way that Ctrl-C interrupts: while obstore waits, Python handles no signal."""
    if threading.current_thread() is not threading.main_thread():
        return act()
    outcome: Future[_Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(act())
        except BaseException as error:
            outcome.set_exception(error)

    threads = Threads()
    threads.start("store", run)
    threads.join()
    return outcome.result()


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        seconds = float(text or default)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise UsageError("an environment variable is not a number of seconds", where=name, found=repr(text))
    return seconds
