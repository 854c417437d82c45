"""A folder of files, wherever it lies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from qie.errors import UsageError
from qie.paths import local_path
from qie.stores.hub import HubFolder
from qie.stores.local import LocalFolder
from qie.stores.objects import ObjectFolder

_SCHEME = re.compile(r"(pipe(?=:)|[a-z][a-z0-9+.-]*(?=://))", re.IGNORECASE)

OBJECTS = ("s3", "gs", "az", "https", "http")
SCHEMES = (*OBJECTS, "hf", "file")

# Path("s3://bucket") is s3:/bucket: taken for a local path, it would fill a disk instead of a bucket.
_ONE_SLASH = re.compile(rf"({'|'.join(SCHEMES)}):/(?!/)", re.IGNORECASE)


class Folder(Protocol):
    """Files under one folder of some store.

    All names are relative, their parts divided by '/'. Every method raises UsageError for a name that climbs out ('..',
    absolute, backslash, NUL), and StoreError when the store cannot be reached or refuses.
    """

    @property
    def url(self) -> str:
        """As a user would type it."""
        ...

    def path(self, name: str) -> Path | None:
        """The path on the local disk; None for other stores."""
        ...

    def child(self, name: str) -> Folder:
        """A folder in this one; it need not be there."""
        ...

    def listing(self) -> dict[str, int]:
        """The files directly in the folder and their sizes in bytes, by name. Without the folder there are none."""
        ...

    def stamps(self) -> dict[str, str]:
        """The same files, with a text each that is another one when the file was written again."""
        ...

    def folders(self) -> list[str]:
        """The names of the folders directly in it, in order."""
        ...

    def size(self, name: str) -> int | None:
        """The size of a file in bytes; None when there is no such file."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Exactly the bytes [start, stop) of a file.

        Raises:
            MissingError: there is no such file.
            TooLargeError: the whole file was asked for, and it is larger than `WHOLE_BYTES`.
            StoreError: the file ends before `stop`, or fewer bytes came than were asked for.
        """
        ...

    def write(self, name: str, content: bytes) -> None:
        """Write a file so that it is there whole or not at all, also after a power cut."""
        ...

    def upload(self, name: str, path: Path) -> None:
        """Write a file from a local one of any size, with the same promise."""
        ...

    def create(self, name: str, content: bytes) -> bool:
        """Write a file unless there is one of that name; then False, and nothing was done.

        Of two who create at once, one succeeds; on the Hugging Face Hub, which cannot say so, both may. After an
        answer that was lost, a remote file of equal content counts as written by this call: who must know that it was
        theirs writes something that only they would write.
        """
        ...

    def delete(self, name: str) -> None:
        """Delete a file; that it is not there is no error."""
        ...


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
        why = "because they run a shell command" if scheme == "pipe" else "by qie"
        what = f"{scheme}: URLs are not read {why}" if scheme else "a URL lacks a slash"
        raise UsageError(
            what, where=place, expected="a local path, or " + ", ".join(f"{known}://" for known in SCHEMES)
        )
    return LocalFolder(local_path(place))


def scheme_of(place: str) -> str | None:
    """The scheme of a URL in lower case, "pipe" too; None for a local path."""
    scheme = _SCHEME.match(place)
    return scheme[1].lower() if scheme else None


def _file_path(url: str) -> Path:
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/"):
        raise UsageError("a file URL is not of this machine", where=url, expected="such as file:///data/shards")
    return Path(path)
