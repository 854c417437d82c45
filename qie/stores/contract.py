"""The contract of a store's folders: methods, names and errors.

QieError
└── StoreError            a store cannot be reached, refuses, or sends other bytes than asked for
    ├── MissingError      no such file
    ├── ChangedError      a file has another size than its reader knows
    ├── RefusedError      the system gives no access to this one file; others may be read
    ├── TooLargeError     a file is too large to be read whole
    ├── UnlistedError     a web server does not list its files
    └── WholeFilesError   a web server sends no part of a file
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from qie.errors import QieError, UsageError

WHOLE_BYTES = 4 * 2**30
"""The largest file that is read whole: images, indexes and texts are smaller. Larger files are read by ranges."""


class StoreError(QieError):
    """A store cannot be reached, does not allow it, or broke its promise."""

    @property
    def reason(self) -> str:
        """The system's message, or else the error's own."""
        cause = self.__cause__
        return (cause.strerror if isinstance(cause, OSError) else None) or self.what


class MissingError(StoreError):
    """No such file."""


class ChangedError(StoreError):
    """A file has another size than its reader knows."""


class RefusedError(StoreError):
    """The system gives no access to a file. The fault is the file's, not the machine's: others may be read."""


class UnlistedError(StoreError):
    """A web server does not list its files."""


class WholeFilesError(StoreError):
    """A web server sends no part of a file, only all of it."""


class TooLargeError(StoreError):
    """A file is too large to be read whole. Nothing of it was read."""


class Folder(Protocol):
    """Files under one folder of some store.

    All names are relative, their parts divided by '/'. Every method raises UsageError for a name that climbs out ('..',
    absolute, NUL; elsewhere than on a local disk a backslash, too), and StoreError when the store cannot be reached or
    refuses.
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

    def names(self) -> list[str]:
        """The names of all files and folders directly in it, in order; none of a missing folder."""
        ...

    def listing(self) -> dict[str, int]:
        """The files directly in the folder and their sizes in bytes, by name; none of a missing folder."""
        ...

    def stamps(self) -> dict[str, str]:
        """The same files, with a text each that changes when the file is written again."""
        ...

    def stamp(self, name: str) -> str | None:
        """The same text of one file; None when no such file."""
        ...

    def folders(self) -> list[str]:
        """The names of the folders directly in it, in order."""
        ...

    def size(self, name: str) -> int | None:
        """The size of a file in bytes; None when no such file."""
        ...

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, most: int = WHOLE_BYTES, size: int | None = None
    ) -> bytes:
        """Exactly the bytes [start, stop) of a file; without `stop`, everything up to its end.

        Args:
            name: of the file.
            start, stop: a half-open range of bytes.
            most: bytes that are read without `stop`.
            size: bytes that the file had, compared where that costs no further request: on a local disk.

        Raises:
            ChangedError: the file has another size.
            MissingError: no such file.
            TooLargeError: `stop` is None, and more than `most` bytes would have to be read.
            RefusedError: the system gives no access to this file.
            StoreError: the file ends before `stop`, or fewer bytes came than were asked for.
        """
        ...

    def write(self, name: str, content: bytes) -> None:
        """Write a file so that it is there whole or not at all, also after a power cut."""
        ...

    def upload(self, name: str, path: Path) -> None:
        """Write a file from a local one of any size, with the same promise."""
        ...

    def download(self, name: str, path: Path) -> None:
        """Write the content of a file of any size to a local one, which others may see while it grows.

        Raises:
            MissingError: no such file.
            StoreError: it cannot be read.
        """
        ...

    def create(self, name: str, content: bytes) -> bool:
        """Write a file unless there is one of that name; then return False and do nothing.

        Of two who create at once, one succeeds; on the Hugging Face Hub, which cannot say so, both may. After an
        answer was lost, a remote file of equal content counts as written by this call: a caller that must know whether
        it created the file writes something that only it would write.
        """
        ...

    def delete(self, name: str) -> None:
        """Delete a file. A missing file is not an error."""
        ...


def checked(name: str, forbidden: str = "\\\0") -> str:
    """The name itself. Raises UsageError if it is empty, absolute, climbs out, or holds a forbidden character."""
    parts = name.split("/")
    if "" in parts or "." in parts or ".." in parts or any([char in name for char in forbidden]):  # noqa: C419 - faster
        raise UsageError(
            "a file name is empty or leaves its folder", where=repr(name), expected="a relative name such as a/b.tar"
        )
    return name


def checked_range(name: str, start: int, stop: int | None) -> None:
    """Raise UsageError for a range that counts from the end, or ends before it starts."""
    if start < 0 or (stop is not None and stop < start):
        raise UsageError("a byte range is invalid", where=name, expected="0 ≤ start ≤ stop", found=(start, stop))


def require_whole(size: int, where: object, most: int = WHOLE_BYTES) -> None:
    """Raise TooLargeError unless a file of `size` bytes may be read whole."""
    if size > most:
        raise TooLargeError("a file is too large", where=where, expected=f"at most {most} bytes", found=f"{size} bytes")
