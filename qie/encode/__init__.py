"""Encoding: rows become samples. The only part of qie that loads the VAE and Qwen2.5-VL."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qie.encode.encoder import Encoder
    from qie.encode.options import EncoderOptions

__all__ = ["Encoder", "EncoderOptions"]

_MODULES = {"Encoder": "qie.encode.encoder", "EncoderOptions": "qie.encode.options"}


def __getattr__(name: str) -> Any:
    # On first use: a training run compares recipes, for which it needs the options alone.
    if name not in _MODULES:
        raise AttributeError(f"module 'qie.encode' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
