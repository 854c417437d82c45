"""Files under a folder of a local disk.

A file grows in `<name>.partial`, under a lock that dies with its process, and gets its name when it is synced. A killed
run leaves at most the partial file, which no listing shows and the next writer of that name takes over.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from qie.paths import open_own
from qie.stores.errors import MissingError, StoreError, require_whole
from qie.stores.names import checked, checked_range

PARTIAL = ".partial"

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
        return self.root / checked(name)

    def child(self, name: str) -> LocalFolder:
        return LocalFolder(self.path(name))

    def listing(self) -> dict[str, int]:
        with _explained("a folder cannot be listed", self.root):
            sizes = {name: _file_size(self.root / name) for name in _entries(self.root) if not name.endswith(PARTIAL)}
        return {name: size for name, size in sorted(sizes.items()) if size is not None}

    def stamps(self) -> dict[str, str]:
        with _explained("a folder cannot be listed", self.root):
            facts = {name: _facts(self.root / name) for name in _entries(self.root) if not name.endswith(PARTIAL)}
        return {
            name: f"{found.st_size} {found.st_mtime_ns}"
            for name, found in facts.items()
            if found and stat.S_ISREG(found.st_mode)
        }

    def folders(self) -> list[str]:
        with _explained("a folder cannot be listed", self.root):
            return sorted(name for name in _entries(self.root) if (self.root / name).is_dir())

    def size(self, name: str) -> int | None:
        path = self.path(name)
        with _explained("a file cannot be looked at", path):
            return _file_size(path)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        checked_range(name, start, stop)
        path = self.path(name)
        with _explained("a file cannot be read", path):
            if _file_size(path) is None:  # asked first: to open a pipe would wait for its writer
                raise MissingError("there is no such file", where=path)
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if start > size or (stop or 0) > size:
                    raise StoreError("a file is too short", where=path, expected=f"{stop or start} bytes", found=size)
                if stop is None:
                    require_whole(size - start, path)
                return _read_range(file, start, size if stop is None else stop, path)

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
            _sync_directory(path.parent)


def _entries(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return []


def _file_size(path: Path) -> int | None:
    """The size of a regular file; None for anything else, such as a link that leads nowhere, or to itself. A file that
    vanishes meanwhile is not there."""
    facts = _facts(path)
    if facts is None:
        return None
    return facts.st_size if stat.S_ISREG(facts.st_mode) else None


def _facts(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError as error:
        if error.errno == errno.ENOENT or (error.errno in _NOWHERE and path.is_symlink()):
            return None
        raise


def _read_range(file: BinaryIO, start: int, stop: int, path: Path) -> bytes:
    parts: list[bytes] = []
    while start < stop:  # one call reads at most 2 GiB
        part = os.pread(file.fileno(), stop - start, start)
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
    file = _locked(partial)
    try:
        yield file
    finally:
        if _is_at(file, partial):
            partial.unlink()
        with suppress(OSError):  # what is left in the buffer of an abandoned file fits the disk no better now
            file.close()


def _locked(partial: Path) -> BinaryIO:
    while True:
        file = open_own(partial)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(file, partial):
                file.truncate(0)
                return file
        except BaseException:
            file.close()
            raise
        # Its former writer renamed or removed it between our opening and our locking: it may be the file itself by now.
        file.close()


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False


def _sync(file: BinaryIO) -> Path:
    file.flush()
    os.fsync(file.fileno())
    return Path(file.name)


def _publish(file: BinaryIO, path: Path) -> None:
    _sync(file).replace(path)
    _sync_directory(path.parent)


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
    _sync_directory(path.parent)
    return True


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it, each entered in the one above for good."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_directory(folder.parent)


def _sync_directory(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _explained(what: str, path: Path) -> Iterator[None]:
    """OSErrors as StoreErrors that keep what the system said."""
    try:
        yield
    except OSError as error:
        cause = error.strerror or str(error)
        name = errno.errorcode.get(error.errno or 0)
        kind = MissingError if isinstance(error, FileNotFoundError) else StoreError
        raise kind(what, where=path, found=f"{cause} ({name})" if name else cause) from error
