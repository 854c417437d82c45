"""train.output_dir: one run at a time, the checkpoints in it, which of them a run resumes from, and which stay."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path

from qie.errors import QieError, UsageError
from qie.paths import local_path, open_locked

STATE_FILE = "state.json"
LOCK_FILE = ".lock"
_NAME = re.compile(r"checkpoint-(\d{6,})")


@contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """Within, no other run uses the folder. It is made, and removed again if it stays empty.

    One process of a run takes the lock for all of them.

    Raises:
        UsageError: another run uses the folder, or it is no folder.
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
        raise UsageError("train.output_dir is no folder", where=output_dir)


def checkpoint_folder(output_dir: Path, step: int) -> Path:
    """The checkpoint of a step."""
    return output_dir / f"checkpoint-{step:06d}"


def checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints in a run's folder, by their steps."""
    found = {int(match[1]): path for path in output_dir.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))}
    return [found[step] for step in sorted(found)]


def find_checkpoint(resume: str, output_dir: Path) -> Path:
    """The folder that `--resume` names; `latest` is the one of the highest step in `output_dir`.

    Raises:
        UsageError: there is none.
    """
    if resume != "latest":
        folder = local_path(resume)
        if not (folder / STATE_FILE).is_file():
            raise UsageError("no such checkpoint", where=folder, expected="a folder checkpoint-NNNNNN, or latest")
        return folder
    found = checkpoints(output_dir)
    if not found:
        raise UsageError("there is no checkpoint to resume from", where=output_dir, hint="start without --resume")
    return found[-1]


def find_resume(resume: str | None, output_dir: Path) -> Path | None:
    """The checkpoint that a run resumes from; None for a new run. To be asked before the work, and under the lock.

    Raises:
        UsageError: there is no such checkpoint; or the output folder holds another run, or is no folder.
    """
    require_folder(output_dir)
    found = find_checkpoint(resume, output_dir) if resume else None
    if checkpoints(output_dir) and (found is None or found.parent.resolve() != output_dir.resolve()):
        raise UsageError(
            "the output folder holds a run already",
            where=output_dir,
            hint="go on with --resume latest, or give the new run its own train.output_dir",
        )
    return found


def remove_old(output_dir: Path, step: int, keep_last: int | None, keep_every: int | None) -> None:
    """Remove the checkpoints up to `step` but the last `keep_last` ones and those of every `keep_every` steps.

    Later ones are of a run that was resumed from an earlier step. They neither count nor go: the run writes them again
    when it gets there. `keep_last` None keeps all.
    """
    if keep_last is None:
        return
    for folder in [folder for folder in checkpoints(output_dir) if _step(folder) <= step][:-keep_last]:
        if keep_every is None or _step(folder) % keep_every:
            remove_checkpoint(folder)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint. It gets another name first: half of one must not look like one."""
    hidden = folder.with_suffix(".removed")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def remove_leftovers(output_dir: Path) -> None:
    """Remove the checkpoints that a killed run was writing, or removing."""
    for left in [*output_dir.glob("checkpoint-*.partial"), *output_dir.glob("checkpoint-*.removed")]:
        shutil.rmtree(left, ignore_errors=True)


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])
