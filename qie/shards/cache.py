"""Remote shards on a local disk: whole, verified, within a budget, shared by all processes of a machine.

A file is named by the SHA-256 of its content, so it is never stale. It is downloaded aside under a lock, hashed
while it arrives, and renamed. What was used longest ago goes first; a process that still reads it keeps it until it is
done, since a mapped file outlives its name.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from qie.errors import ShardError
from qie.stores import File

PART_BYTES = 8 * 2**20
PARALLEL_PARTS = 4
ATTEMPTS = 2


@dataclass(frozen=True)
class ShardCache:
    """A folder of shards that were fetched.

    Attributes:
        root: the folder, on a local disk; made when something is fetched.
        budget_bytes: how much it may hold.
    """

    root: Path
    budget_bytes: int

    def fetch(self, file: File, size: int, sha256: str) -> Path | None:
        """The local copy of a tar, fetched if it is not there; None if it is larger than the budget.

        Raises:
            ShardError: what arrives has another hash, twice.
            StoreError: it cannot be fetched.
        """
        if size > self.budget_bytes:
            return None
        path = self._path(sha256)
        if not _touch(path, size):
            self.root.mkdir(parents=True, exist_ok=True)
            with _locked(self.root / f"{sha256}.lock"):
                if not _touch(path, size):  # another process may have fetched it while we waited
                    self._make_room(size)
                    _download(file, size, sha256, path)
        return path

    def forget(self, sha256: str) -> None:
        """Delete a copy that turned out to be damaged."""
        self._path(sha256).unlink(missing_ok=True)

    def _path(self, sha256: str) -> Path:
        return self.root / f"{sha256}.tar"

    def _make_room(self, size: int) -> None:
        there = []
        for path in self.root.glob("*.tar"):
            with suppress(FileNotFoundError):  # another process makes room, too
                there.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        total = size + sum(bytes_ for _, bytes_, _ in there)
        for _, bytes_, path in sorted(there):
            if total <= self.budget_bytes:
                return
            path.unlink(missing_ok=True)
            total -= bytes_


def _touch(path: Path, size: int) -> bool:
    """Whether a whole copy is there; if so, it was used now."""
    try:
        if path.stat().st_size != size:
            return False
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def _download(file: File, size: int, sha256: str, path: Path) -> None:
    found = ""
    for _ in range(ATTEMPTS):
        partial = path.with_suffix(".tar.partial")
        digest = hashlib.sha256()
        with partial.open("wb") as copy, ThreadPoolExecutor(PARALLEL_PARTS) as pool:
            starts = range(0, size, PART_BYTES)
            for part in _in_order(pool, file, starts, size):
                digest.update(part)
                copy.write(part)
            copy.flush()
            os.fsync(copy.fileno())
        found = digest.hexdigest()
        if found == sha256:
            partial.replace(path)
            return
        partial.unlink()
    raise ShardError(
        "a shard is damaged, or is not the one its index describes",
        where=file,
        expected=f"SHA-256 {sha256}",
        found=found,
        hint="copy it to the store again, or delete it with its index and run qie-precompute again",
    )


def _in_order(pool: ThreadPoolExecutor, file: File, starts: range, size: int) -> Iterator[bytes]:
    """Parts of a file, several on their way at once, but never more than a few in memory."""
    for at in range(0, len(starts), PARALLEL_PARTS):
        some = starts[at : at + PARALLEL_PARTS]
        yield from pool.map(lambda start: file.read(start, min(start + PART_BYTES, size)), some)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file's lock; the file stays, empty: to delete it could leave two processes with a lock each."""
    with path.open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
