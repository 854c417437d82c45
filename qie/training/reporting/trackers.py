"""Experiment trackers, through accelerate: TensorBoard, Weights & Biases and others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from PIL import Image

from qie.config import Config
from qie.errors import ConfigError
from qie.training.reporting.card import public_config
from qie.training.reporting.metrics import Preference, StepMetrics, Validation

_NAME_ARGUMENT = {"wandb": "name", "trackio": "name", "mlflow": "run_name", "swanlab": "experiment_name"}


def require_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError when a tracker's package is not installed: accelerate would silently leave it out."""
    there = {tracker.value for tracker in get_available_trackers()}
    for name in names:
        if name not in there:
            raise ConfigError(
                f"the tracker {name} is not installed", where="logging.report_to", hint=f"pip install {name}"
            )


class Trackers:
    """The trackers of `logging.report_to`, in every process; accelerate logs from the main one."""

    def __init__(self, config: Config, accelerator: Accelerator) -> None:
        self._accelerator, logging = accelerator, config.logging
        if not logging.report_to:
            return
        name = logging.run_name
        arguments = {
            tracker: {_NAME_ARGUMENT[tracker]: name}
            for tracker in logging.report_to
            if name and tracker in _NAME_ARGUMENT
        }
        accelerator.init_trackers(logging.project, dict(_flat(public_config(config))), arguments)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *exception: object) -> None:
        for tracker in self._accelerator.trackers:
            tracker.finish()
        self._accelerator.trackers = []

    def step(self, metrics: StepMetrics) -> None:
        """Log the numbers of a step."""
        others = ("step", "loss_by_level", "preference")
        numbers = {name: value for name, value in asdict(metrics).items() if name not in others}
        self._log(metrics.step, numbers | _levels("loss", metrics.loss_by_level) | _preference("", metrics.preference))

    def validation(self, step: int, found: Validation) -> None:
        """Log the numbers of a validation."""
        numbers = {"validation_loss": found.loss, "validation_preserved_loss": found.preserved_loss}
        preference = _preference("validation_", found.preference)
        self._log(step, numbers | _levels("validation_loss", found.loss_by_level) | preference)

    def images(self, step: int, images: Sequence[Image.Image]) -> None:
        """Give sample images to the trackers that show images."""
        shown = {f"sample {number}": _stacked(image) for number, image in enumerate(images)}
        for tracker in self._accelerator.trackers:
            if hasattr(tracker, "log_images"):
                # Only TensorBoard expects channels first.
                tracker.log_images(shown, step, **({"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}))

    def _log(self, step: int, numbers: dict[str, float | None]) -> None:
        if self._accelerator.trackers:
            self._accelerator.log({name: number for name, number in numbers.items() if number is not None}, step=step)


def _preference(before: str, found: Preference | None) -> dict[str, float | None]:
    if found is None:
        return {}
    name = f"{before}preference"
    by_level = {"margin": found.margin_by_level, "target_reward": found.target_reward_by_level}
    one_each = {each: value for each, value in found.flat().items() if not each.endswith("_by_level")}
    numbers = {f"{before}{each}": value for each, value in one_each.items()}
    for each, values in by_level.items():
        numbers |= _levels(f"{name}_{each}", values)
    return numbers


def _levels(name: str, losses: Sequence[float | None]) -> dict[str, float | None]:
    return {f"{name}/sigma {part / len(losses):.2f}": loss for part, loss in enumerate(losses)}


def _stacked(image: Image.Image) -> np.ndarray:
    """[1, height, width, 3] of uint8: TensorBoard and Weights & Biases both take it."""
    return np.asarray(image.convert("RGB"))[None]


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str | int | float | bool]]:
    """Nested values as section.key: numbers and text as they are, everything else as its text."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, (str, int, float, bool)) else str(value)
