"""Configurations, read and changed; and Quaterion's `CacheConfig`: what of frozen encoders is cached, and where."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import InitVar, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from qie.config import Config, load_config
from qie.errors import ConfigError, UsageError
from qie.legacy.names import ignored
from qie.recipe import json_hash

KEPT_AS = {"vae": "latents", "text_encoder": "embeds"}
"""The frozen encoders, and the field of the configuration's `cache.keep` that holds what they give."""

KeyExtractor = Callable[[Any], Hashable]


def load_config_from_yaml(yaml_path: str | Path) -> Config:
    """The configuration in a file. Now: `qie.load_config`; docs/migration.md lists the keys that changed."""
    return load_config(yaml_path)


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """The configuration with other values, by their keys, such as `data.batch_size`.

    Raises:
        ConfigError: a value is refused.
    """
    tree = config.model_dump(exclude_unset=True)
    for key, value in values.items():
        section, name = key.split(".")
        tree[section] = tree.get(section, {}) | {name: value}
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(str(step) for step in fault["loc"])
        raise ConfigError("a value is refused", where=where, expected=fault["msg"], found=fault["input"]) from error


class CacheType(StrEnum):
    """Where what an encoder gave stays in memory. Now: `cache.keep.latents` (VAE) and `cache.keep.embeds` (text)."""

    AUTO = "auto"
    CPU = "cpu"
    GPU = "gpu"
    NONE = "none"


@dataclass(frozen=True)
class CacheConfig:
    """Quaterion's settings of a cache. Now: sections `cache` and `data` of the configuration.

    Attributes:
        cache_type: for encoders that are not in `mapping`. Now: `cache.keep`.
        mapping: encoder ("vae", "text_encoder") -> type.
        key_extractors: from what is encoded to what it is known by; one, or one for each encoder. Now: nothing. Samples
            of shards are known by the content of their row, which never goes stale; see `key` for what else there is.
            Quaterion's documents also write `key_extractor`.
        batch_size: rows encoded together. Now: `cache.encode_batch_size`, 1 if not given: the last bits depend on it.
        num_workers: Now: `data.reader_threads`.
        save_dir: Now: `cache.cache_dir`.
    """

    cache_type: CacheType | None = CacheType.AUTO
    mapping: Mapping[str, CacheType] = field(default_factory=dict)
    key_extractors: KeyExtractor | Mapping[str, KeyExtractor] = field(default_factory=dict)
    batch_size: int | None = None
    num_workers: int | None = None
    save_dir: str | None = None
    key_extractor: InitVar[KeyExtractor | None] = None

    def __post_init__(self, key_extractor: KeyExtractor | None) -> None:
        if key_extractor is not None and self.key_extractors:
            raise ConfigError("key_extractor and key_extractors are one setting", where="CacheConfig")
        object.__setattr__(self, "key_extractors", key_extractor or self.key_extractors)
        extractors = [] if callable(self.key_extractors) else self.key_extractors
        for name in (*self.mapping, *extractors):
            if name not in KEPT_AS:
                expected = "vae, which encodes images, or text_encoder, which encodes prompts over images"
                raise ConfigError("no such encoder", where="CacheConfig", expected=expected, found=name)
        for kind in (self.cache_type, *self.mapping.values()):
            if kind is not None and kind not in [*CacheType]:
                raise ConfigError("no such type", where="CacheConfig", expected=", ".join(CacheType), found=kind)
        if self.cache_type is None and not self.mapping:
            raise ConfigError("a cache needs cache_type or mapping", where="CacheConfig")

    def types(self) -> dict[str, CacheType]:
        """The place of each encoder's outputs: CPU, GPU or NONE.

        Raises:
            ConfigError: GPU, and there is none.
        """
        gpu = torch.cuda.is_available()
        found: dict[str, CacheType] = {}
        for name in KEPT_AS:
            wanted = CacheType(self.mapping.get(name, self.cache_type or CacheType.NONE))
            if wanted == CacheType.GPU and not gpu:
                raise ConfigError("no GPU to cache on", where=f"CacheConfig, {name}", expected="cpu or auto")
            found[name] = (CacheType.GPU if gpu else CacheType.CPU) if wanted == CacheType.AUTO else wanted
        return found

    def applied(self, config: Config, encoders: Mapping[str, object] | None = None) -> Config:
        """The configuration with this cache.

        Args:
            encoders: by their names, to be checked.

        Raises:
            ConfigError: a value is refused, or an encoder that is to be cached can be trained.
        """
        types = self.types()
        if self.key_extractors:
            ignored("key_extractors", "nothing: samples of shards are known by their content")
        cached = {name: kind for name, kind in types.items() if kind != CacheType.NONE}
        require_frozen({name: encoder for name, encoder in (encoders or {}).items() if name in cached})
        keep = config.cache.keep.model_copy(update={KEPT_AS[name]: str(kind) for name, kind in types.items()})
        values: dict[str, Any] = {"cache.use_cache": bool(cached), "cache.keep": keep.model_dump()}
        if self.save_dir is not None:
            values["cache.cache_dir"] = self.save_dir
        if self.batch_size is not None:
            values["cache.encode_batch_size"] = self.batch_size
        if self.num_workers is not None:
            values["data.reader_threads"] = max(1, self.num_workers)
        return changed(config, values)

    def key(self, encoder: str, value: object) -> str:
        """The hash by which `EmbeddingCacheManager` knows `value`: 64 hex characters, of its extractor or itself.

        Raises:
            UsageError: it is not text, bytes or a number, and no extractor turns it into one.
        """
        extractors = self.key_extractors
        extractor = extractors if callable(extractors) else extractors.get(encoder)
        known_by = value if extractor is None else extractor(value)
        parts = known_by if isinstance(known_by, tuple) else (known_by,)
        if not all(isinstance(part, (str, bytes, int, float)) for part in parts):
            # The hash of any other object is of this process, and would be another one tomorrow.
            raise UsageError(
                "a key extractor must return text, bytes, a number, or a tuple of them",
                where=f"CacheConfig.key_extractors, {encoder}",
                found=type(known_by).__name__,
            )
        return json_hash([encoder, *(f"{type(part).__name__} {part!r}" for part in parts)])


def require_frozen(encoders: Mapping[str, object]) -> None:
    """Raise ConfigError when one of `encoders`, by their names, can be trained: what is cached of it would go stale."""
    for name, encoder in encoders.items():
        weights = encoder.parameters() if isinstance(encoder, torch.nn.Module) else ()
        if getattr(encoder, "trainable", False) is True or any(weight.requires_grad for weight in weights):
            raise ConfigError(
                "a trainable encoder cannot be cached",
                where=name,
                hint="freeze it with requires_grad_(False), or turn its cache off: CacheType.NONE",
            )
