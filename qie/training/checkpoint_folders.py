"""The checkpoints in train.output_dir: their names, which of them a run resumes from, which stay, and
what is said of a damaged one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from qie.errors import ModelError, QieError, UsageError, one_line
from qie.paths import local_path
from qie.training.reporting.metrics import METRICS_FILE
from qie.training.run_lock import require_folder

STATE_FILE = "state.json"
_NAME = re.compile(r"checkpoint-(\d{6,})")


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
        # The folder of a run has a state.json, too, and is no checkpoint.
        if not (folder / STATE_FILE).is_file() or (folder / METRICS_FILE).is_file():
            newest = f"--resume {inside[-1]}" if (inside := checkpoints(folder)) else None
            expected = "a folder checkpoint-NNNNNN, or latest"
            raise UsageError("no such checkpoint", where=folder, expected=expected, hint=newest)
        return folder
    found = checkpoints(output_dir)
    if not found:
        raise UsageError("no checkpoint to resume from", where=output_dir, hint="start without --resume")
    return found[-1]


def find_resume(resume: str | None, output_dir: Path) -> Path | None:
    """The checkpoint that a run resumes from; None for a new run. To be asked before the work, and under the lock.

    Raises:
        UsageError: there is no such checkpoint; or the output folder holds another run, or is not a folder.
    """
    require_folder(output_dir)
    found = find_checkpoint(resume, output_dir) if resume else None
    if checkpoints(output_dir) and (found is None or found.parent.resolve() != output_dir.resolve()):
        raise UsageError(
            "the output folder already holds a run",
            where=output_dir,
            hint="continue it with --resume latest, or give the new run its own train.output_dir",
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


def damaged(folder: Path, found: str) -> QieError:
    """The error for a checkpoint that cannot be used; names the one before it."""
    there = checkpoints(folder.parent)
    before = there[: there.index(folder)] if folder in there else []
    hint = (
        f"continue from the one before: --resume {before[-1]}" if before else "start again, in another train.output_dir"
    )
    return QieError("the checkpoint is damaged or was not written by qie-train", where=folder, found=found, hint=hint)


@contextmanager
def explained_damage(folder: Path, name: str) -> Iterator[None]:
    """Turn whatever a library raises about the file `name` of a checkpoint into the error for that checkpoint."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if isinstance(error, QieError) and not isinstance(error, ModelError):
            raise
        found = error.found if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
        raise damaged(folder, f"{name}: {one_line(found, 300)}") from error


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])
