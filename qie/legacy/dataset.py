"""`ImageDataset` and `loader` of qwen-image-finetune."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from qie.data.sources import open_source
from qie.encode.images import decode_image
from qie.errors import UsageError
from qie.legacy.embedding_cache import CACHE_TYPES, EmbeddingCacheManager
from qie.legacy.names import by_keys, ignored
from qie.paths import local_path

ARGUMENTS = {
    "dataset_path": "data.source",
    "cache_dir": "cache.cache_dir",
    "use_cache": "cache.use_cache",
    "caption_dropout_rate": "data.caption_dropout_rate",
    "cache_drop_rate": "data.caption_dropout_rate",
}
"""Of `data.init_args`, what has a key of the configuration, and that key."""


class ImageDataset(Dataset[dict[str, Any]]):
    """The rows of a source, with the tensors that a cache has of them. Now: `qie.open_source`, `qie.ShardSet`.

    An item has `cached`, `prompt`, `image` and `control` (the first one), both [3, height, width] uint8, and `row`, the
    row as qie knows it. A cached row's item also has the six tensors, and `file_hashes`, each of which is its key.

    Args:
        data_config: `dataset_path`, and perhaps `cache_dir`, `use_cache` and `caption_dropout_rate`, which training
            takes.

    Raises:
        UsageError: an argument has no meaning any more; says what to write instead.
        SourceError: there are no rows.
    """

    def __init__(self, data_config: Mapping[str, Any]) -> None:
        self.settings = by_keys(data_config, ARGUMENTS, "ImageDataset")
        self.source = open_source(self.settings.setdefault("data.source", "./dataset"))
        folder = self.settings.get("cache.cache_dir") if self.settings.get("cache.use_cache", True) else None
        self.cache_manager = None if folder is None else EmbeddingCacheManager(folder)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Raises RowError when the row cannot be read, or an image of it cannot be decoded."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row = self.source.read(index)
        item: dict[str, Any] = {
            "cached": False,
            "image": _pixels(row.target, "the target"),
            "control": _pixels(row.controls[0], "a control"),
            "prompt": row.prompt,
            "row": row,
        }
        key = self.cache_manager.key_of(row) if self.cache_manager else None
        if key is not None and self.cache_manager:
            item |= {kind: self.cache_manager.load_cache(kind, key) for kind in CACHE_TYPES}
            hashes = ("image_hash", "control_hash", "prompt_hash", "empty_prompt_hash")
            item |= {"cached": True, "file_hashes": dict.fromkeys(hashes, key)}
        return item

    def get_cache_stats(self) -> dict[str, int] | None:
        """How many tensors of each kind the cache has; None without one. Now: `qie-stats DIR`."""
        return self.cache_manager.get_cache_stats() if self.cache_manager else None


def loader(
    class_path: str,
    init_args: Mapping[str, Any] | None = None,
    batch_size: int = 1,
    num_workers: int = 0,
    shuffle: bool = True,
    **more: Any,
) -> DataLoader[dict[str, Any]]:
    """A dataset for `QwenImageEditTrainer.cache` and `fit`. Now: nothing; section data of the configuration.

    To look at, it gives batches as dicts of lists. What is trained on are the batches of `trainer.stream`.

    Args:
        class_path: `src.data.dataset.ImageDataset`, in whatever module, which is not imported; or the dataset's path.
        init_args: of `ImageDataset`.
        batch_size: of training, too.
        num_workers: ignored. Now: `data.reader_threads`.
        shuffle: of batches to look at; training always shuffles.
        more: further arguments of `ImageDataset`.

    Raises:
        UsageError: another class is named.
    """
    if num_workers:
        ignored("num_workers", "data.reader_threads")
    named = class_path.rpartition(".")[2] == "ImageDataset"
    if init_args is not None and not named:
        hint = "other datasets are sources: a folder, CSV, JSONL, Parquet, Hugging Face or tars; qie.open_source"
        raise UsageError(
            "custom dataset classes are not imported", expected="ImageDataset", found=class_path, hint=hint
        )
    dataset = ImageDataset({**(init_args or {}), **more, **({} if named else {"dataset_path": class_path})})
    batches = DataLoader(dataset, batch_size=batch_size, shuffle=shuffle, collate_fn=_together)
    batches.cache_manager = dataset.cache_manager
    return batches


def pictures(given: object, background: str) -> list[Image.Image]:
    """Images as one has them: PIL's, arrays [H, W, 3] or [B, H, W, 3] of uint8, paths, or several of these.

    Raises:
        UsageError: an item is not an image.
    """
    if isinstance(given, Image.Image):
        return [given if given.mode == "RGB" else decode_image(_png(given), "the image", background)]
    if isinstance(given, (str, Path)):
        try:
            return [decode_image(local_path(str(given)).read_bytes(), "the image", background)]
        except OSError as error:
            raise UsageError(f"the image cannot be read: {error.strerror}", where=given) from error
    if isinstance(given, np.ndarray):
        if given.dtype != np.uint8 or given.ndim not in (3, 4) or given.shape[-1] != 3:
            expected, found = "[H, W, 3] or [B, H, W, 3] of uint8", f"{list(given.shape)} of {given.dtype}"
            raise UsageError("the array is not an image", expected=expected, found=found)
        return [Image.fromarray(one) for one in (given if given.ndim == 4 else given[None])]
    if isinstance(given, Sequence):
        return [image for one in given for image in pictures(one, background)]
    raise UsageError("this is not an image", expected="a PIL image, an array or a path", found=type(given).__name__)


def _pixels(content: bytes, what: str) -> NDArray[np.uint8]:
    return np.asarray(decode_image(content, what, "#ffffff")).transpose(2, 0, 1)


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "png")
    return buffer.getvalue()


def _together(items: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [item.get(name) for item in items] for name in dict.fromkeys(name for item in items for name in item)}
