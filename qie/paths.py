"""Paths as users write them, and the files that only qie writes."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from io import BufferedIOBase, BufferedWriter
from pathlib import Path

from qie.errors import QieError, UsageError


def local_path(place: str | Path) -> Path:
    """A path with `~` expanded. Raises UsageError for an unknown user's home, and for text that cannot be a path."""
    if "\0" in str(place):
        raise UsageError("a path contains NUL", where=place)
    try:
        return Path(place).expanduser()
    except RuntimeError as error:
        raise UsageError("no such home directory", where=place, found=str(error)) from error


def cache_folder() -> Path:
    """What qie remembers between runs, `$XDG_CACHE_HOME/qie`. It may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qie"


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder would outlast a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def require_writable(path: Path) -> None:
    """Raise UsageError when no file can be written to `path`: a check before the work, not after it."""
    found = None
    if not path.parent.is_dir():
        found = f"no folder {path.parent}"
    elif path.is_dir():
        found = "a folder of that name"
    elif not os.access(path.parent, os.W_OK):
        found = "a folder that must not be written to"
    if found:
        expected = "a file in a folder that exists"
        raise UsageError("the file cannot be written there", where=path, expected=expected, found=found)


def open_own(path: Path) -> BufferedWriter:
    """Open a file that only qie writes, such as a partial or a lock file, made if need be and not emptied.

    Others may write into the folder, too, and its names can be guessed. So no link is followed, no pipe is waited for,
    and a file that has a second name, of which a killed run may be the cause, is left to that one.

    Raises:
        QieError: something else has this name.
    """

    while True:
        try:
            file = open(path, "wb", opener=_open_plainly)  # noqa: SIM115 - Path.open takes no opener
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):
                raise
            raise _taken(path) from error
        facts = os.fstat(file.fileno())
        regular = stat.S_ISREG(facts.st_mode)
        if regular and facts.st_nlink < 2:
            return file
        file.close()
        if not regular:
            raise _taken(path)
        with suppress(FileNotFoundError):
            if os.path.samestat(facts, path.lstat()):
                path.unlink()


def open_locked(path: Path, *, wait: bool = True) -> BufferedWriter:
    """Open a file as `open_own` does, lock it and empty it. The lock ends when the file is closed, or its process dies.

    Whoever held the lock before may have renamed or removed the file. Then it may be somebody's content by now: it
    stays as it is, and the file that has the name now is opened instead.

    Args:
        path: of the file.
        wait: until another process gives up the lock.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is false.
        QieError: something else has this name.
    """
    while True:
        file = open_own(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if is_at(file, path):
                file.truncate(0)
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def is_at(file: BufferedIOBase, path: Path) -> bool:
    """Whether an open file still has this path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False


def _open_plainly(path: str, _: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def _taken(path: Path) -> QieError:
    return QieError(
        "a temporary file cannot be written",
        where=path,
        expected="no such file, or a plain one",
        found=f"a link to {path.readlink()}" if path.is_symlink() else "a pipe or a device",
        hint="find out who put it there, and delete it",
    )
