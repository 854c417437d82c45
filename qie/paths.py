"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path

from qie.errors import UsageError


def local_path(place: str | Path) -> Path:
    """A path with `~` expanded. Raises UsageError for the home of nobody."""
    try:
        return Path(place).expanduser()
    except RuntimeError as error:
        raise UsageError("no such home", where=place, found=str(error)) from error


def require_writable(path: Path) -> None:
    """Raise UsageError when no file can be written to `path`: to be asked before the work, not after it."""
    if not path.parent.is_dir() or path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError("nothing can be written there", where=path, expected="a file in a folder that exists")
