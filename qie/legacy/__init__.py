"""The names that users of qwen-image-finetune and Quaterion know, as wrappers around qie's modules.

Each docstring gives the replacement after "Now:". docs/migration.md describes the migration.
"""

from qie.errors import UsageError
from qie.legacy.dataset import ImageDataset, loader
from qie.legacy.embedding_cache import EmbeddingCacheManager, check_cache_exists
from qie.legacy.names import INSTEAD, missing
from qie.legacy.settings import CacheConfig, CacheType, load_config_from_yaml
from qie.legacy.trainer import QwenImageEditTrainer

__all__ = [
    "CacheConfig",
    "CacheType",
    "EmbeddingCacheManager",
    "ImageDataset",
    "QwenImageEditTrainer",
    "check_cache_exists",
    "load_config_from_yaml",
    "loader",
]


def __getattr__(name: str) -> object:
    if name in INSTEAD:
        raise missing(name, __name__, UsageError)  # an AttributeError would lose its words in `from … import`
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
