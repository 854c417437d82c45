"""Sections that say what the data is and how it is encoded: data and cache."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from qie.config.section import Batch, Bytes, Count, CountOrZero, Fraction, LocalPath, Place, Section, word

MAX_AREA_PX = 178_956_970
"""Of an image that is read, and of what a model may see: what Pillow takes."""

Pixels = Annotated[int, Field(gt=0, le=MAX_AREA_PX)]
Side = Annotated[int, Field(gt=0, le=MAX_AREA_PX, multiple_of=16)]
Area = Pixels | list[Pixels] | None

USUAL_AREA_PX = 256 * 256
"""Whoever gives a smaller area has more often given a side."""


def _usual(area: Area, info: ValidationInfo) -> Area:
    """For an area in pixels: it is small only where section data says so."""
    for one in area if isinstance(area, list) else [area]:
        if one is not None and one < USUAL_AREA_PX and not info.data.get("allow_tiny"):
            usual = USUAL_AREA_PX <= one * one <= MAX_AREA_PX
            side = f", such as {one * one} for a side of {one}" if usual else ""
            raise ValueError(
                f"an area of at least {USUAL_AREA_PX} pixels{side}; data.allow_tiny: true takes smaller ones"
            )
    return area


def _size(sides: list[int]) -> list[int]:
    if math.prod(sides) > MAX_AREA_PX or max(sides) > 200 * min(sides):
        raise ValueError(f"at most {MAX_AREA_PX} pixels, and sides of at most 1:200")
    return sides


def _colour(text: str) -> str:
    from PIL import ImageColor

    try:
        ImageColor.getrgb(text)
    except ValueError as error:
        raise ValueError("a colour, such as #ffffff or white") from error
    return text


class SourceConfig(Section):
    """One of several sources."""

    source: Place = Field(description="Rows: whatever qie.open_source understands.")
    name: str | None = Field(None, description="In messages and indexes; default: the last part of the path.")
    weight: float = Field(
        1.0, ge=1e-6, le=1000, description="How often its rows are drawn in training, against the others'."
    )


class AugmentConfig(Section):
    """What further variants of a row are made of; see cache.variants. Target, controls and mask alike."""

    flip: bool = Field(False, description="Mirrored, left to right, by chance.")
    crop: float = Field(1.0, ge=0.01, le=1.0, description="Cropped to between this part of each side and all of it.")


class DataConfig(Section):
    """Rows, and how they are dealt into batches."""

    source: Place | list[SourceConfig] | None = Field(
        None,
        description="Rows, for qie-precompute and for live encoding: whatever qie.open_source understands, or several.",
    )
    batch_size: Batch = Field(1, description="Per process.")
    tail: Literal["pad", "drop"] = Field("pad", description="The last, incomplete batch of each shape.")
    caption_dropout_rate: Fraction = Field(0.0, description="How often the null prompt replaces the prompt.")
    control_dropout_rate: Fraction = Field(
        0.0, description="How often zeros replace the latents of all controls; what Qwen2.5-VL saw of them stays."
    )
    allow_tiny: bool = Field(
        False, description="Areas may be below 65536, 256 × 256: what a model can hardly learn from."
    )
    area_px: Annotated[Area, AfterValidator(_usual)] = Field(
        None,
        description="Image area for the VAE; of a list, the largest that does not enlarge. null: the family's own.",
    )
    buckets_px: list[Annotated[list[Side], Field(min_length=2, max_length=2), AfterValidator(_size)]] = Field(
        [], description="Fixed sizes [width, height] instead of areas: the nearest in shape, after cropping to it."
    )
    text_area_px: Annotated[Pixels | None, AfterValidator(_usual)] = Field(
        None, description="Image area for Qwen2.5-VL; null is the family's own (edit: the VAE's image)."
    )
    multiple_px: Literal[16, 32, 64] | None = Field(None, description="Sizes by area are multiples of it; null: 32.")
    background: Annotated[str, AfterValidator(_colour)] = Field(
        "#ffffff", description="Colour behind transparent images."
    )
    augment: AugmentConfig = AugmentConfig()
    order: Literal["shuffle", "blocks"] = Field(
        "shuffle",
        description="blocks: shuffled within block_size shards at a time, for stores that are slow at random.",
    )
    block_size: Count = Field(16, description="Shards in a block.")
    similar_lengths: CountOrZero = Field(
        64, description="So many batches of a shape are filled by prompt length, so that they pad little; 0: none."
    )
    prefetch: int = Field(2, gt=0, le=1024, description="Batches prepared ahead.")
    reader_threads: int = Field(
        2, gt=0, le=1024, description="How many are prepared at once; live encoding takes one more."
    )
    max_image_px: Pixels = Field(
        MAX_AREA_PX, description="Larger images are refused; Pillow takes none above the default."
    )

    @model_validator(mode="after")
    def _check_sizes(self) -> DataConfig:
        if self.buckets_px and self.area_px is not None:
            raise ValueError("area_px and buckets_px exclude each other")
        if self.area_px == []:
            raise ValueError("area_px is an empty list")
        return self


class KeepConfig(Section):
    """What of the samples stays in memory after its first use, for datasets that fit."""

    latents: Literal["none", "cpu", "gpu"] = Field("none", description="Where latents, of targets and controls, stay.")
    embeds: Literal["none", "cpu", "gpu"] = Field("none", description="Where prompts' embeddings stay.")
    budget_bytes: Bytes = Field(8 * 10**9, description="Altogether; what comes when it is spent is not kept.")


class CacheConfig(Section):
    """Shards, and the encoders that fill them."""

    cache_dir: Place | None = Field(None, description="qie-precompute writes here, qie-train reads here; path or URL.")
    use_cache: bool = Field(
        True,
        description="Train on the shards in cache_dir; what they lack of data.source is encoded live. false: all.",
    )
    trust_published: bool = Field(
        False, description="Train on shards as they are: do not read the rows of data.source to compare them."
    )
    accept_recipe: bool = Field(
        False, description="Train on shards of another recipe than this configuration's, as they are; run.json says so."
    )
    vae_encoder_device: str = Field("auto", description="auto is the process's own GPU, or the CPU without one.")
    text_encoder_device: str = Field("auto", description="auto is the process's own GPU, or the CPU without one.")
    compute_dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="auto is bfloat16 on a GPU and float32 on the CPU."
    )
    encode_batch_size: Batch = Field(
        1, description="Rows encoded together. Above 1, the last bits of a sample depend on its neighbours."
    )
    variants: int = Field(
        1,
        gt=0,
        le=1000,
        description="Variants of a row at most: its captions and, with data.augment, augmented ones. One per epoch.",
    )
    share_prefix: bool = Field(
        False, description="Rows with the same controls share their pass through Qwen2.5-VL; about 1e-6 from exact."
    )
    compile: bool = Field(False, description="Run the VAE through torch.compile.")
    thumbnail_px: Annotated[int, Field(ge=16, le=512)] | None = Field(
        None,
        description="Longest side of a small picture of the target, stored with each sample for qie-stats --html; "
        "null: none. 96 takes up to 28 kB.",
    )
    verify: Annotated[Literal["off", "first", "always"], word("off")] = Field(
        "first", description="When a record is checked against its hash: never, when first read, or always."
    )
    local_dir: LocalPath | None = Field(
        None, description="Keep shards from URLs in this folder, for all processes here."
    )
    local_bytes: Bytes = Field(100 * 10**9, description="How much of them; what was used longest ago goes first.")
    keep: KeepConfig = KeepConfig()
    write_through: bool = Field(
        False, description="Encoding live, write the shards to cache_dir in the first epoch and train on them then on."
    )
    follow_timeout_s: float = Field(
        3600.0, gt=0.0, le=1e7, description="How long to wait for the next shard with --follow."
    )
