"""Copies of remote files that are mapped as a whole, one for all processes of a machine.

A copy is named by the file's place and stamp, so it is never stale. Shards have a folder of their own, which its owner
names and bounds: see `qie.shards.cache`.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from qie.paths import cache_folder, is_at, open_locked
from qie.stores.contract import MissingError, StoreError
from qie.stores.urls import File


def copies_folder() -> Path:
    """`$XDG_CACHE_HOME/qie/copies`. It may be deleted at any time."""
    return cache_folder() / "copies"


def local_copy(file: File) -> Path:
    """A local copy of a remote file, fetched by one process of a machine in one request; older ones of it are deleted.

    Raises:
        MissingError: no such file.
        StoreError: it cannot be fetched, or there is no room for it.
    """
    stamp = file.folder.stamp(file.name)
    if stamp is None:
        raise MissingError("no such file", where=file)
    place = _short(str(file))
    path = copies_folder() / f"{place}-{_short(stamp)}"
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with open_locked(partial) as lock:
            try:
                if not path.exists():  # another process may have fetched it while we waited
                    file.folder.download(file.name, partial)
                    _require_size(file, partial, stamp)
                    os.fsync(lock.fileno())
                    partial.replace(path)
            finally:
                if is_at(lock, partial):
                    partial.unlink()
    except OSError as error:
        raise StoreError(
            "a copy of a remote file cannot be kept",
            where=path,
            found=error.strerror or str(error),
            hint="set XDG_CACHE_HOME to a folder on a local disk with room for it",
        ) from error
    for older in path.parent.glob(f"{place}-*"):
        if older != path and older.suffix != ".partial":
            older.unlink(missing_ok=True)  # who has it mapped keeps it
    return path


def _require_size(file: File, copy: Path, stamp: str) -> None:
    size, found = stamp.partition(" ")[0], copy.stat().st_size
    if size != str(found):
        raise StoreError(
            "a file changed while it was copied", where=file, expected=f"{size} bytes", found=f"{found} bytes"
        )


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
