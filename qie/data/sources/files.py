"""Files that sources read: whole or by ranges, from many threads at once, on local disks and in stores.

A file is opened for each read: there is no position that threads could share, and nothing that a process could not
inherit or send.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from qie.errors import RowError, SourceError
from qie.stores import WHOLE_BYTES, Folder, MissingError, StoreError, TooLargeError, require_whole

MACHINE_ERRORS = {
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN,
}  # fmt: skip
"""What the system says when it is at fault itself. To skip a row for it would skip all that follow."""

MAX_TEXT_BYTES = 2**20
"""Of a file that holds one prompt. Those that can be encoded are far shorter."""

REMOTE_BUFFER_BYTES = 8 * 2**20


class File(Protocol):
    """One file. Methods raise OSError for local files, StoreError for remote ones."""

    @property
    def name(self) -> str: ...

    @property
    def where(self) -> object:
        """Path or URL, for messages."""

    def size(self) -> int: ...

    def read(self, most: int = WHOLE_BYTES) -> bytes:
        """The whole file. Raises TooLargeError for one of more than `most` bytes; of a local one nothing is read."""

    def read_range(self, start: int, stop: int, size: int) -> bytes:
        """The bytes [start, stop).

        Raises:
            SourceError: the file has no longer `size` bytes.
            StoreError: it cannot be read.
        """

    def open(self, buffer_bytes: int = REMOTE_BUFFER_BYTES) -> BinaryIO:
        """The file from its start, seekable, for one thread. What is remote is fetched `buffer_bytes` at a time."""


@dataclass(frozen=True)
class LocalFile:
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def where(self) -> Path:
        return self.path

    def size(self) -> int:
        _check_regular(self.path.stat())
        return self.path.stat().st_size

    def read(self, most: int = WHOLE_BYTES) -> bytes:
        facts = self.path.stat()
        _check_regular(facts)
        require_whole(facts.st_size, self.path, most)
        return self.path.read_bytes()

    def read_range(self, start: int, stop: int, size: int) -> bytes:
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise _changed(self, size, "nothing") from error
        except OSError as error:
            raise StoreError(f"a file cannot be read: {error.strerror}", where=self.path) from error
        try:
            found = os.fstat(handle).st_size
            if found != size:
                raise _changed(self, size, f"{found} bytes")
            parts = []
            while start < stop:  # one call reads at most 2 GiB
                part = os.pread(handle, stop - start, start)
                if not part:
                    raise _changed(self, size, "fewer bytes")
                parts.append(part)
                start += len(part)
            return b"".join(parts)
        finally:
            os.close(handle)

    def open(self, buffer_bytes: int = REMOTE_BUFFER_BYTES) -> BinaryIO:
        del buffer_bytes  # the system reads ahead by itself
        _check_regular(self.path.stat())
        return self.path.open("rb")


@dataclass(frozen=True)
class RemoteFile:
    folder: Folder
    name: str

    @property
    def where(self) -> str:
        return f"{self.folder.url.rstrip('/')}/{self.name}"

    def size(self) -> int:
        size = self.folder.size(self.name)
        if size is None:
            raise MissingError("there is no such file", where=self.where)
        return size

    def read(self, most: int = WHOLE_BYTES) -> bytes:
        content = self.folder.read(self.name)  # to ask for the size first would be a request more for each image
        require_whole(len(content), self.where, most)
        return content

    def read_range(self, start: int, stop: int, size: int) -> bytes:
        try:
            return self.folder.read(self.name, start, stop)
        except MissingError as error:
            raise _changed(self, size, "nothing") from error

    def open(self, buffer_bytes: int = REMOTE_BUFFER_BYTES) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(_Ranges(self, self.size()), buffer_bytes))


class _Ranges(io.RawIOBase):
    """A remote file as a stream; each read is one request."""

    def __init__(self, file: RemoteFile, size: int) -> None:
        self._file, self._size, self._at = file, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        stop = min(self._at + len(buffer), self._size)
        if stop <= self._at:
            return 0
        part = self._file.read_range(self._at, stop, self._size)
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


def readable(name: str) -> str:
    """A name that can be written down: line ends, control characters and bytes that are no Unicode as escapes."""
    return name if name.isprintable() else repr(name)[1:-1]


def row_bytes(file: File, most: int = WHOLE_BYTES) -> bytes:
    """A file of one row, whole, of at most so many bytes.

    Raises:
        RowError: it is not there, is too large, or is refused.
        StoreError: the machine or the store is at fault, not the row.
    """
    try:
        return file.read(most)
    except TooLargeError as error:
        raise RowError(error.what, where=file.where, expected=error.expected, found=error.found) from error
    except MissingError as error:
        raise RowError("a file cannot be read: there is no such file", where=file.where) from error
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno in MACHINE_ERRORS:
            raise StoreError(f"a file cannot be read: {why}", where=file.where) from error
        raise RowError(f"a file cannot be read: {why}", where=file.where) from error


def source_size(file: File) -> int:
    """The size of a file that holds rows, in bytes. Raises SourceError when it is not there or is refused."""
    try:
        return file.size()
    except MissingError as error:
        raise SourceError("the source is not there", where=file.where) from error
    except OSError as error:
        raise SourceError(f"the source cannot be read: {error.strerror}", where=file.where) from error


def _check_regular(facts: os.stat_result) -> None:
    """Raise OSError for a pipe or a device, which would be waited for or read for ever."""
    if not stat.S_ISREG(facts.st_mode) and not stat.S_ISDIR(facts.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")


def _changed(file: File, size: int, found: str) -> SourceError:
    return SourceError(
        "the source changed since it was opened",
        where=file.where,
        expected=f"{size} bytes",
        found=found,
        hint="run again",
    )
