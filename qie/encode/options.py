"""The options of encoding, and the recipe that follows from them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qie.config import Config
from qie.devices import resolve_dtype
from qie.encode.another_vae import same_encoder
from qie.encode.images import MAX_IMAGE_PX, Size, resampling_digest
from qie.errors import ConfigError
from qie.families import Family, template_digest
from qie.pretrained import PretrainedModel, content_hash, processor_hash
from qie.recipe import ENCODING_VERSION, Recipe

HASHED = ("vae", "text_encoder", "tokenizer")
"""Components whose files are hashed for a recipe. The processor's hash is of its configuration alone."""


_CONFIG_KEYS = {
    "family": "model.family",
    "vae": "model.vae, or model.pretrained_model_name_or_path",
    "areas_px": "data.area_px",
    "buckets_px": "data.buckets_px",
    "text_area_px": "data.text_area_px",
    "multiple_px": "data.multiple_px",
    "background": "data.background",
    "vae_dtype": "cache.compute_dtype",
    "text_dtype": "cache.compute_dtype",
    "share_prefix": "cache.share_prefix",
    "batch_size": "cache.encode_batch_size",
    "compiled": "cache.compile",
    "thumbnail_px": "another release of qie",
    "storage_dtype": "another release of qie",
    "prompt_dtype": "another release of qie",
    "encoding_version": "another release of qie",
}


@dataclass(frozen=True)
class EncoderOptions:
    """None and auto stand for the family's and the machine's own values.

    Attributes:
        areas_px, buckets_px, text_area_px, multiple_px: sizes, see `Recipe`.
        background: colour behind transparent pixels.
        compute_dtype: name of a dtype; auto is bfloat16 on a GPU and float32 on the CPU.
        share_prefix: prompts continue on a pass over the images alone; see `PromptEncoder.encode`.
        batch_size: rows per batch of the encoders.
        compiled: the VAE runs through torch.compile.
        thumbnail_px: longest side of the pictures stored with a sample; None for none.
        compare_pairs: measure how each target lies on its control.
        max_image_px: limit of an image.

    The last three are no part of the recipe, since they change no tensor.
    """

    areas_px: tuple[int, ...] | None = None
    buckets_px: tuple[Size, ...] = ()
    text_area_px: int | None = None
    multiple_px: int | None = None
    background: str = "#ffffff"
    compute_dtype: str = "auto"
    share_prefix: bool = False
    batch_size: int = 1
    compiled: bool = False
    thumbnail_px: int | None = None
    compare_pairs: bool = True
    max_image_px: int = MAX_IMAGE_PX

    @classmethod
    def of(cls, config: Config) -> EncoderOptions:
        """The options in sections data and cache of a configuration."""
        data, cache = config.data, config.cache
        areas = [data.area_px] if isinstance(data.area_px, int) else data.area_px
        return cls(
            areas_px=None if areas is None else tuple(areas),
            buckets_px=tuple((width, height) for width, height in data.buckets_px),
            text_area_px=data.text_area_px,
            multiple_px=data.multiple_px,
            background=data.background,
            compute_dtype=cache.compute_dtype,
            share_prefix=cache.share_prefix,
            batch_size=cache.encode_batch_size,
            compiled=cache.compile,
            thumbnail_px=cache.thumbnail_px,
            max_image_px=data.max_image_px,
        )


def make_recipe(
    pretrained: PretrainedModel, options: EncoderOptions, vae_device: torch.device, text_device: torch.device
) -> Recipe:
    """The recipe of encoding with a model; its files are hashed, in parallel."""
    components = [encoding_folder(pretrained, name) for name in HASHED]
    with ThreadPoolExecutor() as pool:
        vae, text_encoder, tokenizer = pool.map(content_hash, components)
    return Recipe(
        **_chosen(pretrained.family, options),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        processor=processor_hash(pretrained),
        vae_dtype=resolve_dtype(options.compute_dtype, vae_device),
        text_dtype=resolve_dtype(options.compute_dtype, text_device),
        resampling=resampling_digest(),
    )


def encoding_folder(pretrained: PretrainedModel, name: str) -> Path:
    """The folder whose content stands for a component in a recipe.

    Of another VAE that encodes as the model's own does, and only decodes otherwise, it is that of the model's own: they
    give the same latents.
    """
    folder, own = pretrained.component(name), replace(pretrained, vae=None)
    if name == "vae" and own != pretrained and own.holds(name) and same_encoder(folder, own.component(name)):
        return own.component(name)
    return folder


def config_key(field: str) -> str:
    """The key of the configuration that decides a field of the recipe."""
    return _CONFIG_KEYS.get(field, "model.pretrained_model_name_or_path")


def known_fields(pretrained: PretrainedModel, options: EncoderOptions) -> dict[str, Any]:
    """The fields of the recipe that are the same on every machine, as far as this one knows them.

    The encoding machine decides the others: how its image library resizes, and precisions that are `auto`. The hashes
    of components that the model lacks are left out, too: training on shards needs no encoders.
    """
    known = _chosen(pretrained.family, options) | {"storage_dtype": "float16", "encoding_version": ENCODING_VERSION}
    if options.compute_dtype != "auto":
        known |= {"vae_dtype": options.compute_dtype, "text_dtype": options.compute_dtype}
    known |= {name: content_hash(encoding_folder(pretrained, name)) for name in HASHED if pretrained.holds(name)}
    if pretrained.holds("processor"):
        known["processor"] = processor_hash(pretrained)
    return known


def _chosen(family: Family, options: EncoderOptions) -> dict[str, Any]:
    """The fields that follow from the family and the options alone. Raises ConfigError for sizes that do not fit it."""
    _require_fitting(family, options)
    return {
        "family": family.name,
        "areas_px": () if options.buckets_px else options.areas_px or (family.area_px,),
        "buckets_px": options.buckets_px,
        "text_area_px": options.text_area_px or family.text_area_px,
        "multiple_px": options.multiple_px or family.multiple_px,
        "background": options.background,
        "template": template_digest(family),
        "share_prefix": options.share_prefix,
        "batch_size": options.batch_size,
        "compiled": options.compiled,
        "prompt_dtype": None if family.prompt_dtype == "float16" else family.prompt_dtype,
    }


def _require_fitting(family: Family, options: EncoderOptions) -> None:
    """A token of the text encoder stands for 2×2 of an interleaved family's latent pixels: both get one image."""
    if not family.interleaved:
        return
    odd = [side for size in options.buckets_px for side in size if side % family.multiple_px]
    if options.multiple_px is not None and options.multiple_px % family.multiple_px:
        odd.append(options.multiple_px)
    if odd:
        raise ConfigError(
            f"{family.title} takes images whose sides are multiples of {family.multiple_px}",
            where="data.buckets_px" if options.buckets_px else "data.multiple_px",
            found=odd[0],
        )
    if options.text_area_px is not None:
        raise ConfigError(
            f"{family.title} gets one image for both encoders",
            where="data.text_area_px",
            expected="null",
            found=options.text_area_px,
            hint="set data.area_px",
        )
