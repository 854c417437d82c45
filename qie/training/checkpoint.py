"""Checkpoints: `save` writes a run's state into a folder, `load` reads it, and the run resumes as if never stopped.

    checkpoint-000500/
        pytorch_lora_weights.safetensors    the adapter, in diffusers' format; or transformer/, all weights
        ema/                                the same of the averaged weights, with train.ema_decay
        optimizer.safetensors               the optimizer's tensors, by the names of parameters
        state.json                          everything else, and size and SHA-256 of each file
        README.md                           the model card

A folder is written under another name and renamed, so one that is there is complete. It holds no pickle. Random
numbers need no state: they are functions of the seed, the step and the sample. The next run removes, under the lock of
the output folder, the parts of checkpoints that a killed run has left.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from qie.config import Config
from qie.errors import QieError, UsageError
from qie.pretrained import PretrainedModel, content_hash
from qie.stores import LocalFolder, StoreError
from qie.training.checkpoint_folders import (
    STATE_FILE,
    checkpoint_folder,
    checkpoints,
    damaged,
    explained_damage,
    remove_checkpoint,
    remove_leftovers,
)
from qie.training.model.trainable import TrainableModel
from qie.training.reporting.card import RunReport, write_card

OPTIMIZER_FILE = "optimizer.safetensors"


@dataclass(frozen=True)
class RunState:
    """A run between two steps, but for its tensors: the content of state.json.

    Attributes:
        step, batches, nonfinite: optimizer steps done; batches trained on; last steps in a row that changed nothing.
        stream, schedule: their states.
        optimizer: the part of its state that is not a tensor.
        run: `identity`.
    """

    step: int
    batches: int
    nonfinite: int
    stream: dict[str, Any]
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    run: dict[str, Any]


@dataclass(frozen=True, eq=False)
class RunTensors:
    """The tensors of a run, whole and on the CPU.

    Attributes:
        weights: see `TrainableModel.tensors`.
        optimizer: by the names of parameters, see `named_state`.
    """

    weights: Mapping[str, Mapping[str, torch.Tensor]]
    optimizer: dict[str, torch.Tensor]


def save(output_dir: Path, state: RunState, tensors: RunTensors, model: TrainableModel, report: RunReport) -> Path:
    """Write the checkpoint of a step; returns its folder.

    Args:
        output_dir: the run's folder.
        state, tensors: of the run, see `Run.state_dict`.
        model: knows the files of its weights.
        report: for the model card.

    Raises:
        QieError: the disk is full, or refuses. Earlier checkpoints stay.
    """
    folder = checkpoint_folder(output_dir, state.step)
    partial = folder.with_suffix(".partial")
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        remove_leftovers(output_dir)
        partial.mkdir()
        model.save(partial, tensors.weights)
        save_file(tensors.optimizer, partial / OPTIMIZER_FILE)
        write_card(partial, report)
        content = asdict(state) | {"files": {name: _synced_facts(partial / name) for name in _names(partial)}}
        content["sha256"] = _digest(content)
        LocalFolder(partial).write(STATE_FILE, json.dumps(content, indent=1).encode() + b"\n")
        if folder.exists():
            remove_checkpoint(folder)
        partial.rename(folder)
    except (OSError, StoreError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        before = checkpoints(output_dir)
        raise QieError(
            "the checkpoint cannot be written",
            where=folder,
            found=error,
            hint=f"free some space and continue with --resume {before[-1]}"
            if before
            else "free some space and start again",
        ) from error
    return folder


def load(folder: Path, *, hashes: bool = True) -> RunState:
    """The state that `save` was given for a checkpoint, all of whose files are whole. They hold the tensors.

    Args:
        folder: the checkpoint's.
        hashes: compare the SHA-256 of files, too; without, only their sizes.

    Raises:
        QieError: a file is missing or damaged; names it, and the checkpoint before.
    """
    with explained_damage(folder, STATE_FILE):
        content: dict[str, Any] = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        digest = content.pop("sha256", None)  # checkpoints of earlier versions lack it
        if digest is not None and digest != _digest(content):
            raise damaged(folder, f"{STATE_FILE} has changed since it was saved")
        for name, facts in content.pop("files").items():
            size = (folder / name).stat().st_size
            if size != facts["size"] or (hashes and _facts(folder / name) != facts):
                raise damaged(folder, f"{name} has changed since it was saved")
        values: dict[str, Any] = {"nonfinite": 0, "run": {}} | content
        state = RunState(**{field.name: values[field.name] for field in fields(RunState)})
        _require_types(state)
    return state


def _require_types(state: RunState) -> None:
    """Raise KeyError, TypeError or ValueError when someone has changed a state.json, hashes included."""
    counts = {name: getattr(state, name) for name in ("step", "batches", "nonfinite")}
    counts |= {f"stream.{name}": state.stream[name] for name in ("epoch", "position")}
    mappings = {name: getattr(state, name) for name in ("optimizer", "schedule", "run")}
    mappings["stream.of"] = state.stream["of"]
    wrong = [name for name, value in counts.items() if type(value) is not int or value < 0]
    wrong += [name for name, value in mappings.items() if not isinstance(value, dict)]
    if wrong or state.batches < state.step:
        raise ValueError(f"{wrong[0] if wrong else 'batches'} is not a value that a run saves")


# Whether a run may go on from a checkpoint


def identity(config: Config, pretrained: PretrainedModel, loss_fn: str | None = None) -> dict[str, Any]:
    """The settings that a resumed run must share with the run that stopped. Those of its data are the stream's.

    The others may change, such as the section loss, or how memory is saved. Of a caller's loss function, `loss_fn` is
    the name: its code is the caller's to keep.
    """
    tree = config.model_dump(mode="json")
    model, train = tree["model"], tree["train"]
    lora = model["lora"]
    return {
        "base model": content_hash(pretrained.component("transformer")),
        "model.lora": lora and _without_later(lora),
        # Checkpoints of before `train_only` was there do not name it.
        "model.adapters": [
            {name: value for name, value in adapter.items() if name != "train_only" or value}
            for adapter in model["adapters"]
        ],
        "model.quantize": model["quantize"],
        "train.mixed_precision": train["mixed_precision"],
        "train.fp8_compute": train["fp8_compute"] or None,  # which checkpoints of before it was there do not name
        "train.trained_dtype": train["trained_dtype"],
        "train.ema_decay": train["ema_decay"],
        "train.gradient_accumulation_steps": train["gradient_accumulation_steps"],
        "optimizer": {name: value for name, value in tree["optimizer"].items() if name != "lr_pattern" or value},
        "lr_scheduler": tree["lr_scheduler"],
        "loss_fn": loss_fn,  # which checkpoints of before it was there do not name
        # Other losses may take one another's place. This one compares with the model that the adapter began on.
        "loss.kind": config.loss.kind if config.loss.of_pairs else None,
    }


_LATER: dict[str, Any] = {
    "kind": "lora",
    "rank_pattern": {},
    "alpha_pattern": {},
    "decompose_factor": None,
    "decompose_both": False,
}
"""Fields of model.lora that checkpoints of before they were there do not name, with the values that they had."""


def _without_later(lora: dict[str, Any]) -> dict[str, Any]:
    """What two runs of one adapter share: not what its first weights were."""
    return {
        name: value
        for name, value in lora.items()
        if name != "continue_from" and not (name in _LATER and value == _LATER[name])
    }


def require_steps(state: RunState, steps: int, folder: Path) -> None:
    """Raise UsageError when a checkpoint is of a later step than the last of `steps`: its run would not find an end."""
    if state.step > steps:
        raise UsageError(
            "the checkpoint is later than the run's last step",
            where=folder,
            expected=f"at most step {steps}",
            found=f"step {state.step}",
            hint="raise train.max_steps or train.epochs, or resume from an earlier checkpoint",
        )


def _differing(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """The settings that differ, by whole names: what the checkpoint says, and this run."""
    for name, ours in mine.items():
        other = theirs.get(name)
        if isinstance(ours, dict) and isinstance(other, dict):
            inside = _differing(other, {key: ours.get(key) for key in (*other, *ours)})
            yield from ((f"{name}.{key}", both) for key, both in inside)
        elif ours != other:
            yield name, (other, ours)


def require_same(state: RunState, mine: dict[str, Any], folder: Path) -> None:
    """Raise QieError when the checkpoint's run has another identity than `mine`; names the difference."""
    if differing := dict(_differing(state.run, mine)):
        go_on = "model.adapters" if mine["loss.kind"] else "model.lora.continue_from"
        raise QieError(
            f"the checkpoint belongs to another run: {', '.join(differing)} changed",
            where=folder,
            expected={name: theirs for name, (theirs, _) in differing.items()},
            found={name: ours for name, (_, ours) in differing.items()},
            hint=f"resume with the run's own settings, or start a new run with {go_on}",
        )


def _digest(content: dict[str, Any]) -> str:
    """Of a state as JSON gives it back: without tuples, and with text for keys."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(content)), sort_keys=True).encode()).hexdigest()


def _names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _facts(file: Path) -> dict[str, Any]:
    with file.open("rb") as content:
        return {"size": file.stat().st_size, "sha256": hashlib.file_digest(content, "sha256").hexdigest()}


def _synced_facts(file: Path) -> dict[str, Any]:
    """The same of a file whose bytes are on the disk: else the rename could reach it before them."""
    file.chmod(file.parent.stat().st_mode & 0o666)  # safetensors gives its files to their owner alone
    with file.open("rb") as content:
        os.fsync(content.fileno())
    return _facts(file)
