"""Files under a folder of a local disk.

A file grows in `<name>.partial`, under a lock that dies with its process, and gets its name when it is synced. A killed
run leaves at most the partial file, which no listing shows and the next writer of that name takes over.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from qie.paths import is_at, open_locked, sync_folder
from qie.stores.contract import (
    WHOLE_BYTES,
    ChangedError,
    MissingError,
    RefusedError,
    StoreError,
    checked,
    checked_range,
    require_whole,
)

PARTIAL = ".partial"

MACHINE_ERRORS = {
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN,
}  # fmt: skip
"""Errors for which the machine or its file server is at fault, not the file: other files fail with them, too."""

_NUL = "\0"
_COPY_BYTES = 4 * 2**20
_NOWHERE = (errno.ELOOP, errno.ENOTDIR)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class LocalFolder:
    """A folder on a local disk, which need not be there before something is written. See `qie.stores.Folder`."""

    root: Path

    @property
    def url(self) -> str:
        return str(self.root)

    def __str__(self) -> str:
        return self.url

    def path(self, name: str) -> Path:
        return self.root / checked(name, forbidden=_NUL)  # a backslash is a character like others here

    def child(self, name: str) -> LocalFolder:
        return LocalFolder(self.path(name))

    def names(self) -> list[str]:
        with _explained("a folder cannot be listed", self.root):
            try:
                return sorted(os.listdir(self.root))  # noqa: PTH208 - a million Path objects take long
            except FileNotFoundError:
                return []

    def listing(self) -> dict[str, int]:
        with _explained("a folder cannot be listed", self.root):
            return {name: facts.st_size for name, facts in _files(self.root)}

    def stamps(self) -> dict[str, str]:
        with _explained("a folder cannot be listed", self.root):
            return {name: _stamp(facts) for name, facts in _files(self.root)}

    def stamp(self, name: str) -> str | None:
        facts = self._looked_at(name)
        return _stamp(facts) if facts else None

    def folders(self) -> list[str]:
        with _explained("a folder cannot be listed", self.root):
            return sorted(entry.name for entry in _entries(self.root) if os.path.isdir(entry))  # noqa: PTH112 - no link fails here

    def size(self, name: str) -> int | None:
        facts = self._looked_at(name)
        return facts.st_size if facts else None

    def _looked_at(self, name: str) -> os.stat_result | None:
        """The facts of a regular file; None when no such file."""
        path = self.path(name)
        with _explained("a file cannot be looked at", path):
            facts = _facts(path)
        return facts if facts and stat.S_ISREG(facts.st_mode) else None

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, most: int = WHOLE_BYTES, size: int | None = None
    ) -> bytes:
        checked_range(name, start, stop)
        # Sources read a few small files for each row: a Path and a context manager take as long as the system does.
        path = f"{self.root}/{checked(name, forbidden=_NUL)}"
        try:
            handle, found = _open_regular(path)
            try:
                if size not in (None, found):
                    raise ChangedError(
                        "a file changed", where=Path(path), expected=f"{size} bytes", found=f"{found} bytes"
                    )
                if start > found or (stop or 0) > found:
                    raise StoreError(
                        "a file is too short", where=Path(path), expected=f"{stop or start} bytes", found=found
                    )
                if stop is None:
                    require_whole(found - start, Path(path), most)
                return _read_range(handle, start, found if stop is None else stop, path)
            finally:
                os.close(handle)
        except OSError as error:
            raise _store_error("a file cannot be read", Path(path), error, RefusedError) from error

    def write(self, name: str, content: bytes) -> None:
        path = self.path(name)
        with _explained("a file cannot be written", path), _partial(path) as file:
            file.write(content)
            _publish(file, path)

    def upload(self, name: str, path: Path) -> None:
        target = self.path(name)
        with _explained("a file cannot be copied", path):
            source = path.open("rb")
        with source, _explained("a file cannot be written", target), _partial(target) as file:
            shutil.copyfileobj(source, file, _COPY_BYTES)
            _publish(file, target)

    def download(self, name: str, path: Path) -> None:
        source = open_regular(self.path(name))
        with source, _explained("a file cannot be written", path), path.open("wb") as target:
            shutil.copyfileobj(source, target, _COPY_BYTES)

    def create(self, name: str, content: bytes) -> bool:
        path = self.path(name)
        with _explained("a file cannot be written", path):
            if os.path.lexists(path):
                return False
            with _partial(path) as file:
                file.write(content)
                return _publish_new(file, path)

    def delete(self, name: str) -> None:
        path = self.path(name)
        with _explained("a file cannot be deleted", path), suppress(FileNotFoundError):
            path.unlink()
            sync_folder(path.parent)


def open_regular(path: Path) -> BinaryIO:
    """Open a file to be read. Raises StoreError, and MissingError when it is none."""
    with _explained("a file cannot be read", path, RefusedError):
        handle, _ = _open_regular(path)
        return os.fdopen(handle, "rb")


def _open_regular(path: str | Path) -> tuple[int, int]:
    """A handle on a file, and its size. Raises MissingError for a folder, a pipe or a device: none is read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # or a pipe would wait for its writer
        facts = os.fstat(handle)
        if stat.S_ISREG(facts.st_mode):
            return handle, facts.st_size
        os.close(handle)
        if stat.S_ISDIR(facts.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        raise FileNotFoundError(errno.ENOENT, "it is not a regular file")
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EISDIR, errno.ELOOP):
            raise
        raise MissingError("no such file", where=Path(path)) from error


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """The regular files in a folder, in order, without partial ones."""
    for entry in sorted(_entries(folder), key=lambda entry: entry.name):
        if not entry.name.endswith(PARTIAL):
            facts = _facts(entry)
            if facts and stat.S_ISREG(facts.st_mode):
                yield entry.name, facts


def _stamp(facts: os.stat_result) -> str:
    return f"{facts.st_size} {facts.st_mtime_ns}"


def _facts(file: Path | os.DirEntry[str]) -> os.stat_result | None:
    """None for what vanished meanwhile, and for a link that leads nowhere, or to itself."""
    try:
        return file.stat()
    except OSError as error:
        if error.errno == errno.ENOENT or (error.errno in _NOWHERE and file.is_symlink()):
            return None
        raise


def _read_range(handle: int, start: int, stop: int, path: str) -> bytes:
    parts: list[bytes] = []
    while start < stop:  # one call reads at most 2 GiB
        part = os.pread(handle, stop - start, start)
        if not part:
            raise StoreError("a file became shorter while it was read", where=path, expected=f"{stop} bytes")
        parts.append(part)
        start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


@contextmanager
def _partial(path: Path) -> Iterator[BinaryIO]:
    """The empty partial file of `path`, locked. What has not been renamed at the end is removed."""
    _make_folder(path.parent)
    partial = path.with_name(path.name + PARTIAL)
    file = open_locked(partial)
    try:
        yield file
    finally:
        if is_at(file, partial):
            partial.unlink()
        with suppress(OSError):  # what is left in the buffer of an abandoned file fits the disk no better now
            file.close()


def _sync(file: BinaryIO) -> Path:
    file.flush()
    os.fsync(file.fileno())
    return Path(file.name)


def _publish(file: BinaryIO, path: Path) -> None:
    _sync(file).replace(path)
    sync_folder(path.parent)


def _publish_new(file: BinaryIO, path: Path) -> bool:
    partial = _sync(file)
    try:
        path.hardlink_to(partial)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # A file system without links. Every creator holds the lock of the partial file, so looking is enough.
        if os.path.lexists(path):
            return False
        partial.replace(path)
    sync_folder(path.parent)
    return True


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it, each entered in the one above for good."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


@contextmanager
def _explained(what: str, path: Path, refusal: type[StoreError] = StoreError) -> Iterator[None]:
    """OSErrors as StoreErrors that keep what the system said; as a `refusal` where the file itself is at fault."""
    try:
        yield
    except OSError as error:
        raise _store_error(what, path, error, refusal) from error


def _store_error(what: str, path: Path, error: OSError, refusal: type[StoreError]) -> StoreError:
    cause = error.strerror or str(error)
    name = errno.errorcode.get(error.errno or 0)
    kind = StoreError if error.errno in MACHINE_ERRORS else refusal
    kind = MissingError if isinstance(error, FileNotFoundError) else kind
    return kind(what, where=path, found=f"{cause} ({name})" if name else cause)
