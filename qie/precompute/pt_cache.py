"""A cache directory of qwen-image-finetune (github.com/TsienDragon/qwen-image-finetune) as rows of shards.

That project's EmbeddingCacheManager writes one tensor per file, CACHE/<tensor>/<hash>.pt, without batch axis, and for
each row a JSON object with the hash of each of its tensors: CACHE/metadata/<hash>.json, or CACHE/<hash>_metadata.json
in earlier releases. The first releases wrote no such object, and named a file by a hash of its image's path and time
and of the prompt.

Nothing in a file is executed: it is read as tensors, or refused.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from qie.errors import RowError, UsageError
from qie.families import FAMILIES
from qie.precompute.reshard import require_own
from qie.recipe import Recipe, normal_prompt
from qie.shards.discovery import published
from qie.shards.grid import shard_ranges
from qie.shards.index import Entry, Skipped, read_index
from qie.shards.record import encode
from qie.shards.tensors import to_storage
from qie.shards.writer import ShardWriter
from qie.stores import Folder
from qie.types import Row, Sample

TENSORS = {
    "pixel_latent": ("image_latents", "image_latent", "pixel_latent"),
    "control_latent": ("control_latents", "control_latent"),
    "prompt_embed": ("prompt_embeds", "prompt_embed"),
    "prompt_embeds_mask": ("prompt_embeds_mask",),
    "empty_prompt_embed": ("empty_prompt_embeds", "empty_prompt_embed"),
    "empty_prompt_embeds_mask": ("empty_prompt_embeds_mask",),
}
"""Our names, and those of the cache: the latest first."""
EMBEDS = ("prompt_embed", "empty_prompt_embed")
NULL_PROMPT = ("empty_prompt_embed", "empty_prompt_embeds_mask")
IMPORTED = "imported from qwen-image-finetune"
TARGET_FOLDERS = ("training_images", "images", "target_images")
CONTROL_FOLDERS = ("control_images", "control", "condition_images")
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp")
"""What the first releases looked for in a dataset, in this order."""
PATCH_PX = 16
"""Pixels to a token's side: the VAE makes 8 of them one, packing two of those."""

TokenGrid = tuple[int, int]
"""Height and width in tokens."""


@dataclass(frozen=True)
class CachedRow:
    """What the cache says of a row.

    Attributes:
        name: of its metadata, or of its files.
        files: the cache's own name of a tensor -> its file.
        img_shapes: as in the metadata.
        prompt: its text; None if unknown.
        fault: why there is nothing else.
    """

    name: str
    files: dict[str, Path] = field(default_factory=dict)
    img_shapes: Any = None
    prompt: str | None = None
    fault: str | None = None


@dataclass(frozen=True)
class CacheReader:
    """Makes samples of what is cached.

    Attributes:
        recipe: which the samples are said to follow.
        sizes: of target and controls where the cache does not say; empty if unknown.
    """

    recipe: Recipe
    sizes: tuple[TokenGrid, ...]

    def sample(self, cached: CachedRow) -> Sample:
        """Raises RowError, with the reason in one line, when the row is to be refused."""
        if cached.fault:
            raise RowError(cached.fault)
        stored = [to_storage(values, what) for what, values in self._tensors(cached)]
        pixel, *controls, prompt, empty = (one.values for one in stored)
        shared = shared_prefix(prompt, empty)
        unknown = {"the prompt's text is unknown": cached.prompt is None, "there is no null prompt": not len(empty)}
        return Sample(
            key=self._key([pixel, *controls, prompt, empty]),
            prompt=normal_prompt(cached.prompt or ""),
            pixel_latent=pixel,
            control_latent=tuple(controls),
            prompt_embed=prompt,
            prompt_embeds_mask=torch.ones(len(prompt), dtype=torch.bool),
            empty_tail=empty[shared:],
            empty_prompt_embeds_mask=torch.ones(len(empty), dtype=torch.bool),
            shared_prefix=shared,
            clipped=sum(one.clipped for one in stored),
            notes=tuple(f"{IMPORTED}: {note}" for note, holds in unknown.items() if holds),
        )

    def _tensors(self, cached: CachedRow) -> Iterator[tuple[str, torch.Tensor]]:
        """The target's latent, the controls', the prompt's embedding, the null prompt's: of no tokens without one."""
        absent = () if any(name in cached.files for kind in NULL_PROMPT for name in TENSORS[kind]) else NULL_PROMPT
        found = {name: _find(cached, names) for name, names in TENSORS.items() if name not in absent}
        target, *controls = self._sizes(cached)
        most = FAMILIES[self.recipe.family].max_controls
        if not controls or (most is not None and len(controls) > most):
            raise RowError(f"it has {len(controls)} controls, which {self.recipe.family} does not take")
        for name, sizes in (("pixel_latent", [target]), ("control_latent", controls)):
            yield from ((name, latent) for latent in _unpack(found[name], sizes, name))
        embeds = [_unpadded(found[name], found[f"{name}s_mask"], name) for name in EMBEDS if name in found]
        embeds += [embeds[0][:0]] if absent else []
        if len({embed.shape[1] for embed in embeds}) > 1:
            raise RowError(f"{' and '.join(EMBEDS)} have other widths")
        yield from zip(EMBEDS, embeds, strict=True)

    def _sizes(self, cached: CachedRow) -> tuple[TokenGrid, ...]:
        shapes = cached.img_shapes
        if "img_shapes" in cached.files:
            shapes = _load(cached.files["img_shapes"]).tolist()
        if shapes is None and not self.sizes:
            raise RowError("its images' sizes are not in the cache; give --size and --control-size")
        return self.sizes if shapes is None else _parse_shapes(shapes)

    def _key(self, tensors: Sequence[torch.Tensor]) -> str:
        lines = [self.recipe.full_digest]
        lines += [f"{list(one.shape)} {hashlib.sha256(one.contiguous().numpy().data).hexdigest()}" for one in tensors]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def imported_recipe(family: str, model: str) -> Recipe:
    """A recipe of which no field says more than is known; that of two models differs if they are named."""
    unknown = f"{IMPORTED}, {model}"
    return Recipe(
        family=family,
        vae=unknown,
        text_encoder=unknown,
        tokenizer=unknown,
        processor=unknown,
        areas_px=(),
        text_area_px=None,
        vae_dtype="unknown",
        text_dtype="unknown",
        template=unknown,
        resampling=unknown,
        multiple_px=PATCH_PX,
        background="unknown",
        encoding_version=0,
    )


# The cache's files


def cached_rows(cache: Path) -> list[CachedRow]:
    """Every row of a cache, by name. Raises UsageError when it is none."""
    metadata = sorted(cache.glob("metadata/*.json")) or sorted(cache.glob("*_metadata.json"))
    if metadata:
        return [_described(cache, path) for path in metadata]
    # A folder without tensors is one of a later release's, which makes them all when it opens a cache.
    kinds = {path.parent.name for path in cache.glob("*/*.pt")}
    first = next((name for name in TENSORS["pixel_latent"] if name in kinds), None)
    stems = sorted(path.stem for path in (cache / first).glob("*.pt")) if first else []
    if not stems:
        raise UsageError(
            "this is no cache of qwen-image-finetune",
            where=cache,
            expected="metadata/<hash>.json and <tensor>/<hash>.pt",
            found=", ".join(sorted(kinds)[:6]) or "no folders",
        )
    return [CachedRow(stem, {kind: cache / kind / f"{stem}.pt" for kind in kinds}) for stem in stems]


def named_by_images(cache: Path, dataset: str) -> list[CachedRow]:
    """The rows of a cache without metadata, by the images and captions that they were made of."""
    root = dataset if dataset.endswith("/") else f"{dataset}/"  # as it was written: a Path would be without ./
    targets, controls = (
        next((f"{root}{name}/" for name in names if Path(root, name).is_dir()), None)
        for names in (TARGET_FOLDERS, CONTROL_FOLDERS)
    )
    if targets is None or controls is None:
        expected = f"{'|'.join(TARGET_FOLDERS)} and {'|'.join(CONTROL_FOLDERS)}"
        raise UsageError("this is not a dataset of qwen-image-finetune", where=dataset, expected=expected)
    rows = []
    for image in sorted(Path(targets).iterdir()):
        caption, beside = image.with_suffix(".txt"), (f"{controls}{image.stem}{end}" for end in SUFFIXES)
        control = next((path for path in beside if Path(path).is_file()), None)
        if image.suffix in SUFFIXES and control and caption.is_file():  # they passed over all others, too
            prompt = caption.read_text(encoding="utf-8", errors="replace").strip()
            target = f"{targets}{image.name}"
            hashes = {"pixel_latent": _old_hash(target), "control_latent": _old_hash(control)}
            hashes |= dict.fromkeys(("prompt_embed", "prompt_embeds_mask"), _old_hash(target, prompt))
            if any((cache / NULL_PROMPT[0]).glob("*.pt")):
                hashes |= dict.fromkeys(NULL_PROMPT, _old_hash(target, "empty"))
            files = {kind: cache / kind / f"{digest}.pt" for kind, digest in hashes.items()}
            rows.append(CachedRow(image.stem, files, prompt=prompt))
    return rows


def _old_hash(path: str, prompt: str = "") -> str:
    """By what the first releases found a tensor."""
    text = f"{path}_{Path(path).stat().st_mtime}_{prompt}"
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def _described(cache: Path, path: Path) -> CachedRow:
    """The row of a metadata file."""
    name = path.stem.removesuffix("_metadata")
    try:
        said = json.loads(path.read_bytes())
        shapes = said.pop("img_shapes", None)
        hashes = {kind: said[kind] for kind in said if kind != "version"}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        return CachedRow(name, fault=f"{path.relative_to(cache)} is no metadata: {type(error).__name__}")
    if isinstance(shapes, str):  # a hash, like the others: then it is a tensor
        hashes["img_shapes"], shapes = shapes, None
    odd = [text for pair in hashes.items() for text in pair if not re.fullmatch(r"[\w-]+", str(text), re.ASCII)]
    if odd:
        fault = f"{path.relative_to(cache)} names a file that cannot be the cache's: {odd[0]!r:.100}"
        return CachedRow(name, fault=fault)
    return CachedRow(name, {kind: cache / kind / f"{value}.pt" for kind, value in hashes.items()}, shapes)


def _find(cached: CachedRow, names: Sequence[str]) -> torch.Tensor:
    """A tensor by any of its names."""
    for name in names:
        if name in cached.files:
            return _load(cached.files[name])
    raise RowError(f"it has no {names[0]}")


def _load(path: Path) -> torch.Tensor:
    """The tensor in a file, mapped where that is possible. Whatever else is in it is refused, and not executed."""
    place = f"{path.parent.name}/{path.name}"
    if not path.is_file():
        raise RowError(f"{place} is missing")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # whatever content makes the loader raise is a fault of that content
        code = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise RowError(
            f"{place} asks to run {code[1]}, which was not done"
            if code
            else f"{place} holds no tensor that can be read"
        ) from error
    plain = isinstance(loaded, torch.Tensor) and loaded.layout == torch.strided and loaded.device.type == "cpu"
    # Contiguous: a few bytes may claim to be a tensor of any size by saying that all its values are the same one.
    if not plain or loaded.is_quantized or loaded.is_complex() or not loaded.is_contiguous():
        raise RowError(f"{place} holds no plain tensor")
    values: torch.Tensor = loaded.detach()
    return values


# From their tensors to ours


def _parse_shapes(shapes: Any) -> tuple[TokenGrid, ...]:
    """`img_shapes`, target first: [1, height, width] in tokens or [3, height, width] in pixels; with a batch axis or
    without."""
    units = {1: 1, 3: PATCH_PX}
    try:
        if len(shapes) == 1:
            [shapes] = shapes
        sizes = tuple((int(height) // units[kind], int(width) // units[kind]) for kind, height, width in shapes)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise RowError("its img_shapes are malformed") from error
    if any(side < 1 for size in sizes for side in size) or not sizes:
        raise RowError("its img_shapes are malformed")
    return sizes


def _unpack(packed: torch.Tensor, sizes: Sequence[TokenGrid], what: str) -> list[torch.Tensor]:
    """[L, 4 C], images one behind the other -> [C, 1, H, W] each, as diffusers' `_unpack_latents` does."""
    packed = _without_batch(packed, 2, what)
    counts = [height * width for height, width in sizes]
    if sum(counts) != len(packed) or packed.shape[1] != 64:
        due = " + ".join(f"{width * PATCH_PX}×{height * PATCH_PX}" for height, width in sizes)
        raise RowError(f"{what} is {list(packed.shape)}, which is not {due} px packed to 64 channels")
    parts = torch.split(packed, counts)
    return [
        part.view(height, width, 16, 2, 2).permute(2, 0, 3, 1, 4).reshape(16, 1, 2 * height, 2 * width)
        for part, (height, width) in zip(parts, sizes, strict=True)
    ]


def _unpadded(embed: torch.Tensor, mask: torch.Tensor, what: str) -> torch.Tensor:
    """[L, D] without the padding after it."""
    embed, mask = _without_batch(embed, 2, what), _without_batch(mask, 1, f"{what}'s mask")
    length = int(mask.bool().sum())  # as bool: FP16, in which masks are cached, counts to 2048
    due = torch.arange(len(mask)) < length
    if length < 1 or len(mask) != len(embed) or not torch.equal(mask.float(), due.float()):
        raise RowError(f"{what}'s mask is not that of {len(embed)} tokens followed by padding")
    return embed[:length]


def _without_batch(tensor: torch.Tensor, rank: int, what: str) -> torch.Tensor:
    tensor = tensor[0] if tensor.ndim == rank + 1 and len(tensor) == 1 else tensor
    if tensor.ndim != rank:
        raise RowError(f"{what} is {list(tensor.shape)}, expected {rank} dimensions")
    return tensor


def shared_prefix(prompt: torch.Tensor, empty: torch.Tensor) -> int:
    """In how many leading tokens both embeddings agree, bit for bit."""
    length = min(len(prompt), len(empty))
    same = (prompt[:length].view(torch.int16) == empty[:length].view(torch.int16)).all(1)
    return int(same.long().cumprod(0).sum())


# Into shards


def write_cached(
    output: Folder, rows: Sequence[CachedRow], reader: CacheReader, size: int
) -> Iterator[Skipped | Entry]:
    """Write shards of `size` rows; yields what each row became."""
    ranges = shard_ranges(0, len(rows), size, ())
    require_own(output, ranges)
    for index in published(output)[:1]:
        reader.recipe.require_equal(read_index(index).recipe, index, "name an empty folder")
    for start, stop in ranges:
        with ShardWriter(output, start, stop, reader.recipe) as shard:
            for number, cached in enumerate(rows[start:stop], start):
                try:
                    sample = reader.sample(cached)
                except RowError as error:
                    skipped = Skipped(number, cached.name, error.what)
                    shard.skip(skipped)
                    yield skipped
                else:
                    entry = Entry.of(sample, Row(number, cached.name, b"", (), ""))
                    shard.add(entry, encode(sample, reader.recipe.digest))
                    yield entry
            shard.publish()


def unused_files(cache: Path, rows: Sequence[CachedRow]) -> int:
    """How many files of a cache belong to no row."""
    used = {path for row in rows for path in row.files.values()}
    return sum(path not in used for path in cache.glob("*/*.pt"))
