"""Checkpoints: a folder from which training goes on as if it had never stopped.

    checkpoint-000500/
        pytorch_lora_weights.safetensors    the adapter, in the format of diffusers; or transformer/, all weights
        ema/                                the same of the averaged weights, with train.ema_decay
        optimizer.safetensors               the optimizer's tensors, by the names of parameters
        state.json                          everything else, and size and SHA-256 of each file

A folder is written aside and renamed, so one that is there is complete. There is no pickle in it. Random numbers need
no state: what is random in a step is a function of the seed, the step and the sample.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from qie.errors import QieError, UsageError
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
        for left in [*output_dir.glob("checkpoint-*.partial"), *output_dir.glob("checkpoint-*.removed")]:
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir()
        state = write(partial)
        state["files"] = {name: _settled_facts(partial / name) for name in _names(partial)}
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
    try:
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        files = state.pop("files")
        for name, facts in files.items():
            size = (folder / name).stat().st_size
            if size != facts["size"] or (hashes and _facts(folder / name) != facts):
                raise damaged(folder, f"{name} is not what was written")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(folder, f"{type(error).__name__}: {error}") from error
    return state


def damaged(folder: Path, found: str) -> QieError:
    """The error for a checkpoint that cannot be used; names the one before it."""
    there = checkpoints(folder.parent)
    before = there[: there.index(folder)] if folder in there else []
    hint = f"go on from the one before: --resume {before[-1]}" if before else "start again, in another train.output_dir"
    return QieError("the checkpoint is damaged or was not written by qie-train", where=folder, found=found, hint=hint)


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


def remove_old(output_dir: Path, keep_last: int | None, keep_every: int | None) -> None:
    """Remove all checkpoints but the last `keep_last` ones and those of every `keep_every` steps; None keeps all."""
    if keep_last is None:
        return
    for folder in checkpoints(output_dir)[:-keep_last]:
        step = int(folder.name.rpartition("-")[2])
        if keep_every is None or step % keep_every:
            _remove(folder)


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
