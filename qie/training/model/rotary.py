"""Rotary embeddings in real numbers: a compiler makes one kernel of what stands between two products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Grid = tuple[int, int, int]
"""Frames, height and width of an image in tokens."""


def rotated(tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [B, tokens, heads, head width]."""
    if torch.compiler.is_compiling():  # a compiler derives the gradient itself
        return _turned(tokens, cos, sin)
    found: Tensor = _Rotation.apply(tokens, cos, sin)  # type: ignore[no-untyped-call]
    return found


def angles(frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines, each [tokens, 1, head width], of diffusers' complex frequencies.

    Neighbours a, b of a head are one complex number: it becomes (a cos - b sin, b cos + a sin).
    """
    cos, sin = torch.view_as_real(frequencies).unbind(-1)
    return torch.stack([cos, cos], -1).flatten(1)[:, None], torch.stack([-sin, sin], -1).flatten(1)[:, None]


class _Rotation(torch.autograd.Function):
    """Rotary embedding in float32. Its gradient is the rotation back, which keeps nothing but the angles."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(tokens, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        cos, sin = ctx.saved_tensors
        return _turned(gradient, cos, sin, -1), None, None


def _turned(tokens: Tensor, cos: Tensor, sin: Tensor, direction: int = 1) -> Tensor:
    swapped = tokens.view(*tokens.shape[:-1], -1, 2).flip(-1).flatten(-2)
    return torch.addcmul(tokens * cos, swapped, sin, value=direction).to(tokens.dtype)
