"""Whoever is told of a run: its metrics file, trackers, and the caller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from accelerate import Accelerator
from PIL import Image

from qie.config import Config
from qie.training.telling.metrics import MetricsFile, StepMetrics
from qie.training.telling.tracking import Tracking
from qie.training.validation import Validation


def _nothing(*_: object) -> None:
    """For a caller who does not listen."""


@dataclass(frozen=True)
class Listener:
    """What the caller is told, in the main process.

    Attributes:
        start: steps done before, and steps altogether.
        step: the numbers of a step.
        validation, images: the step, and what was found or painted.
        say: a line for a person.
    """

    start: Callable[[int, int], object] = _nothing
    step: Callable[[StepMetrics], object] = _nothing
    validation: Callable[[int, Validation], object] = _nothing
    images: Callable[[int, Sequence[Image.Image]], object] = _nothing
    say: Callable[[str], object] = _nothing


class Journal:
    """Tells everyone who is to be told; in other processes than the main one, nobody is.

    Args:
        first_step: what the metrics file holds of later steps is dropped.
    """

    def __init__(self, config: Config, accelerator: Accelerator, listener: Listener, first_step: int) -> None:
        self._main = accelerator.is_main_process
        self._listener = listener
        self._file = MetricsFile(Path(config.train.output_dir), first_step, self._main)
        self._tracking = Tracking(config, accelerator)

    def __enter__(self) -> Journal:
        self._file.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._tracking.finish()
        self._file.close()

    def step(self, metrics: StepMetrics) -> None:
        """A step was taken."""
        self._file.write(asdict(metrics))
        self._tracking.log_step(metrics)
        if self._main:
            self._listener.step(metrics)

    def validation(self, step: int, validation: Validation) -> None:
        """The rows kept out were looked at."""
        self._file.write({"step": step} | {f"validation_{name}": value for name, value in asdict(validation).items()})
        self._tracking.log_validation(step, validation)
        if self._main:
            self._listener.validation(step, validation)

    def images(self, step: int, images: Sequence[Image.Image]) -> None:
        """Sample images were painted."""
        self._tracking.log_images(step, images)
        if self._main:
            self._listener.images(step, images)
