"""Checkpoints: a folder from which training goes on as if it had never stopped.

    checkpoint-000500/
        pytorch_lora_weights.safetensors    the adapter, in the format of diffusers
        optimizer.safetensors               the optimizer's tensors
        state.json                          everything else: step, stream position, schedule, optimizer's numbers

A folder is written aside and renamed, so one that is there is complete. There is no pickle in it.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from qie.errors import QieError, UsageError
from qie.paths import local_path
from qie.training.model import load_adapter, save_adapter

_NAME = re.compile(r"checkpoint-(\d{6,})")


@dataclass(frozen=True)
class Progress:
    """Where a run stands: optimizer steps done, and the stream's state."""

    step: int
    stream: dict[str, Any]


def save_checkpoint(
    output_dir: Path,
    progress: Progress,
    transformer: QwenImageTransformer2DModel,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> Path:
    """Write the checkpoint of `progress.step`; returns its folder."""
    folder = output_dir / f"checkpoint-{progress.step:06d}"
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_adapter(transformer, partial)
    tensors, numbers = _split_state(optimizer.state_dict())
    save_file(tensors, partial / "optimizer.safetensors")
    state = {"step": progress.step, "stream": progress.stream, "optimizer": numbers, "schedule": schedule.state_dict()}
    (partial / "state.json").write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


def load_checkpoint(
    folder: Path,
    transformer: QwenImageTransformer2DModel,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> Progress:
    """Put a checkpoint's state into the objects given; returns where the run stands.

    Raises:
        QieError: a file is missing or damaged, or the adapter is another one.
    """
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        load_adapter(transformer, folder)
        tensors = load_file(folder / "optimizer.safetensors")
        optimizer.load_state_dict(_joined_state(tensors, state["optimizer"]))
        schedule.load_state_dict(state["schedule"])
        return Progress(int(state["step"]), state["stream"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise QieError(
            "the checkpoint is damaged or was not written by qie-train",
            where=folder,
            found=f"{type(error).__name__}: {error}",
            hint="resume from the one before it: --resume DIR",
        ) from error


def find_checkpoint(resume: str, output_dir: Path) -> Path:
    """The folder that `--resume` names; `latest` is the one of the highest step in `output_dir`.

    Raises:
        UsageError: there is none.
    """
    if resume != "latest":
        folder = local_path(resume)
        if not (folder / "state.json").is_file():
            raise UsageError("no such checkpoint", where=folder, expected="a folder checkpoint-NNNNNN, or latest")
        return folder
    found = {int(match[1]): path for path in output_dir.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))}
    if not found:
        raise UsageError("there is no checkpoint to resume from", where=output_dir, hint="start without --resume")
    return found[max(found)]


def _split_state(state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """An optimizer's state as tensors by name, and the rest, which JSON can hold."""
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, values in state["state"].items():
        for name, value in values.items():
            (tensors if isinstance(value, torch.Tensor) else numbers)[f"{index}.{name}"] = value
    return tensors, {"values": numbers, "param_groups": state["param_groups"]}


def _joined_state(tensors: dict[str, torch.Tensor], rest: dict[str, Any]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    for path, value in [*tensors.items(), *rest["values"].items()]:
        index, _, name = path.partition(".")
        state.setdefault(int(index), {})[name] = value
    return {"state": state, "param_groups": rest["param_groups"]}
