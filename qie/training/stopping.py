"""Being asked to stop: SIGINT and SIGTERM become a question that the loop asks between steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator


@contextmanager
def stop_requested(accelerator: Accelerator) -> Iterator[Callable[[], bool]]:
    """A function that says whether any process of the group was asked to stop, the same in all of them.

    A second signal is not waited for: it interrupts at once.
    """
    asked = threading.Event()

    def on_signal(*_: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    def agreed() -> bool:
        if accelerator.num_processes == 1:
            return asked.is_set()
        flag = torch.tensor(float(asked.is_set()), device=accelerator.device)
        return bool(accelerator.reduce(flag, "sum") > 0)

    if threading.current_thread() is not threading.main_thread():
        yield agreed  # signals reach the main thread only
        return
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield agreed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
