"""Names in the configuration to devices and precisions."""

from __future__ import annotations

import torch

from qie.errors import ConfigError


def resolve_device(name: str, key: str) -> torch.device:
    """The device of a config value; `auto` is the first GPU, or the CPU without one.

    Raises:
        ConfigError: no such device here; names `key`.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
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
