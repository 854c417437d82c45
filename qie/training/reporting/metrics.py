"""The numbers of a run's steps and validations, and `metrics.jsonl`, which has a JSON line for each of them."""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from qie.stores import LocalFolder
from qie.training.flops import Architecture, peak_flops, step_flops
from qie.types import Batch

METRICS_FILE = "metrics.jsonl"

LEVELS = 4
"""Losses are also averaged in this many equal parts of the noise levels (0, 1)."""


@dataclass(frozen=True)
class Preference:
    """What a model prefers of pairs, see `qie.training.preference`.

    Attributes:
        margin: mean of the reward of the target over that of the rejected one.
        accuracy: part of the pairs whose target has the larger reward, 0 to 1; a half of those of equal ones.
        target_reward, rejected_reward: their means; below 0 where the model predicts worse than its base.
        margin_by_level, target_reward_by_level: means in each part of the noise levels; None for a part without pairs.
    """

    margin: float
    accuracy: float
    target_reward: float
    rejected_reward: float
    margin_by_level: tuple[float | None, ...]
    target_reward_by_level: tuple[float | None, ...]

    @classmethod
    def of(cls, levels: torch.Tensor, target: torch.Tensor, rejected: torch.Tensor) -> Preference:
        """From noise levels and rewards, [N] each."""
        margin = target - rejected
        right = (margin > 0).float() + 0.5 * (margin == 0).float()
        mean, accuracy, *rewards = (float(each.mean()) for each in (margin, right, target, rejected))
        return cls(mean, accuracy, rewards[0], rewards[1], by_level(levels, margin), by_level(levels, target))

    def flat(self) -> dict[str, Any]:
        """Its numbers by their names in metrics.jsonl."""
        return {f"preference_{name}": value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class StepMetrics:
    """The numbers of one optimizer step, of all processes together. Times are wall clock, in seconds.

    Attributes:
        step: steps done, with this one.
        epoch: of its last batch.
        loss: mean over the samples; not finite when the step was left out.
        loss_by_level: mean over the samples in each part of the noise levels σ; None for a part without samples.
        grad_norm: before it was clipped.
        lr: of this step.
        samples: their number.
        samples_per_s, step_time_s: of the whole step. data_wait_s: the part of it that waited for batches.
        peak_memory_bytes: the maximum that this process has held on its GPU, or in host memory without one.
        mfu: model FLOPs per second against what the GPUs can do; None when either is not known.
        preference: of pairs; None otherwise.
        preserved_loss: mean over the samples of preserved sources, which is how far the model has gone from its base
            there; part of `loss`. None without any.
    """

    step: int
    epoch: int
    loss: float
    loss_by_level: tuple[float | None, ...]
    grad_norm: float
    lr: float
    samples: int
    samples_per_s: float
    step_time_s: float
    data_wait_s: float
    peak_memory_bytes: int
    mfu: float | None
    preference: Preference | None = None
    preserved_loss: float | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """The texts beside a progress bar, the most important first."""
        found = [f"loss {self.loss:.4f}"]
        if self.preference:
            found.append(f"right {100 * self.preference.accuracy:.0f} %")
        if self.preserved_loss is not None:
            found.append(f"preserved {self.preserved_loss:.4f}")
        waiting = 100 * self.data_wait_s / self.step_time_s
        return *found, f"waiting {waiting:.0f} %", f"{self.samples_per_s:.2f} samples/s"


@dataclass(frozen=True)
class Validation:
    """Mean loss over the rows, and over those in each quarter of the noise levels; None for a quarter without rows.

    Rows of preserved sources are not among them: `preserved_loss` is theirs, None without any.
    """

    loss: float
    loss_by_level: tuple[float | None, ...]
    preference: Preference | None = None
    preserved_loss: float | None = None


def by_level(levels: torch.Tensor, losses: torch.Tensor) -> tuple[float | None, ...]:
    """The mean of the losses [N] whose noise levels [N] lie in each part of (0, 1)."""
    parts = (levels * LEVELS).long().clamp(0, LEVELS - 1)
    return tuple(mean_of(losses[parts == part]) for part in range(LEVELS))


def mean_of(losses: torch.Tensor) -> float | None:
    """Of losses [N]; None of none."""
    return float(losses.mean()) if len(losses) else None


def peak_memory_bytes(device: torch.device) -> int:
    """The maximum that this process has held so far, on the GPU or else in host memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True)
class Speed:
    """FLOPs of a step of so many draws for each of a sample's targets, compared with those of the device: `peak`
    FLOP/s, None if unknown."""

    architecture: Architecture
    all_trained: bool
    peak: float | None
    draws: int = 1
    targets: int = 1

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        device: torch.device,
        dtype: torch.dtype,
        peak_tflops: float | None,
        all_trained: bool,
        draws: int = 1,
        targets: int = 1,
    ) -> Speed:
        """From a transformer's config. `peak_tflops` overrides the table of devices."""
        peak = peak_tflops and peak_tflops * 1e12
        if peak is None and device.type == "cuda":
            peak = peak_flops(torch.cuda.get_device_name(device), dtype)
        return cls(Architecture.of(config), all_trained, peak, draws, targets)

    def flops(self, batch: Batch, *, base_passes: float = 0) -> float:
        """Of a training step on a batch, with so many forward passes of the base; recomputed activations do not count.

        In a single stream targets share their sample's text and controls, as draws do.
        """
        latents = (batch.pixel_latent, *batch.control_latent)
        target, *controls = (latent.shape[-2] * latent.shape[-1] // self.architecture.patch**2 for latent in latents)
        of_one = step_flops(
            self.architecture,
            target + sum(controls),
            batch.prompt_embed.shape[1],
            all_trained=self.all_trained,
            target_tokens=target,
            controls=len(controls),
            draws=self.draws * (self.targets if self.architecture.single_stream else 1),
            base_passes=base_passes,
        )
        return len(batch) * of_one.model * (1 if self.architecture.single_stream else self.targets)

    def mfu(self, flops: float, seconds: float) -> float | None:
        """Model FLOPs utilisation, 0 to 1."""
        return None if self.peak is None else flops / seconds / self.peak


class MetricsFile:
    """`metrics.jsonl` of a run that begins after `first_step`. Lines of later steps, left by a killed run, are dropped.

    Each line has the `time` at which it was written, in Unix seconds. With `enabled` false nothing is written.
    """

    def __init__(self, folder: Path, first_step: int, *, enabled: bool) -> None:
        self._path, self._first_step, self._enabled = folder / METRICS_FILE, first_step, enabled

    def __enter__(self) -> MetricsFile:
        if self._enabled:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            LocalFolder(self._path.parent).write(self._path.name, "".join(self._kept()).encode())
            self._file = self._path.open("a", encoding="utf-8", buffering=1)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._enabled:
            self._file.close()

    def step(self, metrics: StepMetrics) -> None:
        """Write the line of a step."""
        self._write(_flat(metrics))

    def validation(self, step: int, found: Validation) -> None:
        """Write the line of a validation."""
        self._write({"step": step} | {f"validation_{name}": value for name, value in _flat(found).items()})

    def images(self, step: int, images: Sequence[Image.Image]) -> None:
        """Write nothing: sample images are files of their own."""

    def _write(self, values: dict[str, Any]) -> None:
        if self._enabled:
            values |= {"time": round(time.time(), 3)}
            self._file.write(json.dumps({name: _plain(value) for name, value in values.items()}) + "\n")

    def _kept(self) -> list[str]:
        if self._first_step == 0 or not self._path.is_file():
            return []
        return [f"{json.dumps(values)}\n" for values in read_metrics(self._path) if values["step"] <= self._first_step]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, without those that a kill has cut short, or that are damaged."""
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict) and isinstance(values.get("step"), int):
            lines.append(values)
    return lines


def _flat(numbers: StepMetrics | Validation) -> dict[str, Any]:
    """By their names in metrics.jsonl; of preferences and preserved samples nothing where there are none."""
    values = asdict(numbers)
    del values["preference"]
    if numbers.preserved_loss is None:
        del values["preserved_loss"]
    return values | (numbers.preference.flat() if numbers.preference else {})


def _plain(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
