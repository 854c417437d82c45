"""An exponential moving average of the trained weights, in float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch


class Ema:
    """average ← decay · average + (1 − decay) · weight, after each step.

    In the first steps the decay is smaller, (1 + n) / (10 + n) after n updates, so that the initial weights are soon
    forgotten: the warm-up of TensorFlow's and diffusers' averages.

    Args:
        parameters: the trained weights by name; plain or sharded.
        decay: in (0, 1).
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], decay: float) -> None:
        self._parameters, self._decay = dict(parameters), decay
        self.averages = {name: weight.detach().float().clone() for name, weight in self._parameters.items()}

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Average in the weights after optimizer step number `updates`, from 1."""
        decay = min(self._decay, (1 + updates) / (10 + updates))
        for name, weight in self._parameters.items():
            self.averages[name].lerp_(weight.detach().float(), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the model's weights are the averages."""
        trained = {name: weight.detach().clone() for name, weight in self._parameters.items()}
        self._put(self.averages)
        try:
            yield
        finally:
            self._put(trained)

    @torch.no_grad()
    def _put(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, weight in self._parameters.items():
            weight.copy_(values[name])
