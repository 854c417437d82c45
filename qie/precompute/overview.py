"""What a precompute run is about to do, in a few lines, before it reads weights."""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Iterator, Sequence

from PIL import Image

from qie.config import Config
from qie.data.sources import Source
from qie.devices import resolve_device
from qie.errors import ModelError, QieError
from qie.families import Family
from qie.pretrained import PretrainedModel, read_json
from qie.quantities import human_bytes
from qie.recipe import choose_area
from qie.shards.discovery import published, rows_of
from qie.shards.grid import Range, count_within, merged_ranges
from qie.stores import Folder, LocalFolder

PROMPT_TOKENS = 100
"""Of a prompt and its template."""
USUAL_WIDTH = 4096


def overview_lines(
    config: Config, pretrained: PretrainedModel, source: Source, folder: Folder, rows: Range, workers: str | None
) -> Iterator[tuple[str, str]]:
    """A word and a text each: the source and its rows, the model and sizes, the devices, the output and its bytes.

    Args:
        config, source: of the run.
        pretrained: the model; its weights need not be there.
        folder: of the shards.
        rows: that the run is to encode.
        workers: the devices of several workers, or what else takes the place of those of the configuration.

    Raises:
        ConfigError: a device is not there.
        StoreError: the folder cannot be listed.
    """
    place = config.data.source
    named = f"{len(place)} sources" if isinstance(place, list) else place
    part = "" if rows == (0, len(source)) else f", of which this run takes [{rows[0]:,}, {rows[1]:,})"
    yield "source", f"{named}: {len(source):,} rows{part}"
    yield (
        "model",
        f"{config.model.pretrained_model_name_or_path} ({pretrained.family.name}); {_sizes(config, pretrained)}",
    )
    yield "devices", workers or _devices(config)
    yield "output", _output(config, pretrained, source, folder, rows)


def expected_bytes(config: Config, pretrained: PretrainedModel, source: Source, count: int) -> float:
    """About the size of the shards of so many rows, by the first row and the text encoder's width; 0: unknown."""
    family, cache, areas = pretrained.family, config.cache, _areas(config, pretrained.family)
    try:
        row = source.read(0)
    except (QieError, OSError, IndexError):
        return 0.0  # which is told where the row is needed
    sizes = [_area_of(image, areas) for image in (row.target, *row.controls)]
    paired = sizes[0] if row.rejected is not None else 0
    latents = (sum(sizes) + paired) / family.latent_scale**2 * family.latent_channels * 2
    fixed = config.data.text_area_px or family.text_area_px
    tokens = PROMPT_TOKENS + family.text_tokens(sum(fixed or size for size in sizes[1:]))
    text = tokens * _text_width(pretrained) * 2
    return count * cache.variants * (latents + text + (cache.thumbnail_px or 0) ** 2)  # a picture is a JPEG


def rows_there(folder: Folder, rows: Range) -> list[Range]:
    """Which of the rows are in shards, as ranges that rise and do not touch."""
    if isinstance(folder, LocalFolder) and not folder.root.is_dir():
        return []  # a file in its place is refused where the folder is made
    within = ((max(start, rows[0]), min(stop, rows[1])) for start, stop in map(rows_of, published(folder)))
    return merged_ranges((start, stop) for start, stop in within if start < stop)


def _area_of(image: bytes, areas: Sequence[int]) -> int:
    """The area that an image gets, of those that there are; of what is no image, the largest."""
    try:
        with Image.open(io.BytesIO(image)) as opened:
            return choose_area(opened.size, areas)
    except (OSError, ValueError, Image.DecompressionBombError):
        return max(areas)


def _areas(config: Config, family: Family) -> list[int]:
    area = config.data.area_px or family.area_px
    return [width * height for width, height in config.data.buckets_px] or (area if isinstance(area, list) else [area])


def _text_width(pretrained: PretrainedModel) -> int:
    try:
        values = read_json(pretrained.component("text_encoder") / "config.json")
    except ModelError:  # it is not downloaded yet
        return USUAL_WIDTH
    text = values.get("text_config") or values
    return int(text.get("hidden_size") or USUAL_WIDTH)


def _sizes(config: Config, pretrained: PretrainedModel) -> str:
    areas, text = _areas(config, pretrained.family), config.data.text_area_px or pretrained.family.text_area_px
    if config.data.buckets_px:
        return f"images of {len(areas)} sizes"
    sides = " or ".join(f"{math.sqrt(area):.0f}²" for area in areas[:3]) + (" or …" if len(areas) > 3 else "")
    return f"images of {sides} px" + (f", of {math.sqrt(text):.0f}² for the text encoder" if text else "")


def _devices(config: Config) -> str:
    keys = ("cache.vae_encoder_device", "cache.text_encoder_device")
    vae, text = (str(resolve_device(getattr(config.cache, key.partition(".")[2]), key)) for key in keys)
    return f"VAE and text encoder on {vae}" if vae == text else f"VAE on {vae}, text encoder on {text}"


def _output(config: Config, pretrained: PretrainedModel, source: Source, folder: Folder, rows: Range) -> str:
    total = rows[1] - rows[0]
    there = count_within(rows_there(folder, rows))
    parts = [f"{there:,} of {total:,} rows are there"] if there else []
    size = expected_bytes(config, pretrained, source, total - there) if there < total else None
    if size:
        parts.append(f"about {human_bytes(size)} to come")
    if isinstance(folder, LocalFolder):
        place = next(place for place in (folder.root, *folder.root.absolute().parents) if place.exists())
        free = shutil.disk_usage(place).free
        parts.append(f"{'only ' if free < (size or 0) else ''}{human_bytes(free)} free")
    return f"{folder}: {', '.join(parts)}"
