"""What can go wrong with files in a store.

QieError
└── StoreError            a store cannot be reached, refuses, or gives other bytes than asked for
    ├── MissingError      there is no such file
    ├── TooLargeError     a file is too large to be read whole
    ├── UnlistedError     a web server does not say what files it has
    └── WholeFilesError   a web server sends no part of a file
"""

from __future__ import annotations

from qie.errors import QieError


class StoreError(QieError):
    """A store cannot be reached, does not allow it, or broke its promise."""


class MissingError(StoreError):
    """There is no file of that name."""


class UnlistedError(StoreError):
    """A web server does not say what files it has."""


class WholeFilesError(StoreError):
    """A web server sends no part of a file, only all of it."""


class TooLargeError(StoreError):
    """A file is too large to be read whole: it is none of those that are. Nothing of it was read."""


WHOLE_BYTES = 4 * 2**30
"""What is read whole, an image, an index or a text, is smaller. Larger files are read by ranges."""


def require_whole(size: int, where: object, most: int = WHOLE_BYTES) -> None:
    """Raise TooLargeError unless a file of `size` bytes may be read whole."""
    if size > most:
        raise TooLargeError("a file is too large", where=where, expected=f"at most {most} bytes", found=f"{size} bytes")
