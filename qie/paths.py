"""Paths as users write them."""

from __future__ import annotations

from pathlib import Path

from qie.errors import UsageError


def local_path(place: str | Path) -> Path:
    """A path with `~` expanded. Raises UsageError for the home of nobody."""
    try:
        return Path(place).expanduser()
    except RuntimeError as error:
        raise UsageError("no such home", where=place, found=str(error)) from error
