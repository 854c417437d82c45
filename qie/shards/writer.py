"""Writing one shard so that it is either there, complete, or not there at all.

The tar grows in `<stem>.tar.partial`, under a lock that dies with its process. When it is complete it is synced and
renamed, then the index is. A killed run leaves at most partial files, which the next writer of that shard takes over.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import tarfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from qie.errors import ShardError
from qie.recipe import Recipe
from qie.shards.index import Entry, Member, ShardIndex, Skipped, member_name, shard_stem

_BLOCK = 512


class ShardBusyError(ShardError):
    """Another process is writing this shard now."""


class ShardWriter:
    """Writes the shard of rows [start, stop). Use as a context; without `publish` nothing becomes visible.

    Raises:
        ShardBusyError: on entering, when another process is writing the same shard.
    """

    def __init__(self, directory: Path, start: int, stop: int, recipe: Recipe) -> None:
        self.start, self.stop, self.recipe = start, stop, recipe
        self._tar_path = directory / f"{shard_stem(start, stop)}.tar"
        self._partial = self._tar_path.with_suffix(".tar.partial")
        self._members: dict[str, Member] = {}
        self._entries: list[Entry] = []
        self._skipped: list[Skipped] = []
        self._published = False

    def __enter__(self) -> ShardWriter:
        self._partial.parent.mkdir(parents=True, exist_ok=True)
        self._file = _locked(self._partial)
        self._hashed = _HashingFile(self._file)
        # A stream: the tar is written front to back, so its hash is known when it ends. USTAR with an integer mtime
        # needs no extended headers: every member is one 512-byte block and its payload.
        self._tar = tarfile.open(fileobj=self._hashed, mode="w|", format=tarfile.USTAR_FORMAT)  # type: ignore[call-overload]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Once published, what lies at the partial path may be the next writer's.
        if not self._published:
            self._partial.unlink(missing_ok=True)
        with suppress(OSError):  # an abandoned tar that is not closed complains when it is collected
            self._tar.close()
        self._file.close()

    def add(self, entry: Entry, record: bytes) -> None:
        """Append a row's record; a record that is there already (a row of equal content) is not written twice."""
        self._entries.append(entry)
        name = member_name(entry.key)
        if name in self._members:
            return
        info = tarfile.TarInfo(name)
        info.size, info.mtime, info.mode = len(record), 0, 0o644
        self._members[name] = Member(self._tar.offset + _BLOCK, len(record), hashlib.sha256(record).hexdigest())
        self._tar.addfile(info, io.BytesIO(record))

    def skip(self, skipped: Skipped) -> None:
        """Record a row that the shard does not hold, and why."""
        self._skipped.append(skipped)

    def publish(self) -> ShardIndex:
        """Make the shard visible: tar first, then its index. Returns the index."""
        self._tar.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        index = ShardIndex(
            start=self.start,
            stop=self.stop,
            filesize=self._hashed.written,
            sha256=self._hashed.sha256.hexdigest(),
            recipe=self.recipe,
            files=self._members,
            samples=tuple(sorted(self._entries, key=lambda entry: entry.row)),
            skipped=tuple(sorted(self._skipped, key=lambda skipped: skipped.row)),
        )
        index_path = self._tar_path.with_suffix(".json")
        # A shard that replaces another: without its index the old one is gone before the new one is there.
        index_path.unlink(missing_ok=True)
        self._partial.replace(self._tar_path)
        self._published = True
        write_file(index_path, (index.to_json() + "\n").encode())
        return index


def write_file(path: Path, content: bytes) -> None:
    """Write a small file so that it is there whole or not at all, also after a power cut."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    _sync_directory(path.parent)


def _locked(path: Path) -> BinaryIO:
    """The file at `path`, empty, and locked by this process for as long as it is open."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ShardBusyError("another process is writing this shard", where=path) from error
    if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
        # Its former writer published it, or gave up, between our opening and our locking.
        file.close()
        raise ShardBusyError("another process has just written this shard", where=path)
    file.truncate(0)
    return file


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _HashingFile:
    """A file for writing that knows the SHA-256 and the number of the bytes written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.written = 0

    def write(self, chunk: bytes) -> int:
        self.sha256.update(chunk)
        self.written += len(chunk)
        return self._file.write(chunk)
