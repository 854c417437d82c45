"""Inference: images made with a model, by diffusers' own pipelines and qie's embeddings."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qie.inference.predictor import Predictor, free, generate, load_vae

__all__ = ["Predictor", "free", "generate", "load_vae"]


def __getattr__(name: str) -> Any:
    # On first use: to read requests takes no diffusers.
    if name not in __all__:
        raise AttributeError(f"module 'qie.inference' has no attribute {name!r}")
    return getattr(importlib.import_module("qie.inference.predictor"), name)
