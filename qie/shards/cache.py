"""Remote shards on a local disk: whole, verified, within a budget, shared by all processes of a machine.

A file is named by the SHA-256 of its content, so it is never stale. It is downloaded aside under a lock, hashed
while it arrives, and renamed. What was used longest ago goes first; a process that still reads it keeps it until it is
done, since a mapped file outlives its name. Who reads ahead announces what is needed soon, in a file beside the copies:
that goes last, and nothing that is fetched ahead takes its place.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto
from io import BufferedWriter
from pathlib import Path

from qie.errors import ShardError
from qie.paths import open_locked, open_own
from qie.stores import File, WholeFilesError
from qie.threads import pause, submit

PART_BYTES = 4 * 2**20
"""Small, so that a shard's last parts leave no hole in the link, and copying one delays other threads for a moment."""
PARALLEL_PARTS = 4
ATTEMPTS = 2
LONGEST_LOOK_S = 0.05
"""Between two looks at a lock that another holds."""

_OURS = re.compile(r"[0-9a-f]{64}\.tar(\.partial)?")
_LISTS = re.compile(r"\d+-[0-9a-f]{8}\.soon")


class Ahead(Enum):
    """What became of a copy that was to be fetched ahead."""

    THERE = auto()
    BUSY = auto()
    """Another thread or process is fetching it."""
    FULL = auto()
    """What is needed soon leaves no room."""


@dataclass(frozen=True)
class ShardCache:
    """A folder of shards that were fetched.

    Attributes:
        root: the folder, on a local disk; made when something is fetched.
        budget_bytes: how much it may hold, downloads in progress included.
    """

    root: Path
    budget_bytes: int

    @property
    def ahead_bytes(self) -> int:
        """Room for what is needed soon. The rest is for what was not foreseen, and for what may be used again."""
        return self.budget_bytes * 3 // 4

    def fetch(self, file: File, size: int, sha256: str) -> Path | None:
        """The local copy of a tar, fetched if it is not there; None if the budget has no room for it now.

        Raises:
            ShardError: what arrives has another hash, twice.
            StoreError: it cannot be fetched.
        """
        if size > self.budget_bytes:
            return None
        path = self._path(sha256)
        if not self.touch(size, sha256):
            self.root.mkdir(parents=True, exist_ok=True)
            with _locked(path.with_suffix(".lock")):
                # Another process may have fetched it while we waited.
                if not self.touch(size, sha256) and not self._fetch_new(file, size, sha256, ahead=False):
                    return None
        return path

    def fetch_ahead(self, file: File, size: int, sha256: str) -> Ahead:
        """Fetch a tar that is announced, unless it is there. Waits for nobody, and evicts nothing that is announced.

        Raises: what `fetch` does.
        """
        if self.touch(size, sha256):
            return Ahead.THERE
        self.root.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            try:
                held.enter_context(_locked(self._path(sha256).with_suffix(".lock"), wait=False))
            except BlockingIOError:
                return Ahead.BUSY
            there = self.touch(size, sha256) or self._fetch_new(file, size, sha256, ahead=True)
        return Ahead.THERE if there else Ahead.FULL

    def _fetch_new(self, file: File, size: int, sha256: str, *, ahead: bool) -> bool:
        path = self._path(sha256)
        partial = path.with_suffix(".tar.partial")
        if not self._reserve(partial, size, ahead=ahead):
            return False
        try:
            _download(file, size, sha256, partial)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        with _locked(self.root):  # who looks at what is there sees one of the two names
            partial.replace(path)
        return True

    def read(self, file: File, size: int, sha256: str, start: int, stop: int) -> bytearray | None:
        """The bytes [start, stop) of a tar, from its local copy; None if there is no room for one.

        They are read, not mapped: a copy that went to make room for others would take it as long as it was mapped.
        """
        while path := self.fetch(file, size, sha256):
            with suppress(FileNotFoundError), path.open("rb", buffering=0) as copy:  # it may go before it is opened
                content = bytearray(stop - start)
                copy.seek(start)
                if copy.readinto(content) == len(content):
                    return content
                raise ShardError("a cached shard became shorter", where=path, hint="delete it")
        return None

    def touch(self, size: int, sha256: str) -> bool:
        """Whether a whole copy is there; if so, it was used now."""
        path = self._path(sha256)
        try:
            if path.stat().st_size != size:
                return False
            os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def forget(self, sha256: str) -> None:
        """Delete a copy that turned out to be damaged."""
        self._path(sha256).unlink(missing_ok=True)

    def _path(self, sha256: str) -> Path:
        return self.root / f"{sha256}.tar"

    def _reserve(self, partial: Path, size: int, *, ahead: bool) -> bool:
        """Make room for a file, and take it; False if what has to stay leaves none.

        One process after the other, or two would find the same room free.
        """
        with _locked(self.root):
            partial.unlink(missing_ok=True)
            soon = _announced(self.root)
            coming, copies = 0, []
            for path in self.root.iterdir():
                if _OURS.fullmatch(path.name) and not (path.suffix == ".partial" and _remove_dead(path)):
                    with suppress(FileNotFoundError):
                        facts = path.stat()
                        if path.suffix == ".partial":
                            coming += facts.st_size
                        else:
                            copies.append((soon.get(path.stem, _NOT_SOON), facts.st_mtime_ns, facts.st_size, path))
            needed = sum(taken for place, _, taken, _ in copies if place > _NOT_SOON) if ahead else 0
            if size + coming + needed > (self.ahead_bytes if ahead else self.budget_bytes):
                return False
            total = size + coming + sum(taken for _, _, taken, _ in copies)
            for _, _, taken, path in sorted(copies):
                if total > self.budget_bytes:
                    path.unlink(missing_ok=True)
                    total -= taken
            with open_own(partial) as file:
                file.truncate(size)
            return True


_NOT_SOON = -(1 << 62)


class Announcement:
    """What one reader of a folder of copies needs soon, told to all who make room there, until it or its process ends.

    A file of names, under a lock that dies with its process.
    """

    def __init__(self, cache: ShardCache) -> None:
        self._root = cache.root
        self._path = cache.root / f"{os.getpid()}-{secrets.token_hex(4)}.soon"
        self._file: BufferedWriter | None = None

    def tell(self, names: Sequence[str]) -> None:
        """Announce these copies alone, by the SHA-256 of their content, in the order in which they are needed."""
        self._root.mkdir(parents=True, exist_ok=True)
        with _locked(self._root):
            self._file = self._file or open_locked(self._path)
            self._file.seek(0)
            self._file.truncate()
            self._file.write("\n".join(names).encode())
            self._file.flush()

    def close(self) -> None:
        """Nothing is announced any more."""
        if self._file:
            self._path.unlink(missing_ok=True)
            self._file.close()


def _announced(root: Path) -> dict[str, int]:
    """What is needed soon, by name: the larger the number, the sooner. Whoever asks holds the folder's lock."""
    soon: dict[str, int] = {}
    for path in root.iterdir():
        names = _names_in(path) if _LISTS.fullmatch(path.name) else []
        for place, name in enumerate(names):
            soon[name] = max(soon.get(name, _NOT_SOON), -place)
    return soon


def _names_in(announcement: Path) -> list[str]:
    """None of one whose process is gone: it is deleted."""
    try:
        handle = os.open(announcement, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # it has ended just now, or somebody put something else there
        return []
    with os.fdopen(handle, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().decode().split()
    announcement.unlink(missing_ok=True)
    return []


def _remove_dead(partial: Path) -> bool:
    """Remove what a killed process was fetching; whether it was one."""
    lock = partial.with_suffix("").with_suffix(".lock")
    try:
        with open_own(lock) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            partial.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    return True


def _download(file: File, size: int, sha256: str, partial: Path) -> None:
    found = ""
    for _ in range(ATTEMPTS):
        digest = hashlib.sha256()
        with open_own(partial) as copy, ThreadPoolExecutor(PARALLEL_PARTS) as pool:
            for part in _content(pool, file, size):
                digest.update(part)
                copy.write(part)
        # Not synced: runs would wait for the disk. What a power cut leaves has another hash, and is fetched again
        # when it is read.
        found = digest.hexdigest()
        if found == sha256:
            return
    raise ShardError(
        "a shard is damaged, or is not the one its index describes",
        where=file,
        expected=f"SHA-256 {sha256}",
        found=found,
        hint="copy it to the store again, or delete it with its index and run qie-precompute again",
    )


def _content(pool: ThreadPoolExecutor, file: File, size: int) -> Iterator[bytes]:
    try:
        yield from _in_order(pool, file, range(0, size, PART_BYTES), size)
    except WholeFilesError:  # said of the first part, before anything came
        yield file.read()


def _in_order(pool: ThreadPoolExecutor, file: File, starts: range, size: int) -> Iterator[bytes]:
    """Parts of a file, several on their way at all times, but never more than a few in memory.

    Between two of them, a thread that is to stop does so.
    """
    coming: deque[Future[bytes]] = deque()
    try:
        for start in starts:
            coming.append(submit(pool, file.read, start, min(start + PART_BYTES, size)))
            if len(coming) == PARALLEL_PARTS:
                pause(0)
                yield coming.popleft().result()
        while coming:
            pause(0)
            yield coming.popleft().result()
    finally:
        for part in coming:
            part.cancel()


@contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a folder or a lock file. The file stays: without it, two processes could have a lock each.

    A folder's is held for a moment; that of a file for as long as a download takes, and a thread that is to stop waits
    no longer for it.

    Raises:
        BlockingIOError: another holds it, and `wait` is false.
    """
    folder = path.is_dir()
    handle = os.open(path, os.O_RDONLY) if folder else _lock_file(path)
    try:
        if folder:
            fcntl.flock(handle, fcntl.LOCK_EX)
        else:
            _lock(handle, wait)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, wait: bool) -> None:
    seconds = 0.001
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not wait:
                raise
        pause(seconds)
        seconds = min(2 * seconds, LONGEST_LOOK_S)


def _lock_file(path: Path) -> int:
    with open_own(path) as file:
        return os.dup(file.fileno())
