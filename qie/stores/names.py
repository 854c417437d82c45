"""Names of files in a store: relative, parts divided by '/', never out of the folder."""

from __future__ import annotations

from qie.errors import UsageError


def checked(name: str) -> str:
    """The name itself. Raises UsageError for one that is empty, absolute, climbs out, or means no one thing."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in name or "\0" in name:
        raise UsageError(
            "a file name leaves its folder, or is none", where=repr(name), expected="a relative name such as a/b.tar"
        )
    return name


def checked_range(name: str, start: int, stop: int | None) -> None:
    """Raise UsageError for a range that counts from the end, or ends before it starts."""
    if start < 0 or (stop is not None and stop < start):
        raise UsageError("a range of bytes is not one", where=name, expected="0 ≤ start ≤ stop", found=(start, stop))
