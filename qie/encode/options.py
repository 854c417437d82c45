"""What a user may choose of the encoding, and the recipe that follows from it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from qie.devices import resolve_dtype
from qie.encode.images import MAX_IMAGE_PX, resampling_digest
from qie.encode.sizes import Size
from qie.pretrained import PretrainedModel, content_hash, processor_hash
from qie.recipe import ENCODING_VERSION, Family, Recipe, template_digest

HASHED = ("vae", "text_encoder", "tokenizer")
"""Components whose files' hashes are in a recipe; of the processor it is what its configuration says."""


@dataclass(frozen=True)
class EncoderOptions:
    """None and auto are the family's and the machine's own.

    Attributes:
        areas_px, buckets_px, text_area_px, multiple_px: sizes, see `Recipe`.
        background: colour that transparent images are laid on.
        compute_dtype: name of a dtype; auto is bfloat16 on a GPU and float32 on the CPU.
        share_prefix: prompts continue on a pass over the images alone; see `PromptEncoder.encode`.
        batch_size: rows that are encoded together.
        compiled: the VAE runs through torch.compile.
        thumbnail_px: longest side of the picture that is stored with a sample; None for no picture.
        max_image_px: larger images are refused; not part of the recipe, since it changes no tensor.
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
    max_image_px: int = MAX_IMAGE_PX


def make_recipe(
    pretrained: PretrainedModel, options: EncoderOptions, vae_device: torch.device, text_device: torch.device
) -> Recipe:
    """The recipe of encoding with a model; its files are hashed, in parallel."""
    components = [pretrained.component(name) for name in HASHED]
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


def known_fields(pretrained: PretrainedModel, options: EncoderOptions) -> dict[str, Any]:
    """The fields that the recipe has wherever rows are encoded, as far as they can be known here.

    Left out are what the encoding machine decides (how its image library resizes, and precisions that are `auto`), and
    the hashes of components that the model lacks: where models are trained on shards it needs no encoders.
    """
    known = _chosen(pretrained.family, options) | {"storage_dtype": "float16", "encoding_version": ENCODING_VERSION}
    if options.compute_dtype != "auto":
        known |= {"vae_dtype": options.compute_dtype, "text_dtype": options.compute_dtype}
    known |= {name: content_hash(pretrained.component(name)) for name in HASHED if pretrained.holds(name)}
    if pretrained.holds("processor"):
        known["processor"] = processor_hash(pretrained)
    return known


def _chosen(family: Family, options: EncoderOptions) -> dict[str, Any]:
    """The fields that follow from the family and the options alone."""
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
        "thumbnail_px": options.thumbnail_px,
    }
