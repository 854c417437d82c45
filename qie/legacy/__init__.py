"""The names that users of qwen-image-finetune and Quaterion know, as faces on qie's modules.

Each says in its docstring, behind "Now:", what to call instead. docs/migration.md tells how to move over.
"""

from qie.legacy.cache import EmbeddingCacheManager, check_cache_exists
from qie.legacy.settings import CacheConfig, CacheType
from qie.legacy.trainer import QwenImageEditTrainer

__all__ = ["CacheConfig", "CacheType", "EmbeddingCacheManager", "QwenImageEditTrainer", "check_cache_exists"]
