"""Fine-tune Qwen-Image-Edit and Qwen-Image-2.1: encode once, train forever.

These names are public; everything else may change.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "Batch": "qie.types",
    "Config": "qie.config",
    "Encoder": "qie.encode",
    "EncoderOptions": "qie.encode",
    "Predictor": "qie.inference",
    "PretrainedModel": "qie.pretrained",
    "QieError": "qie.errors",
    "Recipe": "qie.recipe",
    "Row": "qie.types",
    "Sample": "qie.types",
    "ShardSet": "qie.shards.shard_set",
    "Stream": "qie.data.stream",
    "load_config": "qie.config",
    "open_accelerator": "qie.training.processes",
    "open_encoder": "qie.from_config",
    "open_predictor": "qie.from_config",
    "open_pretrained": "qie.pretrained",
    "open_rows": "qie.from_config",
    "open_source": "qie.data.sources",
    "open_stream": "qie.data.opening",
    "open_training_stream": "qie.stream_chooser",
    "train": "qie.training.loop",
}

_RENAMED = {
    "Checkpoint": "PretrainedModel",
    "Painter": "Predictor",
    "open_checkpoint": "open_pretrained",
    "open_painter": "open_predictor",
}
"""Public names of version 0.1, which still work and warn."""

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    # On first use, so that `import qie` and every --help do without torch.
    if name in _RENAMED:
        warnings.warn(f"qie.{name} is now qie.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
        name = _RENAMED[name]
    if name not in _EXPORTS:
        raise AttributeError(f"module 'qie' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
