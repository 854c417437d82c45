"""Devices and precisions from their names in the configuration."""

from __future__ import annotations

import os

import torch

from qie.errors import ConfigError

CPU = torch.device("cpu")


def resolve_device(name: str, key: str) -> torch.device:
    """The device of a config value; `auto` is this process's GPU, or the CPU without one.

    If a launcher starts several processes on a machine, each has its own GPU, by the rule of accelerate.

    Raises:
        ConfigError: no such device here; names `key`.
    """
    if name == "auto":
        local_rank = max(0, int(os.environ.get("LOCAL_RANK", "0")))
        return torch.device("cuda", local_rank % torch.cuda.device_count()) if torch.cuda.is_available() else CPU
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device == torch.device("cpu", 0):
        device = CPU  # to torch another one, between which some operations fail
    if device is None or (device != CPU and device.type != "cuda"):
        raise ConfigError("no such device", where=key, expected="auto, cpu, cuda:0, …", found=name)
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(
            "no such GPU", where=key, expected=f"one of {count} GPUs", found=name, hint=f"--set {key}=auto"
        )
    return device


def resolve_dtype(name: str, device: torch.device) -> str:
    """The name of torch's dtype; `auto` is bfloat16 on a GPU and float32 on the CPU."""
    if name != "auto":
        return name
    return "bfloat16" if device.type == "cuda" else "float32"


def staged(values: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Host values as `dtype`, where a copy to `device` need not wait: in page-locked memory, if that is a GPU."""
    dtype = dtype or values.dtype
    if device.type != "cuda":
        return values.to(dtype)
    return torch.empty_like(values, dtype=dtype, pin_memory=True).copy_(values)


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Host values on a device, to which the host does not wait for the copy."""
    return staged(values, device).to(device, non_blocking=True)
