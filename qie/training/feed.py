"""What a step starts with, made ready while the one before computes: a batch on the device, and its random numbers."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from qie.config import TrainConfig
from qie.data.stream import Stream
from qie.errors import ConfigError
from qie.training.step import Draws, Objective
from qie.types import Batch


@dataclass(frozen=True)
class Prepared:
    """A batch where the model is, its random numbers, its epoch, and the stream's state behind it."""

    batch: Batch
    draws: Draws
    epoch: int
    position: dict[str, Any]


class Feed:
    """Prepared batches of a stream, one ahead, from the `first` batch of a run on; the first one is number 0.

    A thread draws the noise and starts the copy to the device. It is a daemon: one that waits for a shard that nobody
    has written yet keeps no process alive.
    """

    def __init__(self, stream: Stream, objective: Objective, first: int) -> None:
        self._stream, self._objective, self._first = stream, objective, first
        self._ready: queue.Queue[Prepared | BaseException] = queue.Queue(1)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="qie-feed", daemon=True)

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        while not self._ready.empty():  # the thread may be waiting for room
            self._ready.get_nowait()

    def __next__(self) -> Prepared:
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def _work(self) -> None:
        batches = self._stream.forever()
        number = self._first
        try:
            while not self._closed.is_set():
                self._ready.put(self._prepared(batches, number))
                number += 1
        except BaseException as error:  # raised by the step that would have had the batch
            self._ready.put(error)
        finally:
            batches.close()

    def _prepared(self, batches: Iterator[Batch], number: int) -> Prepared:
        epoch = self._stream.epoch
        batch = next(batches)
        position = self._stream.state_dict()
        draws = self._objective.draw(batch, number)
        return Prepared(self._objective.moved(batch), draws, epoch, position)


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
