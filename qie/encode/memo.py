"""Results that are kept because the same image often comes again, within a budget of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

LATENTS_BYTES = 1 << 30
"""How much memory latents of images that may come again may take: about 2,000 at 1024²."""

SEEN_BYTES = 1 << 30
"""The same for what the vision tower saw of controls: about 50 at 1024² in float32, 400 at 384² in bfloat16."""


class Memo(Generic[T]):
    """What was computed last, by key; what was not asked for longest goes first.

    Args:
        budget_bytes: how much is kept at most.
        size_bytes: of a result.
    """

    def __init__(self, budget_bytes: int, size_bytes: Callable[[T], int]) -> None:
        self._budget_bytes, self._size_bytes = budget_bytes, size_bytes
        self._kept: OrderedDict[Hashable, T] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        """The result for `key`, computed if it is not there. Two threads that ask at once may both compute it."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        result = compute()
        with self._lock:
            if key not in self._kept:
                self._kept[key] = result
                self._bytes += self._size_bytes(result)
            while self._bytes > self._budget_bytes:
                self._bytes -= self._size_bytes(self._kept.popitem(last=False)[1])
        return result
