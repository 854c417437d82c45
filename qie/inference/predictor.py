"""Generating images: diffusers' own pipeline, with qie's embeddings."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest import mock

import diffusers
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from diffusers import AutoencoderKLQwenImage, DiffusionPipeline, QwenImageTransformer2DModel
from PIL import Image

from qie.config import AdapterConfig, Quantization
from qie.encode import Encoder
from qie.encode.encoder import Picture, text_room
from qie.encode.images import Size, choose_area
from qie.errors import QieError, RowError, UsageError
from qie.families import FAMILIES, NULL_PROMPT
from qie.pretrained import PretrainedModel, loading
from qie.training.model.load import load_scheduler, load_transformer
from qie.training.model.lora import add_frozen_adapters
from qie.types import Shape


@dataclass(frozen=True, eq=False)
class Conditions:
    """The conditions of one image to generate, its prompts embedded: they need no encoder any more.

    Attributes:
        images: upright RGB controls.
        area_px: area of the generated image.
        prompt, negative: embeddings, [L, D], in host memory; without `negative` there is no guidance.
    """

    images: tuple[Image.Image, ...]
    area_px: int
    prompt: torch.Tensor
    negative: torch.Tensor | None


def embed_conditions(
    encoder: Encoder, images: Sequence[Image.Image], prompt: str, negative_prompt: str | None
) -> Conditions:
    """Images and prompts, embedded. A negative prompt of None means no guidance.

    Raises:
        UsageError: the family does not take so many images.
        RowError: a prompt contains a special token, or is too long.
    """
    recipe = encoder.recipe
    check_controls(recipe.family, len(images))
    pictures = [Picture.of(image, recipe) for image in images]
    # The pipelines take the proportions of the first (edit) or last control.
    shaping = pictures[0] if FAMILIES[recipe.family].max_controls == 1 else pictures[-1]
    width, height = shaping.view.size
    area_px = choose_area(shaping.image.size, recipe.areas_px) if recipe.areas_px else width * height
    sizes = tuple(picture.latent_size(recipe) for picture in pictures)
    room = text_room(FAMILIES[recipe.family], Shape(sizes[0], sizes))
    embeds = [encoder.embed(images, text).cpu() for text in (prompt, negative_prompt) if text is not None]
    _check_room(embeds, room)
    return Conditions(tuple(images), area_px, embeds[0], embeds[1] if len(embeds) > 1 else None)


def check_controls(family: str, count: int, where: str | None = None) -> None:
    """Raise UsageError when the family does not take `count` images."""
    limit = FAMILIES[family].max_controls
    if limit is not None and count > limit:
        raise UsageError(
            "too many images for the model",
            where=where,
            expected=f"{limit} for family {family}",
            found=count,
            hint="an edit_plus model takes several",
        )


def _check_room(embeds: Iterable[torch.Tensor], room: int) -> None:
    for embed in embeds:
        if len(embed) > room:
            raise RowError(
                "the prompt is too long", expected=f"at most {room} tokens, images included", found=len(embed)
            )


def generate(
    pipeline: DiffusionPipeline,
    conditions: Conditions,
    *,
    steps: int,
    cfg: float,
    seed: int,
    size: Size | None = None,
    on_step: Callable[[int], object] = lambda step: None,
) -> Image.Image:
    """The edited image; see `Predictor.generate`. Neither uses nor changes the global random state.

    Raises:
        QieError: the device ran out of memory.
    """
    embeds = {}
    width, height = size or (None, None)
    for name, embed in (("prompt_embeds", conditions.prompt), ("negative_prompt_embeds", conditions.negative)):
        if embed is not None:
            embeds[name] = embed[None].to(pipeline.vae.device, pipeline.vae.dtype)
            embeds[f"{name}_mask"] = torch.ones(1, len(embed), dtype=torch.long, device=pipeline.vae.device)
    try:
        with _image_area(pipeline, conditions.area_px):
            output = pipeline(
                image=list(conditions.images) if len(conditions.images) > 1 else conditions.images[0],
                **embeds,
                width=width,
                height=height,
                true_cfg_scale=cfg,
                num_inference_steps=steps,
                generator=torch.Generator().manual_seed(seed),
                callback_on_step_end=lambda pipeline, step, timestep, tensors: on_step(step + 1) or tensors,
            )
    except torch.OutOfMemoryError as error:
        raise QieError(
            "a device ran out of memory while generating an image",
            found=" ".join(str(error).split())[:200],
            hint="lower data.area_px or --size; qie-predict takes a device for each component (predict.devices)",
        ) from error
    return output.images[0]  # type: ignore[no-any-return]


def make_pipeline(
    pretrained: PretrainedModel, vae: AutoencoderKLQwenImage, transformer: QwenImageTransformer2DModel
) -> DiffusionPipeline:
    """The family's pipeline of diffusers, without encoders. All but the transformer computes on the VAE's device."""
    # With components on several devices, or offloaded ones, diffusers would choose any device; it asks a hook first.
    add_hook_to_module(vae, AlignDevicesHook(execution_device=vae.device))
    none = dict.fromkeys(("text_encoder", "tokenizer", "processor"))
    pipeline = getattr(diffusers, pretrained.family.pipeline)(
        scheduler=load_scheduler(pretrained), vae=vae, transformer=transformer, **none
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


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
        embeds = (conditions.prompt, conditions.negative)
        room = text_room(self.pretrained.family, Shape((height // 8, width // 8), ()))
        _check_room((embed for embed in embeds if embed is not None), room)
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
        steps: int = 20,
        cfg: float = 4.0,
        seed: int = 0,
        size: Size | None = None,
        on_step: Callable[[int], object] = lambda step: None,
        keep_encoder: bool = True,
    ) -> Image.Image:
        """The edited image, in the proportions that the pipeline chooses: those of the first (edit) or last control.

        Args:
            images: upright RGB controls; exactly one for family edit.
            prompt, negative_prompt: instruction, and what to steer away from.
            steps: denoising steps, at least 2: the schedule has a first and a last one.
            cfg: guidance scale; 1 or less ignores the negative prompt, in half the time.
            seed: of the noise.
            size: (width, height) of the generated image instead, multiples of 16; controls keep their size.
            on_step: called with the number of steps done.
            keep_encoder: keep its weights for more images; if not, they are freed before the pipeline is loaded.

        Raises:
            UsageError: the family does not take so many images.
            RowError: a prompt cannot be embedded.
            QieError: a device is out of memory.
        """
        conditions = self.embed(images, prompt, negative_prompt if cfg > 1 else None, size)
        if not keep_encoder:
            self.free_encoder()
        return generate(self.pipeline, conditions, steps=steps, cfg=cfg, seed=seed, size=size, on_step=on_step)


@contextmanager
def _image_area(pipeline: DiffusionPipeline, area_px: int) -> Iterator[None]:
    """Let the pipeline size its images for `area_px` instead of its constant of 1024².

    The pipelines have no argument for it, and take no latents in place of images. At the family's own area this changes
    nothing. A test compares the generated images with the pipeline's own.
    """
    module = sys.modules[type(pipeline).__module__]
    original = module.calculate_dimensions

    def calculate(_target_area: float, ratio: float) -> tuple[int, ...]:
        return original(area_px, ratio)  # type: ignore[no-any-return]

    with mock.patch.object(module, "calculate_dimensions", calculate):
        yield
