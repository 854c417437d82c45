"""Tensors that several processes hold together (FSDP2), whole; and whole tensors among such processes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, on the CPU. Every process has to ask for it, since each holds a part."""
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().cpu()


def like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A whole value, spread as `parameter` is. Every process has the value."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


@torch.no_grad()
def fill(mine: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Put whole values into tensors of the same names, each in its own type and however it is spread."""
    for name, tensor in mine.items():
        tensor.copy_(like(values[name].to(tensor.dtype), tensor))
