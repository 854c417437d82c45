"""Fine-tune Qwen-Image-Edit: encode once, train forever. These names are the public interface; all else may change."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "Batch": "qie.types",
    "Checkpoint": "qie.pretrained",
    "Config": "qie.config",
    "Encoder": "qie.encode",
    "EncoderOptions": "qie.encode",
    "Painter": "qie.predict",
    "QieError": "qie.errors",
    "Recipe": "qie.recipe",
    "Row": "qie.types",
    "Sample": "qie.types",
    "ShardSet": "qie.shards.shard_set",
    "Stream": "qie.data.stream",
    "load_config": "qie.config",
    "open_accelerator": "qie.opening",
    "open_checkpoint": "qie.pretrained",
    "open_encoder": "qie.opening",
    "open_painter": "qie.opening",
    "open_rows": "qie.opening",
    "open_source": "qie.data.sources",
    "open_stream": "qie.data",
    "open_training_stream": "qie.streams",
    "train": "qie.training.loop",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    # On first use, so that `import qie` and every --help do without torch.
    if name not in _EXPORTS:
        raise AttributeError(f"module 'qie' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
