"""The loss on rows that are kept out of training, with noise that never changes, at all noise levels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from accelerate import Accelerator

from qie.data.stream import Stream
from qie.training.objective import Objective
from qie.training.telling.metrics import by_level


@dataclass(frozen=True)
class Validation:
    """Mean loss over the rows, and over those in each quarter of the noise levels; None where there is no row."""

    loss: float
    loss_by_level: tuple[float | None, ...]


def validate(
    objective: Objective, model: torch.nn.Module, stream: Stream, accelerator: Accelerator
) -> Validation | None:
    """The validation loss, the same in every process and for any number of them; None without rows.

    Row number i of n is seen at the noise level (i + ½)/n before the shift: together they cover all levels, and since
    levels and noise are fixed, two losses of a run differ by what was learnt alone.
    """
    planned = stream.validation_batches()
    if not planned:
        return None
    count, world, rank = len(planned), accelerator.num_processes, accelerator.process_index
    losses: list[torch.Tensor] = []
    for turn in range(math.ceil(count / world)):
        # A process without a row of its own takes the first one again: sharded models compute together.
        number = turn * world + rank if turn * world + rank < count else 0
        loss = objective.validation_losses(model, stream.load(planned[number]), (number + 0.5) / count)
        losses.append(accelerator.gather(loss.float()))
    every = torch.cat(losses)[:count].cpu()
    levels = (torch.arange(count) + 0.5) / count
    return Validation(float(every.mean()), by_level(levels, every))
