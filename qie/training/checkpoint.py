"""Checkpoints: a folder from which training goes on as if it had never stopped.

    checkpoint-000500/
        pytorch_lora_weights.safetensors    the adapter, in the format of diffusers; or transformer/, all weights
        ema/                                the same of the averaged weights, with train.ema_decay
        optimizer.safetensors               the optimizer's tensors, by the names of parameters
        state.json                          everything else, and size and SHA-256 of each file

A folder is written aside and renamed, so one that is there is complete. There is no pickle in it. Random numbers need
no state: what is random in a step is a function of the seed, the step and the sample. What a killed run has left of
others is removed by the next one, under the lock of `qie.training.lock`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from qie.errors import ModelError, QieError, UsageError
from qie.paths import local_path
from qie.stores import LocalFolder, StoreError

STATE_FILE = "state.json"
_NAME = re.compile(r"checkpoint-(\d{6,})")


def publish_checkpoint(output_dir: Path, step: int, write: Callable[[Path], dict[str, Any]]) -> Path:
    """Write the checkpoint of a step; returns its folder.

    Args:
        output_dir: the run's folder.
        step: optimizer steps done.
        write: writes its files into a folder, and gives what state.json is to hold.

    Raises:
        QieError: the disk is full, or refuses. What was there before stays.
    """
    folder = output_dir / f"checkpoint-{step:06d}"
    partial = folder.with_suffix(".partial")
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        remove_leftovers(output_dir)
        partial.mkdir()
        state = write(partial)
        state["files"] = {name: _settled_facts(partial / name) for name in _names(partial)}
        state["sha256"] = _digest(state)
        LocalFolder(partial).write(STATE_FILE, json.dumps(state, indent=1).encode() + b"\n")
        if folder.exists():
            _remove(folder)
        partial.rename(folder)
    except (OSError, StoreError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        before = checkpoints(output_dir)
        raise QieError(
            "the checkpoint cannot be written",
            where=folder,
            found=error,
            hint=f"make room and go on with --resume {before[-1]}" if before else "make room and start again",
        ) from error
    return folder


def read_state(folder: Path, *, hashes: bool = True) -> dict[str, Any]:
    """What `publish_checkpoint` was given for a checkpoint, whose files are there and whole.

    Args:
        folder: the checkpoint's.
        hashes: compare their SHA-256, too; without, only their sizes.

    Raises:
        QieError: a file is missing or damaged; names it, and the checkpoint before.
    """
    with explained_damage(folder, STATE_FILE):
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        digest = state.pop("sha256", None)  # which checkpoints of earlier versions lack
        if digest is not None and digest != _digest(state):
            raise damaged(folder, f"{STATE_FILE} is not what was written")
        for name, facts in state.pop("files").items():
            size = (folder / name).stat().st_size
            if size != facts["size"] or (hashes and _facts(folder / name) != facts):
                raise damaged(folder, f"{name} is not what was written")
    return state


def _digest(state: dict[str, Any]) -> str:
    """Of a state as JSON gives it back: without tuples, and with text for keys."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(state)), sort_keys=True).encode()).hexdigest()


def damaged(folder: Path, found: str) -> QieError:
    """The error for a checkpoint that cannot be used; names the one before it."""
    there = checkpoints(folder.parent)
    before = there[: there.index(folder)] if folder in there else []
    hint = f"go on from the one before: --resume {before[-1]}" if before else "start again, in another train.output_dir"
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
        raise damaged(folder, f"{name}: {' '.join(str(found).split())[:300]}") from error


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


def remove_old(output_dir: Path, step: int, keep_last: int | None, keep_every: int | None) -> None:
    """Remove the checkpoints up to `step` but the last `keep_last` ones and those of every `keep_every` steps.

    Later ones are of a run that was resumed from an earlier step: they neither count nor go, and are written anew when
    it gets there. `keep_last` None keeps all.
    """
    if keep_last is None:
        return
    for folder in [folder for folder in checkpoints(output_dir) if _step(folder) <= step][:-keep_last]:
        if keep_every is None or _step(folder) % keep_every:
            _remove(folder)


def remove_leftovers(output_dir: Path) -> None:
    """Remove what a killed run has left of checkpoints that it was writing, or removing."""
    for left in [*output_dir.glob("checkpoint-*.partial"), *output_dir.glob("checkpoint-*.removed")]:
        shutil.rmtree(left, ignore_errors=True)


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _remove(folder: Path) -> None:
    """Out of sight first: half a checkpoint must not look like one."""
    hidden = folder.with_suffix(".removed")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _facts(file: Path) -> dict[str, Any]:
    with file.open("rb") as content:
        return {"size": file.stat().st_size, "sha256": hashlib.file_digest(content, "sha256").hexdigest()}


def _settled_facts(file: Path) -> dict[str, Any]:
    """The same of a file whose bytes are on the disk: a rename may get there before what was written earlier."""
    file.chmod(file.parent.stat().st_mode & 0o666)  # safetensors gives its files to their owner alone
    with file.open("rb") as content:
        os.fsync(content.fileno())
    return _facts(file)
