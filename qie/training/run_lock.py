"""The lock of train.output_dir: one run at a time writes there."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path

from qie.errors import QieError, UsageError
from qie.paths import open_locked

LOCK_FILE = ".lock"


@contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """A context in which no other run uses the folder. Makes the folder, and removes it again if it stays empty.

    One process of a run takes the lock for all of them.

    Raises:
        UsageError: another run uses the folder, or it is not a folder.
        QieError: it cannot be written.
    """
    require_folder(output_dir)
    made = [folder for folder in (output_dir, *output_dir.parents) if not folder.exists()]
    path = output_dir / LOCK_FILE
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        lock = _taken(path)
    except BlockingIOError as error:
        raise UsageError(
            "another run is training into this folder",
            where=output_dir,
            found=path.read_text(errors="replace")[:200] or None,
            hint="wait for it to end, or give this run its own train.output_dir",
        ) from error
    except OSError as error:
        raise QieError("train.output_dir cannot be written", where=output_dir, found=error.strerror or error) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # another run that opened it meanwhile sees, under the lock, that it is gone
        lock.close()
        for folder in made:
            with suppress(OSError):  # not empty, or in use
                folder.rmdir()


def holder(output_dir: Path) -> str | None:
    """Who trains into the folder, as in "process 4711 on gpu3"; None if nobody does, or if he died on this machine."""
    try:
        words = (output_dir / LOCK_FILE).read_text(errors="replace")[:200]
    except OSError:
        return None
    named = re.fullmatch(r"process (\d{1,9}) on (.*)", words)
    if named and named[2] == socket.gethostname():
        try:
            os.kill(int(named[1]), 0)
        except ProcessLookupError:
            return None
        except PermissionError:  # another user's
            pass
    return words


def _taken(path: Path) -> BufferedWriter:
    """The lock's file, which says who holds the lock."""
    lock = open_locked(path, wait=False)
    try:
        lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        lock.flush()
    except BaseException:
        lock.close()
        raise
    return lock


def require_folder(output_dir: Path) -> None:
    """Raise UsageError when something else has the folder's name."""
    if output_dir.exists() and not output_dir.is_dir():
        raise UsageError("train.output_dir is not a folder", where=output_dir)
