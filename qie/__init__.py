"""Fine-tune Qwen-Image-Edit and Qwen-Image-2.1: encode once, train forever.

These names are public; everything else may change.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # what editors, mypy and pyright see: `_EXPORTS`, which a test compares
    from qie.config import Config as Config
    from qie.config import load_config as load_config
    from qie.data.opening import open_stream as open_stream
    from qie.data.sources import Source as Source
    from qie.data.sources import open_source as open_source
    from qie.data.stream import Stream as Stream
    from qie.data.webdataset_pipeline import webdataset as webdataset
    from qie.encode import Encoder as Encoder
    from qie.encode import EncoderOptions as EncoderOptions
    from qie.errors import QieError as QieError
    from qie.from_config import open_encoder as open_encoder
    from qie.from_config import open_predictor as open_predictor
    from qie.from_config import open_rows as open_rows
    from qie.inference import Predictor as Predictor
    from qie.pretrained import PretrainedModel as PretrainedModel
    from qie.pretrained import open_pretrained as open_pretrained
    from qie.recipe import Recipe as Recipe
    from qie.shards.cache import ShardCache as ShardCache
    from qie.shards.shard_set import ShardSet as ShardSet
    from qie.stats import Summary as Summary
    from qie.stream_chooser import open_training_stream as open_training_stream
    from qie.training.loop import Listener as Listener
    from qie.training.loop import train as train
    from qie.training.objective import pack as pack
    from qie.training.objective import unpack as unpack
    from qie.training.objective import velocity as velocity
    from qie.training.processes import open_accelerator as open_accelerator
    from qie.types import Batch as Batch
    from qie.types import Row as Row
    from qie.types import Sample as Sample

_EXPORTS = {
    "Batch": "qie.types",
    "Config": "qie.config",
    "Encoder": "qie.encode",
    "EncoderOptions": "qie.encode",
    "Listener": "qie.training.loop",
    "Predictor": "qie.inference",
    "PretrainedModel": "qie.pretrained",
    "QieError": "qie.errors",
    "Recipe": "qie.recipe",
    "Row": "qie.types",
    "Sample": "qie.types",
    "ShardCache": "qie.shards.cache",
    "ShardSet": "qie.shards.shard_set",
    "Source": "qie.data.sources",
    "Stream": "qie.data.stream",
    "Summary": "qie.stats",
    "load_config": "qie.config",
    "open_accelerator": "qie.training.processes",
    "open_encoder": "qie.from_config",
    "open_predictor": "qie.from_config",
    "open_pretrained": "qie.pretrained",
    "open_rows": "qie.from_config",
    "open_source": "qie.data.sources",
    "open_stream": "qie.data.opening",
    "open_training_stream": "qie.stream_chooser",
    "pack": "qie.training.objective",
    "train": "qie.training.loop",
    "unpack": "qie.training.objective",
    "velocity": "qie.training.objective",
    "webdataset": "qie.data.webdataset_pipeline",
}

_RENAMED = {
    "Checkpoint": "PretrainedModel",
    "Painter": "Predictor",
    "open_checkpoint": "open_pretrained",
    "open_painter": "open_predictor",
}
"""Public names of version 0.1, which still work and warn."""

__all__ = sorted(_EXPORTS)


if not TYPE_CHECKING:  # else every name would be known to tools, and be Any

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
