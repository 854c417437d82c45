"""Tensors that several processes hold together (FSDP2): gathered whole, filled from whole ones, read in parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from qie.errors import ConfigError, QieError


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, on the CPU. Every process has to ask for it, since each holds a part."""
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().cpu()


def all_whole(tensors: Mapping[str, torch.Tensor], *, wanted: bool) -> dict[str, torch.Tensor]:
    """All of each tensor. A process that does not want them gives its parts and keeps none: a machine lacks the memory
    for a model and its optimizer in each of eight processes."""
    found = {}
    for name, tensor in tensors.items():
        if wanted:
            found[name] = whole(tensor)
        elif isinstance(tensor, DTensor):
            tensor.full_tensor()
    return found


def require_own_blocks(model: torch.nn.Module, named: Sequence[str] | None) -> None:
    """Raise ConfigError where accelerate's configuration names other blocks to shard by than the model's."""
    found = {type(module).__name__ for module in model.modules()}
    if foreign := sorted(set(named or ()) - found):
        raise ConfigError(
            "the model has no layer of the class that it is to be sharded by",
            where="fsdp_transformer_layer_cls_to_wrap, in accelerate's configuration",
            expected=", ".join(getattr(model, "_no_split_modules", None) or ["no such line"]),
            found=", ".join(foreign),
            hint="leave the line out, as configs/accelerate/fsdp2.yaml does: the model names its blocks",
        )


def reshard_weights(model: torch.nn.Module) -> None:
    """Spread again the weights that a forward pass without a backward pass has left whole: FSDP's outermost module."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def keep_from_ddp(model: torch.nn.Module, names: Iterable[str]) -> None:
    """Keep DDP from sending these parameters, besides those named before, from the first process when it starts: each
    process has read them from the same files, and some cannot be sent."""
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
    """Copy whole values into tensors of the same names, each in its own dtype and however it is spread.

    Raises:
        ValueError: one is not finite; names it.
    """
    for name, tensor in mine.items():
        value = values[name].to(tensor.dtype)
        if not_finite({name: value}):
            raise ValueError(f"{name} is not finite")
        tensor.copy_(like(value, tensor))


class TensorFiles(Mapping[str, torch.Tensor]):
    """The tensors in safetensors files, each read when it is asked for: a process that holds a part of a model needs a
    part of each tensor, and has no room for all of them."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._opened: dict[str, Any] = {}
        for file in files:
            opened: Any = safe_open(file, framework="pt")
            self._opened |= dict.fromkeys(opened.keys(), opened)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._opened[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._opened)

    def __len__(self) -> int:
        return len(self._opened)


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def not_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The name of the first tensor that holds a NaN or an infinity; dtypes of 8 bits are not checked."""
    for name, tensor in tensors.items():
        if tensor.dtype in _FLOATS and not bool(tensor.isfinite().all()):
            return name
    return None


def require_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise QieError when a tensor that is to be saved is not finite; names it."""
    if bad := not_finite(tensors):
        raise QieError(
            "the weights or the optimizer's state are not finite, and are not saved",
            where=bad,
            hint="continue with --resume latest, or start a new run with a lower optimizer.init_args.lr",
        )
