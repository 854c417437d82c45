"""What a step starts with, made ready while the one before computes: a batch on the device, and its random numbers."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from typing import Any

from qie.config import TrainConfig
from qie.data.stream import Stream
from qie.errors import ConfigError
from qie.stages import Pipeline
from qie.training.objective import NoiseDraws, Objective
from qie.types import Batch


@dataclass(frozen=True)
class Prepared:
    """A batch where the model is, its random numbers, its epoch, and the stream's state behind it."""

    batch: Batch
    draws: NoiseDraws
    epoch: int
    position: dict[str, Any]


def iter_prepared(stream: Stream, objective: Objective, first: int) -> Generator[Prepared]:
    """Prepared batches of a stream, one ahead, from the `first` batch of a run on; the first one is number 0.

    A thread draws the noise and starts the copy to the device. To close the generator ends it, even where it waits for
    a shard that nobody writes.
    """
    return Pipeline([], depth=1).run(_prepare(stream, objective, first))


def _prepare(stream: Stream, objective: Objective, first: int) -> Iterator[Prepared]:
    with closing(stream.forever()) as batches:
        for number in count(first):
            epoch = stream.epoch
            batch = next(batches)
            position = stream.state_dict()
            draws = objective.draw(batch, number)
            yield Prepared(objective.moved(batch), draws, epoch, position)
            del batch, draws


def planned_steps(section: TrainConfig, batches: int | None) -> int:
    """Optimizer steps of a run: `max_steps`, or those of `batches` batches of each process."""
    if batches is None:
        return section.max_steps
    return math.ceil(batches / section.gradient_accumulation_steps)


def batches_of(stream: Stream, epochs: int) -> int:
    """Batches of each process in the first `epochs` epochs. By source weights, one may be longer than another."""
    lengths = []
    for epoch in range(epochs):
        stream.set_epoch(epoch)
        lengths.append(len(stream))
    stream.set_epoch(0)
    return sum(lengths)


def require_null_prompts(stream: Stream, caption_dropout_rate: float) -> None:
    """Raise ConfigError when captions are to be dropped, and a sample has no null prompt to take their place."""
    if caption_dropout_rate and not stream.samples.columns.null_prompts:
        raise ConfigError(
            "samples have no null prompt, which takes the place of a dropped caption",
            where="data.caption_dropout_rate",
            expected="0 for shards that were imported without null prompts",
            found=caption_dropout_rate,
            hint="--set data.caption_dropout_rate=0, or encode the rows with qie-precompute",
        )
