"""Tensors that several processes hold together (FSDP2), whole; and whole tensors among such processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from qie.training.model.weights import not_finite


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, on the CPU. Every process has to ask for it, since each holds a part."""
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().cpu()


def all_whole(tensors: Mapping[str, torch.Tensor], *, wanted: bool) -> dict[str, torch.Tensor]:
    """The same of each tensor. A process that does not want them gives its part alone and keeps none: all of a model
    and its optimizer in each of eight processes would be more than a machine has."""
    found = {}
    for name, tensor in tensors.items():
        if wanted:
            found[name] = whole(tensor)
        elif isinstance(tensor, DTensor):
            tensor.full_tensor()
    return found


def reshard(model: torch.nn.Module) -> None:
    """Spread again what a forward pass without a backward pass has left whole: FSDP's outermost module."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def keep_from_ddp(model: torch.nn.Module, names: Iterable[str]) -> None:
    """Let DDP send none of these parameters from the first process at the start, besides those that were named before:
    each process has read them from the same files, and some cannot be sent."""
    before = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
        model, [*before, *names]
    )


def like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A whole value, spread as `parameter` is. Every process has the value."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


@torch.no_grad()
def fill(mine: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Put whole values into tensors of the same names, each in its own type and however it is spread.

    Raises:
        ValueError: one is not finite; names it.
    """
    for name, tensor in mine.items():
        value = values[name].to(tensor.dtype)
        if not_finite({name: value}):
            raise ValueError(f"{name} is not finite")
        tensor.copy_(like(value, tensor))
