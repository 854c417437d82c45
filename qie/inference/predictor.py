"""Generating images: diffusers' own pipeline, with qie's embeddings."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import isqrt
from typing import Any

import diffusers
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from diffusers import AutoencoderKLQwenImage, DiffusionPipeline
from PIL import Image

from qie.config import AdapterConfig, Quantization
from qie.encode import Encoder
from qie.encode.encoder import Picture, text_room
from qie.encode.images import Size, View, apply_view, choose_view, on_background
from qie.errors import QieError, RowError, one_line
from qie.families import FAMILIES, NULL_PROMPT, Family
from qie.inference.pipelines import make_pipeline, sized_as_given, sized_by_area
from qie.inference.requests import Sampling, check_alpha, check_controls
from qie.pretrained import PretrainedModel, loading
from qie.recipe import Recipe, choose_area
from qie.training.model.load import load_transformer
from qie.training.model.lora import add_frozen_adapters
from qie.types import Shape


@dataclass(frozen=True, eq=False)
class Conditions:
    """The conditions of one image to generate, its prompts embedded: they need no encoder any more.

    Attributes:
        images: upright controls; RGBA where the family takes alpha, and RGB otherwise.
        area_px: area of the generated image.
        prompt, negative: embeddings, [L, D], in host memory; without `negative` there is no guidance. Of text alone
            where the transformer puts controls among its tokens.
        placed: where it does so; None for other families.
    """

    images: tuple[Image.Image, ...]
    area_px: int
    prompt: torch.Tensor
    negative: torch.Tensor | None
    placed: Placed | None = None


@dataclass(frozen=True)
class Placed:
    """Controls among the tokens of a text.

    Attributes:
        slots: for each control, how many tokens of text stand before it.
        views: what the model gets of each.
        size: of the generated image, in pixels.
    """

    slots: tuple[int, ...]
    views: tuple[View, ...]
    size: Size

    def spread(self, text: torch.Tensor, slot_px: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings [L, D] of text, with zeros where the controls stand, and which of the tokens are text.

        The transformer puts latents there, whatever the embeddings say. A slot is `slot_px` pixels wide and high.
        """
        counts = [view.size[0] * view.size[1] // slot_px**2 for view in self.views]
        is_text = torch.ones(len(text) + sum(counts), dtype=torch.bool)
        for slot, before, count in zip(self.slots, accumulate(counts, initial=0), counts, strict=False):
            is_text[slot + before : slot + before + count] = False
        embeds = text.new_zeros(len(is_text), text.shape[1])
        embeds[is_text] = text
        return embeds, is_text


def embed_conditions(
    encoder: Encoder, images: Sequence[Image.Image], prompt: str, negative_prompt: str | None
) -> Conditions:
    """Images and prompts, embedded. A negative prompt of None means no guidance.

    Raises:
        UsageError: the family does not take so many images.
        RowError: a prompt contains a special token, or is too long, or the text encoder resizes an image.
    """
    recipe, family = encoder.recipe, FAMILIES[encoder.recipe.family]
    check_controls(family, len(images))
    pictures = [Picture.of(image, recipe) for image in images]
    sizes = tuple(picture.latent_size(recipe) for picture in pictures)
    texts = [text for text in (prompt, negative_prompt) if text is not None]
    if family.interleaved:
        encoder.require_slots(pictures)
        found = [encoder.embed_whole(images, text) for text in texts]
        embeds = [one.of_text()[0].cpu() for one in found]
        width, height = size = pictures[-1].view.size if pictures else size_of_text_alone(recipe)
        placed = Placed(found[0].image_slots, tuple(picture.view for picture in pictures), size)
        area_px, shape = width * height, Shape((0, 0), sizes)
    else:
        # The pipelines take the proportions of the first (edit) or last control.
        shaping = pictures[0] if family.max_controls == 1 else pictures[-1]
        width, height = shaping.view.size
        area_px = choose_area(shaping.image.size, recipe.areas_px) if recipe.areas_px else width * height
        embeds, placed, shape = [encoder.embed(images, text).cpu() for text in texts], None, Shape(sizes[0], sizes)
    _check_room(embeds, family, shape)
    return Conditions(tuple(images), area_px, embeds[0], embeds[1] if len(embeds) > 1 else None, placed)


def size_of_text_alone(recipe: Recipe) -> Size:
    """The size of an image that has no control to take it from: that of a square of the family's area."""
    side = isqrt(FAMILIES[recipe.family].area_px)
    return choose_view((side, side), recipe.areas_px, recipe.buckets_px, recipe.multiple_px).size


def _check_room(embeds: Iterable[torch.Tensor], family: Family, shape: Shape) -> None:
    room = text_room(family, shape)
    for embed in embeds:
        if len(embed) > room:
            expected = f"at most {room} tokens{'' if family.interleaved else ', images included'}"
            raise RowError("the prompt is too long", expected=expected, found=len(embed))


def generate(
    pipeline: DiffusionPipeline,
    conditions: Conditions,
    *,
    steps: int,
    cfg: float,
    seed: int,
    size: Size | None = None,
    sigmas: Sequence[float] | None = None,
    alpha: bool = False,
    on_step: Callable[[int], object] = lambda step: None,
) -> Image.Image:
    """The generated image; see `Predictor.generate`. Neither uses nor changes the global random state.

    With `sigmas`, noise levels before the scheduler shifts them, there are as many steps as these.

    Raises:
        QieError: the device ran out of memory.
    """
    placed, images = conditions.placed, list(conditions.images)
    if placed is None:
        sizing = sized_by_area(pipeline, conditions.area_px)
    else:
        images = [apply_view(image, view) for image, view in zip(images, placed.views, strict=True)]
        sizing = sized_as_given(pipeline, [image.size for image in images])
    width, height = size or (placed.size if placed else (None, None))
    try:
        with sizing:
            output = pipeline(
                image=(images if len(images) > 1 else images[0]) if images else None,
                **_embeds(pipeline, conditions),
                width=width,
                height=height,
                true_cfg_scale=cfg,
                num_inference_steps=steps,
                sigmas=None if sigmas is None else list(sigmas),
                generator=torch.Generator().manual_seed(seed),
                callback_on_step_end=lambda pipeline, step, timestep, tensors: on_step(step + 1) or tensors,
            )
    except torch.OutOfMemoryError as error:
        raise QieError(
            "a device ran out of memory while generating an image",
            found=one_line(error, 200),
            hint="lower data.area_px or --size; qie-predict takes a device for each component (predict.devices)",
        ) from error
    image: Image.Image = output.images[0]
    return image if alpha else on_background(image, "#ffffff")


def _embeds(pipeline: DiffusionPipeline, conditions: Conditions) -> dict[str, torch.Tensor]:
    """Arguments of a pipeline: the embeddings of its prompts, and their masks."""
    embeds: dict[str, torch.Tensor] = {}
    device, dtype = pipeline.vae.device, pipeline.vae.dtype
    for name, embed in (("prompt_embeds", conditions.prompt), ("negative_prompt_embeds", conditions.negative)):
        if embed is not None:
            mask = torch.ones(len(embed), dtype=torch.long)
            if conditions.placed is not None:
                embed, mask = conditions.placed.spread(embed, 2 * pipeline.vae_scale_factor)
            embeds |= {name: embed[None].to(device, dtype), f"{name}_mask": mask[None].to(device)}
    return embeds


def load_vae(pretrained: PretrainedModel, dtype: torch.dtype) -> AutoencoderKLQwenImage:
    """The model's VAE as released, on the CPU."""
    folder = pretrained.component("vae")
    with loading(folder):
        kind = getattr(diffusers, pretrained.family.vae)
        return kind.from_pretrained(folder, torch_dtype=dtype, use_safetensors=True)


def free(encoder: Encoder) -> None:
    """Free the memory of an encoder's weights."""
    encoder.release()
    gc.collect()  # a model of transformers refers to itself
    torch.cuda.empty_cache()


class Predictor:
    """A model's pipeline on its devices, and the encoder that embeds for it. The first use loads the weights.

    Args:
        pretrained: the base model, with scheduler and vae.
        encoder: embeds prompts, and has the image areas of the training.
        vae_device, transformer_device: they may differ.
        dtype: of both.
        adapters: on the transformer, each at its scale; `check_adapters` checks earlier that they fit.
        quantize: how the transformer is stored, as in the adapter's training.
        trained: the model with the transformer, if not the base model.

    Raises:
        UsageError: on loading, when an adapter does not fit the model.
    """

    def __init__(
        self,
        pretrained: PretrainedModel,
        encoder: Encoder,
        *,
        vae_device: torch.device,
        transformer_device: torch.device,
        dtype: torch.dtype,
        adapters: Sequence[AdapterConfig] = (),
        quantize: Quantization | None = None,
        trained: PretrainedModel | None = None,
    ) -> None:
        self.pretrained, self._encoder, self._dtype = pretrained, encoder, dtype
        self._adapters, self._quantize, self._trained = adapters, quantize, trained or pretrained
        self._vae_device, self._transformer_device = vae_device, transformer_device

    @cached_property
    def pipeline(self) -> DiffusionPipeline:
        """The pipeline of diffusers, without encoders; for `generate`."""
        vae = load_vae(self.pretrained, self._dtype)
        transformer = load_transformer(
            self._trained, self._dtype, quantize=self._quantize, device=self._transformer_device
        )
        add_frozen_adapters(transformer, self._adapters)
        transformer.eval()  # peft loads adapters in training mode
        pipeline = make_pipeline(self.pretrained, vae.to(self._vae_device), transformer)
        transformer.to(self._transformer_device)
        if self._transformer_device != self._vae_device:
            # The pipeline works where its VAE is; only the transformer's inputs and outputs travel.
            add_hook_to_module(transformer, AlignDevicesHook(self._transformer_device, io_same_device=True))
        return pipeline

    def embed(
        self, images: Sequence[Image.Image], prompt: str, negative_prompt: str | None, size: Size | None = None
    ) -> Conditions:
        """The conditions for `generate`; see `Predictor.generate`. A negative prompt of None means no guidance."""
        conditions = embed_conditions(self._encoder, images, prompt, negative_prompt)
        width, height = size or (0, 0)
        embeds, family = (conditions.prompt, conditions.negative), self.pretrained.family
        shape = Shape((height // family.latent_scale, width // family.latent_scale), ())
        _check_room((embed for embed in embeds if embed is not None), family, shape)
        return conditions

    def free_encoder(self) -> None:
        """Free the memory of the encoder's weights; the next prompt loads them again."""
        free(self._encoder)

    def paint(self, images: Sequence[Image.Image], prompt: str, **settings: Any) -> Image.Image:
        """The former name of `generate`."""
        warnings.warn("Predictor.paint is now Predictor.generate", DeprecationWarning, stacklevel=2)
        return self.generate(images, prompt, **settings)

    def generate(
        self,
        images: Sequence[Image.Image],
        prompt: str,
        *,
        negative_prompt: str = NULL_PROMPT,
        steps: int | None = None,
        cfg: float | None = None,
        seed: int = 0,
        size: Size | None = None,
        alpha: bool = False,
        on_step: Callable[[int], object] = lambda step: None,
        keep_encoder: bool = True,
    ) -> Image.Image:
        """The image, in the proportions that the pipeline chooses: those of the first (edit) or last control. From text
        alone, it is a square of the family's area.

        Args:
            images: upright controls, of any mode that the family knows; exactly one for family edit.
            prompt, negative_prompt: instruction, and what to steer away from.
            steps: denoising steps, at least 2: the schedule has a first and a last one. None: see `Sampling.of`.
            cfg: guidance scale; 1 or less ignores the negative prompt, in half the time. None: the family's own.
            seed: of the noise.
            size: (width, height) of the generated image instead, multiples of 16 (Qwen-Image-2.1: of 32); controls keep
                their size.
            alpha: an RGBA image, of a family that makes one; otherwise the image is put on white.
            on_step: called with the number of steps done.
            keep_encoder: keep its weights for more images; if not, they are freed before the pipeline is loaded.

        Raises:
            UsageError: the family does not take so many images, or has no alpha.
            RowError: a prompt cannot be embedded.
            QieError: a device is out of memory.
        """
        check_alpha(self.pretrained.family, alpha)
        sampling = Sampling.of(self.pretrained, steps=steps, cfg=cfg, size=size, alpha=alpha)
        conditions = self.embed(images, prompt, negative_prompt if sampling.cfg > 1 else None, size)
        if not keep_encoder:
            self.free_encoder()
        return generate(self.pipeline, conditions, seed=seed, **sampling.settings, on_step=on_step)
