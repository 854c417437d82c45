"""What a user may choose of the encoding, and the recipe that follows from it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from qie.devices import resolve_dtype
from qie.encode.images import MAX_IMAGE_PX, resampling_digest
from qie.encode.sizes import Size
from qie.pretrained import Checkpoint, content_hash, processor_hash
from qie.recipe import Recipe, template_digest


@dataclass(frozen=True)
class EncoderOptions:
    """None and auto are the family's and the machine's own.

    Attributes:
        areas_px, buckets_px, text_area_px, multiple_px: sizes, see `Recipe`.
        background: colour that transparent images are laid on.
        compute_dtype: name of a dtype; auto is bfloat16 on a GPU and float32 on the CPU.
        continued: prompts continue on a pass over the images alone; see `PromptEncoder.encode`.
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
    continued: bool = False
    batch_size: int = 1
    compiled: bool = False
    thumbnail_px: int | None = None
    max_image_px: int = MAX_IMAGE_PX


def make_recipe(
    checkpoint: Checkpoint, options: EncoderOptions, vae_device: torch.device, text_device: torch.device
) -> Recipe:
    """The recipe of encoding with a checkpoint; its files are hashed, in parallel."""
    family = checkpoint.family
    components = [checkpoint.component(name) for name in ("vae", "text_encoder", "tokenizer")]
    with ThreadPoolExecutor() as pool:
        vae, text_encoder, tokenizer = pool.map(content_hash, components)
    return Recipe(
        family=family.name,
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        processor=processor_hash(checkpoint),
        areas_px=() if options.buckets_px else options.areas_px or (family.area_px,),
        buckets_px=options.buckets_px,
        text_area_px=options.text_area_px or family.text_area_px,
        multiple_px=options.multiple_px or family.multiple_px,
        background=options.background,
        vae_dtype=resolve_dtype(options.compute_dtype, vae_device),
        text_dtype=resolve_dtype(options.compute_dtype, text_device),
        template=template_digest(family),
        resampling=resampling_digest(),
        continued=options.continued,
        batch_size=options.batch_size,
        compiled=options.compiled,
        thumbnail_px=options.thumbnail_px,
    )
