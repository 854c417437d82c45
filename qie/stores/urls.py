"""From the places that users name, local or remote, to folders and files."""

from __future__ import annotations

import io
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast
from urllib.parse import unquote, urlsplit

from qie.errors import UsageError
from qie.paths import local_path
from qie.stores.contract import WHOLE_BYTES, Folder, MissingError
from qie.stores.disk import LocalFolder, open_regular
from qie.stores.hub import HubFolder
from qie.stores.objects import ObjectFolder

OBJECTS = ("s3", "gs", "az", "https", "http")
REMOTE_SCHEMES = (*OBJECTS, "hf")
SCHEMES = (*REMOTE_SCHEMES, "file")
BUFFER_BYTES = 8 * 2**20

_SCHEME = re.compile(r"(pipe(?=:)|[a-z][a-z0-9+.-]*(?=://))", re.IGNORECASE)
# Path("s3://bucket") is s3:/bucket: taken for a local path, it would fill a disk instead of a bucket.
_ONE_SLASH = re.compile(rf"({'|'.join(SCHEMES)}):/(?!/)", re.IGNORECASE)


def scheme_of(place: str) -> str | None:
    """The scheme of a URL in lower case, "pipe" too; None for a local path."""
    scheme = _SCHEME.match(place)
    return scheme[1].lower() if scheme else None


def open_folder(url: str | Path | Folder) -> Folder:
    """The folder that a user names; a folder is itself. Touches neither network nor disk.

    Args:
        url: s3://bucket/path, gs://bucket/path, az://container/path, https://host/path, http://host/path,
            hf://datasets/owner/name[@revision]/path, hf://owner/name/path, file:///path, or a local path.

    Raises:
        UsageError: the URL is of another kind, or names no bucket, host or repository.
    """
    if not isinstance(url, (str, Path)):
        return url
    place = str(url)
    scheme = scheme_of(place)
    if scheme in OBJECTS:
        return ObjectFolder.open(place)
    if scheme == "hf":
        return HubFolder.open(place)
    if scheme == "file":
        return LocalFolder(_file_path(place))
    if scheme is not None or _ONE_SLASH.match(place):
        raise UsageError(
            unreadable(scheme) if scheme else "a URL lacks a slash",
            where=place,
            expected="a local path, or " + ", ".join(f"{known}://" for known in SCHEMES),
        )
    return LocalFolder(local_path(place))


def unreadable(scheme: str) -> str:
    """Why qie reads no URL of another scheme."""
    return f"{scheme}: URLs are not read {'because they run a shell command' if scheme == 'pipe' else 'by qie'}"


@dataclass(frozen=True, slots=True)
class File:
    """A file by its folder and name. The file need not exist."""

    folder: Folder
    name: str

    @classmethod
    def at(cls, place: str | Path | File) -> File:
        """The file that a path or URL names."""
        if isinstance(place, File):
            return place
        folder, _, name = str(place).rpartition("/")
        return cls(open_folder(folder or ("/" if str(place).startswith("/") else ".")), name)

    def __str__(self) -> str:
        url = self.folder.url
        return self.name if url == "." else f"{url.rstrip('/')}/{self.name}"

    @property
    def path(self) -> Path | None:
        """On the local disk; None elsewhere."""
        return self.folder.path(self.name)

    @property
    def stem(self) -> str:
        # As a path has it, in a tenth of the time: a folder may hold a million shards.
        last = self.name.rpartition("/")[2]
        dot = last.rfind(".")
        return last[:dot] if 0 < dot < len(last) - 1 else last

    def with_suffix(self, suffix: str) -> File:
        return File(self.folder, str(PurePosixPath(self.name).with_suffix(suffix)))

    def size(self) -> int | None:
        """In bytes; None when no such file."""
        return self.folder.size(self.name)

    def read(
        self, start: int = 0, stop: int | None = None, *, most: int = WHOLE_BYTES, size: int | None = None
    ) -> bytes:
        """See `Folder.read`."""
        return self.folder.read(self.name, start, stop, most=most, size=size)

    def open(self, buffer_bytes: int = BUFFER_BYTES) -> BinaryIO:
        """The file from its start, seekable, for one thread; a remote one comes `buffer_bytes` at a time.

        Raises:
            MissingError: no such file.
            StoreError: it cannot be opened.
        """
        if path := self.path:
            return open_regular(path)
        size = self.size()
        if size is None:
            raise MissingError("no such file", where=self)
        return cast(BinaryIO, io.BufferedReader(_Ranges(self, size), buffer_bytes))


class _Ranges(io.RawIOBase):
    """A remote file as a stream; each read is one request."""

    def __init__(self, file: File, size: int) -> None:
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
        part = self._file.read(self._at, stop)
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


def _file_path(url: str) -> Path:
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/"):
        raise UsageError("a file URL is not of this machine", where=url, expected="such as file:///data/shards")
    return Path(path)
