"""Exactness: a resumed run beside one that was never stopped, and a batch beside its samples one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from measuring import absolute
from safetensors.torch import load_file

from qie.data.opening import open_stream
from qie.pretrained import open_pretrained
from qie.training.loop import train
from qie.training.model.adapter_file import ADAPTER_FILE
from qie.training.processes import open_accelerator
from qie.training.reporting.metrics import METRICS_FILE, read_metrics

from .bench import CHECKED_BLOCKS, Found, Place, configured, opened_run
from .table import OPTIONS, Option

STEPS = 4


def resumed(place: Place, deterministic: bool) -> Found:
    """Four steps in one run, and in a run that goes on after two."""
    folders = [place.new_folder(name) for name in ("whole", "parts")]
    for folder, steps in ((folders[0], STEPS), (folders[1], STEPS // 2), (folders[1], STEPS)):
        run_to(place, folder, steps, deterministic)
    whole, parts = map(outcome, folders)
    losses = max(abs(one - other) for one, other in zip(whole[0], parts[0], strict=True))
    weights = max(float((whole[1][name] - parts[1][name]).abs().max()) for name in whole[1])
    name = "train.deterministic" if deterministic else "by default"
    what, detail = f"losses of a resumed run, {name}", f"weights differ by {weights:.1e}"
    return Found(
        [absolute(f"resume {name}", what, [losses], " apart at most", "a run that was never stopped", detail)],
        {"losses": losses, "weights": weights},
    )


def run_to(place: Place, folder: Path, steps: int, deterministic: bool) -> None:
    option = Option({"train.deterministic": deterministic, "lr_scheduler.scheduler_type": "constant"})
    bench = place.bench(option, blocks=CHECKED_BLOCKS)
    config = configured(bench, option, max_steps=steps, checkpoint_every=2, output_dir=str(folder))
    AcceleratorState._reset_state(True)
    accelerator, pretrained = open_accelerator(config), open_pretrained(str(bench.model))
    stream = open_stream([bench.folder / "shards"])
    train(config, pretrained, stream, accelerator, resume="latest" if folder.exists() else None)


def outcome(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of all steps, and the adapter after the last."""
    losses: list[Any] = [line["loss"] for line in read_metrics(folder / METRICS_FILE) if "loss" in line]
    last = max(folder.glob("checkpoint-*"))
    return losses, load_file(last / ADAPTER_FILE)


def together(place: Place) -> Found:
    """Losses of four samples with prompts of unequal lengths, in one batch and one at a time."""
    option = OPTIONS["four unequal texts"]
    bench = place.bench(option, blocks=CHECKED_BLOCKS)

    def losses(batch_size: int) -> dict[str, float]:
        found: dict[str, float] = {}
        some = Option({"data.batch_size": batch_size}, texts=option.texts)
        with opened_run(bench, some) as (run, _), torch.no_grad():
            while len(found) < len(place.scale.texts[option.texts]):
                batch = next(run.batches).batch
                each = run.objective.losses(run.trainable.model, batch, run.objective.draw(batch, 0)).loss
                found |= dict(zip(batch.keys, each.tolist(), strict=True))
        return found

    four, alone = losses(4), losses(1)
    apart = max(abs(four[key] / alone[key] - 1) for key in alone)
    what = "losses of four samples of unequal texts in a batch"
    return Found([absolute("together", what, [100 * apart], " % apart at most", "one at a time")], {})
