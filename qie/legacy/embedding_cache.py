"""`EmbeddingCacheManager` and `check_cache_exists` of qwen-image-finetune."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from qie.errors import ShardError, UsageError
from qie.file_hashes import file_hashes
from qie.legacy.names import missing
from qie.legacy.settings import CacheConfig
from qie.paths import local_path
from qie.recipe import json_hash, normal_prompt
from qie.shards.discovery import published
from qie.shards.shard_set import ShardSet
from qie.shards.tensors import to_storage
from qie.stats import summarise
from qie.stores import File, Folder, open_folder
from qie.types import Row, Sample

CACHE_TYPES = (
    "pixel_latent",
    "control_latent",
    "prompt_embed",
    "prompt_embeds_mask",
    "empty_prompt_embed",
    "empty_prompt_embeds_mask",
)


def check_cache_exists(cache_root: str | Path) -> bool:
    """Whether there is a shard, or a single tensor of each of the first four kinds. Now: `qie-stats DIR`."""
    folder = open_folder(cache_root)
    return bool(published(folder)) or all(_singles(folder, kind) for kind in CACHE_TYPES[:4])


class EmbeddingCacheManager:
    """A folder of shards and of single tensors.

    Now: `qie.ShardSet` reads, `qie.precompute.precompute` writes.

    The shards' samples are found by their key, 64 hex characters, in place of a file's hash: it covers everything
    that the tensors were made from. Single tensors are for code that saves its own; nothing is trained on them. Each is
    in `DIR/<kind>/<hash>.safetensors`, written whole or not at all.

    Args:
        cache_root: path or URL.
        config: whose key extractors `get_key` uses.
    """

    def __init__(self, cache_root: str | Path, config: CacheConfig | None = None) -> None:
        self.cache_root = cache_root
        self._folder, self._config = open_folder(cache_root), config or CacheConfig()
        self._opened: tuple[dict[str, str], ShardSet | None, dict[str, int]] = ({}, None, {})

    def save_cache(self, cache_type: str, file_hash: str, data: torch.Tensor) -> None:
        """Save a single tensor: floating point as FP16 (clipped to its range), others, such as masks, as they are.

        Now: `qie.precompute.precompute`, which saves whole samples.

        Raises:
            RowError: it contains NaN or infinity.
        """
        single = self._single(cache_type, file_hash)
        values = data.detach()
        values = to_storage(values, cache_type).values if values.is_floating_point() else values.cpu()
        single.folder.write(single.name, save({cache_type: values.contiguous()}))

    def load_cache(self, cache_type: str, file_hash: str) -> torch.Tensor | None:
        """A single tensor, or the one in the sample whose key is `file_hash`; None without.

        Now: `shards = qie.ShardSet.open([DIR]); shards.load(shards.keys.index(key))`.

        Raises:
            ShardError: it is damaged.
            UsageError: the sample has several controls, which are several tensors.
        """
        single = self._single(cache_type, file_hash)
        if single.size() is not None:
            try:
                return load(single.read())[cache_type]  # type: ignore[no-any-return]
            except (SafetensorError, KeyError) as error:
                raise ShardError("the saved tensor is damaged", where=single, found=error, hint="delete it") from error
        shards, positions = self._shards()
        if shards is None or file_hash not in positions:
            return None
        return _tensor(shards.load(positions[file_hash]), cache_type)

    def cache_exists(self, cache_type: str, file_hash: str) -> bool:
        """Whether `load_cache` finds it. Now: `key in shards.keys`."""
        return self._single(cache_type, file_hash).size() is not None or file_hash in self._shards()[1]

    def get_cache_stats(self) -> dict[str, int]:
        """How many tensors there are of each kind. Now: `qie-stats DIR`, or `qie.stats.summarise`."""
        records = summarise(published(self._folder)).records
        return {kind: records + len(_singles(self._folder, kind)) for kind in CACHE_TYPES}

    def clear_cache(self, cache_type: str | None = None) -> None:
        """Delete single tensors: those of one kind; without a kind all of them, and all shards.

        Now: rarely needed: qie-precompute encodes changed rows again. To start over, delete the folder.

        Raises:
            UsageError: a kind is named, and there are shards, which hold all kinds together. Nothing was deleted.
        """
        indexes = published(self._folder)
        if cache_type is not None and indexes:
            raise UsageError(
                "shards hold all tensors of a sample together",
                where=self._folder.url,
                hint="qie-precompute encodes again what changed; clear_cache() deletes the shards",
            )
        for kind in CACHE_TYPES if cache_type is None else (_known(cache_type),):
            for name in _singles(self._folder, kind):
                self._folder.child(kind).delete(name)
        for index in indexes:  # a tar without its index is no shard
            self._folder.delete(index.name)
            self._folder.delete(index.with_suffix(".tar").name)

    def get_file_hash_for_image(self, image_path: str | Path) -> str:
        """SHA-256 of the file's content: the same wherever it lies, and another one when it is changed.

        Now: `row.target_hash`; of a whole row `recipe.key(row)`.
        """
        path = local_path(str(image_path))
        try:
            return file_hashes([path])[path]
        except OSError as error:
            raise UsageError("the image cannot be read", where=path, found=error.strerror) from error

    def get_file_hash_for_prompt(self, image_path: str | Path, prompt: str) -> str:
        """A hash of the file and the normalised prompt: what its embedding depends on. Now: `recipe.key(row)`."""
        return json_hash({"image": self.get_file_hash_for_image(image_path), "prompt": normal_prompt(prompt)})

    def key_of(self, row: Row) -> str | None:
        """The key of the sample that the shards have of this row; None without. Now: `recipe.key(row)`."""
        shards, positions = self._shards()
        key = shards.recipe.key(row) if shards else None
        return key if key in positions else None

    @staticmethod
    def exist(cache_root: str | Path) -> bool:
        """Now: `qie-stats DIR`; see `check_cache_exists`."""
        return check_cache_exists(cache_root)

    def __getattr__(self, name: str) -> NoReturn:
        raise missing(name, type(self).__name__)

    def get_key(self, encoder: str, value: object) -> str:
        """A `file_hash` for `value` by the key extractors of the manager's config. Now: see `CacheConfig.key`."""
        return self._config.key(encoder, value)

    def _single(self, kind: str, file_hash: str) -> File:
        if not re.fullmatch(r"[0-9A-Za-z_-]{1,128}", file_hash):
            raise UsageError("this is not a hash", expected="letters and digits", found=file_hash)
        return File(self._folder.child(_known(kind)), f"{file_hash}.safetensors")

    def _shards(self) -> tuple[ShardSet | None, dict[str, int]]:
        """The shards as they are now, and the position of each key."""
        stamps = self._folder.stamps()
        if self._opened[0] != stamps:
            shards = None
            if summarise(published(self._folder)).samples:
                shards = ShardSet.open([self._folder.url])
            keys = shards.keys if shards else []
            self._opened = (stamps, shards, {key: position for position, key in enumerate(keys)})
        return self._opened[1:]


def _known(kind: str) -> str:
    if kind not in CACHE_TYPES:
        raise UsageError("no such kind of tensor", expected=", ".join(CACHE_TYPES), found=kind)
    return kind


def _singles(folder: Folder, kind: str) -> list[str]:
    return [name for name in folder.child(kind).listing() if name.endswith(".safetensors")]


def _tensor(sample: Sample, kind: str) -> torch.Tensor:
    if kind != "control_latent":
        tensor: torch.Tensor = getattr(sample, kind)
        return tensor
    if len(sample.control_latent) > 1:
        raise UsageError("the sample has several controls", where=sample.key, hint="qie.ShardSet.load gives them all")
    return sample.control_latent[0]
