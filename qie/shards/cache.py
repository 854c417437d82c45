"""Remote shards on a local disk: whole, verified, within a budget, shared by all processes of a machine.

A file is named by the SHA-256 of its content, so it is never stale. It is downloaded aside under a lock, hashed
while it arrives, and renamed. What was used longest ago goes first; a process that still reads it keeps it until it is
done, since a mapped file outlives its name.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from qie.errors import ShardError
from qie.paths import open_own
from qie.stores import File, WholeFilesError

PART_BYTES = 8 * 2**20
PARALLEL_PARTS = 4
ATTEMPTS = 2


_OURS = re.compile(r"[0-9a-f]{64}\.tar(\.partial)?")


@dataclass(frozen=True)
class ShardCache:
    """A folder of shards that were fetched.

    Attributes:
        root: the folder, on a local disk; made when something is fetched.
        budget_bytes: how much it may hold, downloads in progress included.
    """

    root: Path
    budget_bytes: int

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
                if not self.touch(size, sha256):  # another process may have fetched it while we waited
                    partial = path.with_suffix(".tar.partial")
                    if not self._reserve(partial, size):
                        return None
                    _download(file, size, sha256, partial)
                    partial.replace(path)
        return path

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

    def _reserve(self, partial: Path, size: int) -> bool:
        """Make room for a file, and take it; False if downloads in progress leave none.

        One process after the other, or two would find the same room free.
        """
        with _locked(self.root):
            partial.unlink(missing_ok=True)
            there = []
            for path in self.root.iterdir():
                if _OURS.fullmatch(path.name) and not (path.suffix == ".partial" and _remove_dead(path)):
                    with suppress(FileNotFoundError):
                        facts = path.stat()
                        there.append((path.suffix == ".partial", facts.st_mtime_ns, facts.st_size, path))
            total = size + sum(taken for _, _, taken, _ in there)
            for on_its_way, _, taken, path in sorted(there):
                if total > self.budget_bytes and not on_its_way:
                    path.unlink(missing_ok=True)
                    total -= taken
            if total > self.budget_bytes:
                return False
            with open_own(partial) as file:
                file.truncate(size)
            return True


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
            copy.flush()
            os.fsync(copy.fileno())
        found = digest.hexdigest()
        if found == sha256:
            return
    partial.unlink()
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
    """Parts of a file, several on their way at once, but never more than a few in memory."""
    for at in range(0, len(starts), PARALLEL_PARTS):
        some = starts[at : at + PARALLEL_PARTS]
        yield from pool.map(lambda start: file.read(start, min(start + PART_BYTES, size)), some)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a folder or a lock file. The file stays: without it, two processes could have a lock each."""
    handle = os.open(path, os.O_RDONLY) if path.is_dir() else _lock_file(path)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _lock_file(path: Path) -> int:
    with open_own(path) as file:
        return os.dup(file.fileno())
