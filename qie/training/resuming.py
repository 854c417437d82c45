"""Whether a run can go on from a checkpoint: it has to be whole, of the same run, and not behind its end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from qie.config import Config
from qie.errors import QieError, UsageError
from qie.pretrained import PretrainedModel, content_hash
from qie.training.checkpoint import STATE_FILE, explained_damage, read_state
from qie.training.model.sharding import TensorFiles
from qie.training.optimizer import load_named_state

OPTIMIZER_FILE = "optimizer.safetensors"


def identity(config: Config, pretrained: PretrainedModel) -> dict[str, Any]:
    """What a run that goes on has to have in common with the one that stopped, but for its data: the stream has that.

    The rest may change, such as the loss, or how memory is saved.
    """
    tree = config.model_dump(mode="json")
    model, train = tree["model"], tree["train"]
    lora = model["lora"]
    return {
        "base model": content_hash(pretrained.component("transformer")),
        "model.lora": lora and {name: value for name, value in lora.items() if name != "continue_from"},
        "model.adapters": model["adapters"],
        "model.quantize": model["quantize"],
        "train.mixed_precision": train["mixed_precision"],
        "train.trained_dtype": train["trained_dtype"],
        "train.ema_decay": train["ema_decay"],
        "train.gradient_accumulation_steps": train["gradient_accumulation_steps"],
        "optimizer": tree["optimizer"],
        "lr_scheduler": tree["lr_scheduler"],
    }


@dataclass(frozen=True)
class Saved:
    """What a checkpoint's state.json says of a run.

    Attributes:
        step, batches, nonfinite: optimizer steps done; batches trained on; last steps in a row that changed nothing.
        stream, optimizer, schedule: their states; of the optimizer, what is no tensor.
        run: `identity`.
    """

    step: int
    batches: int
    nonfinite: int
    stream: dict[str, Any]
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    run: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, *, hashes: bool) -> Saved:
        """That of a checkpoint, whose files are whole; see `read_state`.

        Raises:
            QieError: the checkpoint is damaged; names the file.
        """
        state: dict[str, Any] = {"nonfinite": 0, "run": {}} | read_state(folder, hashes=hashes)
        with explained_damage(folder, STATE_FILE):
            saved = cls(**{field.name: state[field.name] for field in fields(cls)})
            stream = {f"stream.{name}": saved.stream[name] for name in ("epoch", "position")}
            counts = {"step": saved.step, "batches": saved.batches, "nonfinite": saved.nonfinite, **stream}
            mappings = {name: getattr(saved, name) for name in ("optimizer", "schedule", "run")}
            mappings["stream.of"] = saved.stream["of"]
            wrong = [name for name, value in counts.items() if type(value) is not int or value < 0]
            wrong += [name for name, value in mappings.items() if not isinstance(value, dict)]
            if wrong or saved.batches < saved.step:
                raise ValueError(f"{wrong[0] if wrong else 'batches'} is not what a run saves")
        return saved

    def restore(
        self,
        start: Path,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, torch.nn.Parameter],
        schedule: LRScheduler,
    ) -> None:
        """Put the states of optimizer and schedule back, from the checkpoint that this was read from.

        Raises:
            QieError: the checkpoint is damaged; names the file.
        """
        with explained_damage(start, f"{OPTIMIZER_FILE} or {STATE_FILE}"):
            load_named_state(optimizer, parameters, TensorFiles([start / OPTIMIZER_FILE]), self.optimizer)
        with explained_damage(start, STATE_FILE):
            schedule.load_state_dict(self.schedule)
            rates = schedule.get_last_lr()
            if schedule.last_epoch != self.step or not (rates and all(math.isfinite(rate) for rate in rates)):
                raise ValueError("schedule is not what a run saves")


def require_steps(saved: Saved, steps: int, start: Path) -> None:
    """Raise UsageError when a checkpoint is of a later step than the last of `steps`: a run would not find its end."""
    if saved.step > steps:
        raise UsageError(
            "the checkpoint is of a later step than the run is to have",
            where=start,
            expected=f"at most step {steps}",
            found=f"step {saved.step}",
            hint="raise train.max_steps or train.epochs, or resume from an earlier checkpoint",
        )


def require_same(saved: Saved, mine: dict[str, Any], start: Path) -> None:
    """Raise QieError when the run of a checkpoint was made of other things than `mine`; names which."""
    theirs = saved.run
    differing = [name for name in mine if mine[name] != theirs.get(name)]
    if differing:
        raise QieError(
            f"the checkpoint is of another run: {', '.join(differing)} changed",
            where=start,
            expected={name: theirs.get(name) for name in differing},
            found={name: mine[name] for name in differing},
            hint="resume with what the run was started with, or start a new one with model.lora.continue_from",
        )
