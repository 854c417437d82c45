"""Whether a run can go on from a checkpoint: it has to be of the same run, and not behind its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qie.config import Config
from qie.errors import QieError, UsageError
from qie.pretrained import Checkpoint, content_hash


def identity(config: Config, checkpoint: Checkpoint) -> dict[str, Any]:
    """What a run that goes on has to have in common with the one that stopped, but for its data: the stream has that.

    The rest may change, such as the loss, or how memory is saved.
    """
    tree = config.model_dump(mode="json")
    model, train = tree["model"], tree["train"]
    lora = model["lora"]
    return {
        "base model": content_hash(checkpoint.component("transformer")),
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


def require_steps(state: dict[str, Any], steps: int, start: Path) -> None:
    """Raise UsageError when a checkpoint is of a later step than the last of `steps`: a run would not find its end."""
    if state.get("step", 0) > steps:
        raise UsageError(
            "the checkpoint is of a later step than the run is to have",
            where=start,
            expected=f"at most step {steps}",
            found=f"step {state['step']}",
            hint="raise train.max_steps or train.epochs, or resume from an earlier checkpoint",
        )


def require_same(state: dict[str, Any], mine: dict[str, Any], start: Path) -> None:
    """Raise QieError when the run of a checkpoint was made of other things than `mine`; names which."""
    theirs = state.get("run", {})
    differing = [name for name in mine if mine[name] != theirs.get(name)]
    if differing:
        raise QieError(
            f"the checkpoint is of another run: {', '.join(differing)} changed",
            where=start,
            expected={name: theirs.get(name) for name in differing},
            found={name: mine[name] for name in differing},
            hint="resume with what the run was started with, or start a new one with model.lora.continue_from",
        )
