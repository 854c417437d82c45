"""Fine-tune Qwen-Image-Edit: encode once, train forever. These names are the public interface; all else may change."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "Batch": "qie.types",
    "Config": "qie.config",
    "Encoder": "qie.encode",
    "EncoderOptions": "qie.encode",
    "QieError": "qie.errors",
    "Recipe": "qie.recipe",
    "Row": "qie.types",
    "Sample": "qie.types",
    "ShardSet": "qie.shards.shard_set",
    "Stream": "qie.data.stream",
    "load_config": "qie.config",
    "open_checkpoint": "qie.pretrained",
    "open_source": "qie.data.sources",
    "open_stream": "qie.data",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    # On first use, so that `import qie` and every --help do without torch.
    if name not in _EXPORTS:
        raise AttributeError(f"module 'qie' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
