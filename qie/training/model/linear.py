"""A linear layer that takes the place of another: the same parameters, and another product."""

from __future__ import annotations

from typing import Self

import torch


class SameLinear(torch.nn.Linear):
    """The parent of linear layers that replace others."""

    @classmethod
    def of(cls, linear: torch.nn.Linear) -> Self:
        """Of the same parameters."""
        made = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        made.weight, made.bias = linear.weight, linear.bias
        return made.train(linear.training)
