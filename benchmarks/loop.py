"""The cost of the training loop on top of the model and the optimizer. On the CPU.

    python benchmarks/loop.py [--steps 40] [--runs 5]

A stand-in for the transformer takes 100 ms for a forward pass, asleep, as a GPU would let the host sleep; its batches
are of 1024² (one control, a prompt of 1,400 tokens), read from shards. Peer: the same model, loss and optimizer on
one batch that is ready, in a bare loop. The difference therefore includes the time that reading, drawing noise and
converting in the background take from a model that computes on the same two cores.

outside: the part of qie's step outside model, loss and optimizer.
waiting: the part of that in which no batch was ready.
bare:    the extra time of a step, compared with the bare loop's.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from measuring import Results, absolute
from measuring import parser as common
from samples import exhaust, write_shards

from qie.config import Config
from qie.data.opening import open_stream
from qie.families import FAMILIES
from qie.pretrained import PretrainedModel
from qie.training.control import Control
from qie.training.objective import Objective, drop_captions
from qie.training.processes import agreement
from qie.training.reporting.metrics import MetricsFile
from qie.training.reporting.trackers import Trackers
from qie.training.run import Run

STEP_S = 0.1
SAMPLES = 24
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "base_shift": 0.5,
    "max_shift": 0.9,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
}


SIZES = {
    "num_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "axes_dims_rope": [4, 6, 6],
    "joint_attention_dim": 32,
    "in_channels": 64,
    "out_channels": 16,
    "patch_size": 2,
}


class Asleep(torch.nn.Module):
    """A transformer of one weight: its forward pass takes `STEP_S` and no work."""

    transformer_blocks: tuple[torch.nn.Module, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.zeros(()))
        self.config: dict[str, Any] = SIZES

    def forward(self, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor]:
        time.sleep(STEP_S)
        return (hidden_states * self.gain,)


def parser() -> argparse.ArgumentParser:
    made = common(__doc__, runs=5)
    made.add_argument("--steps", type=int, default=40)
    made.add_argument("--tokens", type=int, default=1400, help="of a prompt")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    logging.disable(logging.WARNING)
    results = Results(__file__, options, arguments)
    outside, beside, waits = [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, options.tokens)
        for _ in range(options.runs):
            with (
                opened(folder) as run,
                MetricsFile(Path(run.config.train.output_dir), 0, enabled=True) as metrics_file,
                Trackers(run.config, run.accelerator) as trackers,
                closing(run.batches),
            ):
                run.training_step()
                bare = timed_bare(run, options.steps)
                took, theirs, waited = timed_loop(run, (metrics_file, trackers), options.steps)
            outside.append(100 * (took - theirs) / STEP_S)
            beside.append(100 * (took - bare) / STEP_S)
            waits.append(100 * waited / STEP_S)
    share = f" % of a step of {1000 * STEP_S:.0f} ms"
    results.add(
        absolute("outside", "time outside model, loss and optimizer", outside, share),
        absolute("waiting", "time spent waiting for batches", waits, share),
        absolute("bare", "extra time of a step", beside, share, "a bare loop whose batch is ready"),
    )
    results.save()


def timed_loop(run: Run, hooks: Sequence[MetricsFile | Trackers], steps: int) -> tuple[float, float, float]:
    """Seconds of a step, as qie-train takes it; of it, those in model, loss and optimizer, and those of waiting."""
    spent = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                spent[0] += time.perf_counter() - started

        return call

    with ExitStack() as patches:
        for owner, name in (
            (Objective, "losses"),
            (run.accelerator, "backward"),
            (run.accelerator, "clip_grad_norm_"),
            (run._stepper, "step"),
            (run._stepper, "zero_grad"),
        ):
            patches.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name))))
        control = patches.enter_context(Control(Path(run.config.train.output_dir)))
        agreed = patches.enter_context(agreement(run.accelerator, control.look))
        waited, started = 0.0, time.perf_counter()
        for _ in range(steps):
            metrics = run.training_step()
            for hook in hooks:
                hook.step(metrics)
            agreed()
            waited += metrics.data_wait_s
        return (time.perf_counter() - started) / steps, spent[0] / steps, waited / steps


def write(folder: Path, tokens: int) -> None:
    exhaust(write_shards(folder / "shards", SAMPLES, tokens, SAMPLES))
    components = {"scheduler": SCHEDULER, "transformer": {"_class_name": "QwenImageTransformer2DModel"} | SIZES}
    for component, config in components.items():
        (folder / "model" / component).mkdir(parents=True)
        file = "scheduler_config.json" if component == "scheduler" else "config.json"
        (folder / "model" / component / file).write_text(json.dumps(config))


@contextmanager
def opened(folder: Path) -> Iterator[Run]:
    """A run of the stand-in over the shards, as qie-train makes one."""
    config = Config.model_validate(
        {
            "model": {"pretrained_model_name_or_path": str(folder / "model"), "lora": None},
            "data": {"caption_dropout_rate": 0.1},
            "train": {
                "mixed_precision": "no",
                "gradient_checkpointing": False,
                "output_dir": str(folder / "run"),
            },
            "validation": {"rows": 0},
        }
    )
    with (
        mock.patch("qie.training.model.trainable.load_transformer", lambda *arguments, **named: Asleep()),
        mock.patch("qie.training.model.trainable.use_training_forward"),
    ):
        stream = open_stream([folder / "shards"])
        yield Run(config, PretrainedModel(folder / "model", FAMILIES["edit"]), stream, Accelerator(cpu=True))


def timed_bare(run: Run, steps: int) -> float:
    """Seconds of a step that finds its batch and its noise ready, and measures nothing."""
    prepared = next(run.batches)
    batch, weights = prepared.batch, list(run.trainable.parameters.values())
    drop_captions(batch, prepared.draws.dropped_prompts)
    optimizer = torch.optim.AdamW(weights, lr=0.0)
    started = time.perf_counter()
    for _ in range(steps):
        run.objective.losses(run.trainable.model, batch, prepared.draws).loss.mean().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - started) / steps


if __name__ == "__main__":
    main()
