"""Samples kept once for all processes of a machine, in memory that they share.

One of the processes makes a file without a name in memory (`memfd_create`), and the others open it by way of /proc. The
kernel frees it with the last process that has it open, however that ends. /dev/shm, of which a container often has only
64 MB, takes no part.

    token, bytes taken             16 and 8 bytes
    offset and size by position    16 bytes each, from the second page on
    parts                          each from a page on

A part's place is taken under a lock. Its size is written when all of the part is there; who comes before that reads the
sample from where it lies and waits for nobody. All is written by system calls, which say when there is no memory, where
a store into a map would end the process. What is read is a private map: whoever writes into a tensor changes a copy.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import platform
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from weakref import finalize

import torch

from qie.quantities import human_bytes

Part = dict[str, Any]
"""Fields of a sample: tensors, tuples of them, and what fits into JSON."""
Gather = Callable[[Any], Sequence[Any]]
"""What each process gives, in the order of processes; all of them call it."""

_PAGE = mmap.PAGESIZE
_NORESERVE = 0x4000
"""MAP_NORESERVE of x86 and ARM, which Python 3.11 does not name: no memory is set aside for writing into the map."""
_ALIGNED = 64
_ENTRY = struct.Struct("<QQ")
_TAKEN = struct.Struct("<Q")
_TOKEN_BYTES = 16


@dataclass(frozen=True)
class Unshared:
    """Memory that the processes of a machine cannot share.

    Attributes:
        processes: how many they are.
        reason: of the first one that could not.
    """

    processes: int
    reason: str


class SharedTier:
    """Parts of samples by position, of all processes of this machine.

    Args:
        file: as `open_shared` makes it.
        samples: parts of positions below this are kept.
        budget_bytes: for all parts, each rounded up to pages.
        say: told when the machine gives no more memory.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, file: int, samples: int, budget_bytes: int, say: Callable[[str], object]) -> None:
        self._file = file
        finalize(self, os.close, file)
        self._budget_bytes, self._say, self._spent = budget_bytes, say, False
        self._parts: dict[int, Part] = {}
        self._lock = threading.Lock()
        self._samples, self._start = samples, _start(samples)
        self._map = mmap.mmap(file, self._start + budget_bytes, flags=mmap.MAP_PRIVATE | _NORESERVE)

    @property
    def bytes(self) -> int:
        """Taken by all processes together."""
        taken: int = _TAKEN.unpack(os.pread(self._file, _TAKEN.size, _TOKEN_BYTES))[0]
        return taken

    def get(self, position: int) -> Part | None:
        """The part of a sample; None if nobody has kept it yet."""
        known = self._parts.get(position)
        if known is not None or position >= self._samples or self._place(position)[1] == 0:
            return known
        with self._locked():  # which orders what another process wrote before what is read here
            offset, size = self._place(position)
        return self._parts.setdefault(position, _unpacked(memoryview(self._map)[offset : offset + size]))

    def add(self, position: int, part: Part) -> Part | None:
        """Keep a part, and give it as it is kept; None if there is no room, or another thread or process keeps it."""
        content = _packed(part)
        size = sum(map(len, content))
        offset = self._take(position, size)
        if offset is None:
            return None
        try:
            _write(self._file, content, offset)
        except OSError as error:
            self._give_up(error)
            return None
        with self._locked():
            self._set_place(position, offset, size)
        return self.get(position)

    def _take(self, position: int, size: int) -> int | None:
        """Where a part may be written that nobody else keeps."""
        size = _rounded(size, _PAGE)
        if position >= self._samples or self._spent:
            return None
        if self.bytes + size > self._budget_bytes or self._place(position)[0]:
            return None  # most find this without the lock, when the budget is spent
        with self._locked():
            taken = self.bytes
            if taken + size > self._budget_bytes or self._place(position)[0]:
                return None
            try:
                self._set_place(position, self._start + taken, 0)
                os.pwrite(self._file, _TAKEN.pack(taken + size), _TOKEN_BYTES)
            except OSError as error:
                self._give_up(error)
                return None
            return self._start + taken

    def _give_up(self, error: OSError) -> None:
        if not self._spent:
            self._spent = True
            self._say(
                f"memory for kept samples ends at {human_bytes(self.bytes)} of {human_bytes(self._budget_bytes)} "
                f"({error.strerror}): samples that are not kept by now are read again in each epoch"
            )

    def _place(self, position: int) -> tuple[int, int]:
        """Offset and size of a part; an offset without a size: it is on its way."""
        offset, size = _ENTRY.unpack(os.pread(self._file, _ENTRY.size, _PAGE + position * _ENTRY.size))
        return offset, size

    def _set_place(self, position: int, offset: int, size: int) -> None:
        os.pwrite(self._file, _ENTRY.pack(offset, size), _PAGE + position * _ENTRY.size)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """In this thread of this process alone. Ends with the process."""
        with self._lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)


@dataclass(frozen=True)
class _Offer:
    """A file that a process has made for all of its machine; or why it could not."""

    machine: str
    process: int
    token: bytes
    file: int = -1
    fault: str = ""


def open_shared(
    samples: int, budget_bytes: int, gather: Gather, say: Callable[[str], object] = lambda line: None
) -> SharedTier | Unshared:
    """The memory that this process shares with those of its machine. All processes of a run call it together.

    Processes that see the same process numbers share: those of one machine, or of one container.

    Args:
        samples: positions are below this.
        budget_bytes: for all parts together. More than the machine has is never used.
        gather: exchanges values with all processes of the run.
        say: see `SharedTier`.
    """
    budget_bytes = min(budget_bytes, os.sysconf("SC_PHYS_PAGES") * _PAGE)
    mine = _offered(_start(samples) + budget_bytes)
    offers: list[_Offer] = [offer for offer in gather(mine) if offer.machine == mine.machine]
    tier, fault = None, ""
    try:
        tier = SharedTier(_opened(offers[0], mine), samples, budget_bytes, say)
    except OSError as error:
        fault = str(error)
    faults = [found for machine, found in gather((mine.machine, fault)) if machine == mine.machine and found]
    return Unshared(len(offers), faults[0]) if tier is None or faults else tier


def _offered(size: int) -> _Offer:
    machine, token = _machine(), os.urandom(_TOKEN_BYTES)
    try:
        file = os.memfd_create("qie-samples")
        os.ftruncate(file, size)
        os.pwrite(file, token, 0)
    except OSError as error:
        return _Offer(machine, os.getpid(), token, fault=str(error))
    return _Offer(machine, os.getpid(), token, file)


def _opened(offer: _Offer, mine: _Offer) -> int:
    """An offered file, opened for this process. Raises OSError when that is not possible."""
    if offer == mine and not offer.fault:
        return mine.file
    if mine.file >= 0:
        os.close(mine.file)
    if offer.fault:
        raise OSError(offer.fault)
    file = os.open(f"/proc/{offer.process}/fd/{offer.file}", os.O_RDWR | os.O_CLOEXEC)
    if os.pread(file, _TOKEN_BYTES, 0) != offer.token:
        os.close(file)
        raise OSError("another file is in the place of the one that was offered")
    return file


def _machine() -> str:
    """Where a process number means the same process: this start of this machine, and a container in it."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return platform.node()


def _start(samples: int) -> int:
    """Where parts begin."""
    return _PAGE + _rounded(samples * _ENTRY.size, _PAGE)


def _rounded(size: int, to: int) -> int:
    return -(-size // to) * to


def _packed(part: Part) -> list[memoryview]:
    """A part as bytes: what it holds as JSON, then its tensors."""
    tensors: list[torch.Tensor] = []
    offset = 0

    def plain(value: Any) -> Any:
        nonlocal offset
        if isinstance(value, tuple):
            return {"tuple": [plain(item) for item in value]}
        if not isinstance(value, torch.Tensor):
            return value
        start, offset = offset, offset + _rounded(value.nbytes, _ALIGNED)
        tensors.append(value)
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "start": start}

    head = json.dumps({name: plain(value) for name, value in part.items()}).encode()
    head = _TAKEN.pack(len(head)) + head
    parts = [memoryview(head.ljust(_rounded(len(head), _ALIGNED), b" "))]
    for tensor in tensors:
        parts.append(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        parts.append(memoryview(bytes(-tensor.nbytes % _ALIGNED)))
    return parts


def _unpacked(content: memoryview) -> Part:
    stop = _TAKEN.size + _TAKEN.unpack_from(content)[0]
    start = _rounded(stop, _ALIGNED)

    def value(plain: Any) -> Any:
        if not isinstance(plain, dict):
            return plain
        if "tuple" in plain:
            return tuple(value(item) for item in plain["tuple"])
        dtype, shape = getattr(torch, plain["dtype"]), plain["shape"]
        count = prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(content, dtype=dtype, count=count, offset=start + plain["start"]).view(shape)

    return {name: value(plain) for name, plain in json.loads(bytes(content[_TAKEN.size : stop])).items()}


def _write(file: int, content: list[memoryview], offset: int) -> None:
    """Write all, one after the other. Raises OSError where there is no memory."""
    for part in content:
        while part:
            written = os.pwrite(file, part, offset)
            part, offset = part[written:], offset + written
