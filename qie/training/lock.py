"""One run at a time in train.output_dir, by a lock that dies with its process."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qie.errors import QieError, UsageError

LOCK_FILE = ".lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


@contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """Within, no other run uses the folder, which is made, and removed again if it stays empty.

    One process of a run takes the lock for all of them. Where the file system has no locks there is none.

    Raises:
        UsageError: another run uses it, or it is no folder.
        QieError: it cannot be written.
    """
    require_folder(output_dir)
    made = [folder for folder in (output_dir, *output_dir.parents) if not folder.exists()]
    path = output_dir / LOCK_FILE
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        lock = _take(path)
    except OSError as error:
        raise QieError("train.output_dir cannot be written", where=output_dir, found=error.strerror or error) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # whoever opened it meanwhile sees, under the lock, that it is gone
        os.close(lock)
        for folder in made:
            with suppress(OSError):  # not empty, or in use
                folder.rmdir()


def require_folder(output_dir: Path) -> None:
    """Raise UsageError when something else has the folder's name."""
    if output_dir.exists() and not output_dir.is_dir():
        raise UsageError("train.output_dir is no folder", where=output_dir)


def _take(path: Path) -> int:
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            if _is_mine(lock, path):
                os.truncate(lock, 0)
                os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _is_mine(lock: int, path: Path) -> bool:
    """Whether the lock is held now; not when its file was removed between opening and locking."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(lock), path.stat())
    except BlockingIOError as error:
        raise UsageError(
            "another run is training into this folder",
            where=path.parent,
            found=os.read(lock, 200).decode(errors="replace") or None,
            hint="wait for it to end, or give this run its own train.output_dir",
        ) from error
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return True
        raise
