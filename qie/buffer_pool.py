"""Buffers of batches that are gone, for the next ones: a new page costs more than to copy into an old one."""

from __future__ import annotations

import mmap
import threading
import weakref
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64
"""Of tensors in a buffer, in bytes, as torch's allocator has it."""


class BufferPool:
    """Buffers in host memory, each used again when nothing lies in it any more."""

    LEAST_BYTES = 2**18
    """What is smaller costs little wherever it lies."""
    MOST = 8

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> NDArray[np.uint8]:
        """At least `size` bytes; they come back when the last array or tensor that lies in them is gone."""
        if size < self.LEAST_BYTES:
            return np.empty(size, np.uint8)
        with self._lock:
            fits = [buffer for buffer in self._free if size <= len(buffer) <= 2 * size]
            buffer = min(reversed(fits), key=len) if fits else _new(size)
            with suppress(ValueError):  # a new one, or one that has just made room for others
                self._free.remove(buffer)
        # An array: its slices, and whatever is made of them, keep it. A part of a memoryview does not keep that one.
        array = np.frombuffer(buffer, np.uint8)
        weakref.finalize(array, self._give_back, buffer).atexit = False
        return array

    def _give_back(self, buffer: mmap.mmap) -> None:
        # No lock: this runs wherever a tensor dies, perhaps in `take`. Each line is one step for other threads.
        self._free.append(buffer)
        del self._free[: -self.MOST]


def _new(size: int) -> mmap.mmap:
    buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
    with suppress(OSError):  # a kernel may be without them
        buffer.madvise(mmap.MADV_HUGEPAGE)  # written for the first time, 11 MB take half as long
    return buffer


BUFFERS = BufferPool()


def copy_bits(target: NDArray[np.integer], source: NDArray[np.integer]) -> None:
    """Copy integers of one size, without Python's lock and in this thread alone.

    By vector instructions: `np.copyto` calls memcpy, which takes 15 to 20 % longer for some megabytes. torch's copy
    would start threads in each thread that calls it.
    """
    np.bitwise_or(source, source, out=target)
