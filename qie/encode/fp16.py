"""The one way to FP16."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qie.errors import RowError

FP16_MAX = torch.finfo(torch.float16).max


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor as stored, and how many of its values were clipped."""

    values: torch.Tensor
    clipped: int


def to_storage(values: torch.Tensor, what: str) -> Stored:
    """`values` in FP16 on the host.

    The only way to FP16 in qie, for cached and live training alike. It is exact for bfloat16's normal values within
    range.

    Raises:
        RowError: a value is NaN or infinite; names `what`.
    """
    if not bool(torch.isfinite(values).all()):
        raise RowError(f"{what} contains NaN or infinity", hint="try cache.compute_dtype: float32")
    # In float32: bfloat16 cannot represent the limit and would round it up, to infinity in FP16.
    values = values.float()
    clipped = int((values.abs() > FP16_MAX).sum())
    return Stored(values.clamp(-FP16_MAX, FP16_MAX).to("cpu", torch.float16), clipped)
