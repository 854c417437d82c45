"""Painting: diffusers' own pipeline, fed with qie's embeddings."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from diffusers import AutoencoderKLQwenImage, DiffusionPipeline
from PIL import Image, PngImagePlugin

from qie.encode import Encoder
from qie.encode.rows import see
from qie.encode.sizes import choose_area
from qie.errors import UsageError
from qie.pretrained import Checkpoint, loading
from qie.recipe import NULL_PROMPT, normal_prompt
from qie.training.model import ADAPTER_FILE, load_scheduler, load_transformer


class Painter:
    """A checkpoint's pipeline, without its text encoder, on its devices.

    Args:
        checkpoint: the base model, with transformer, scheduler and vae.
        encoder: embeds prompts, and holds the image areas that the adapter was trained with.
        vae_device, transformer_device: where they live; they may differ.
        dtype: of both.
        lora: a folder that holds an adapter, such as a training checkpoint.

    Raises:
        UsageError: the folder holds no adapter, or it does not fit the model.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        encoder: Encoder,
        *,
        vae_device: torch.device,
        transformer_device: torch.device,
        dtype: torch.dtype,
        lora: Path | None = None,
    ) -> None:
        if lora is not None:
            _check_adapter(lora)
        self._encoder = encoder
        self._max_controls = checkpoint.family.max_controls
        folder = checkpoint.component("vae")
        with loading(folder):
            vae = AutoencoderKLQwenImage.from_pretrained(folder, torch_dtype=dtype, use_safetensors=True)
        self.pipeline: DiffusionPipeline = getattr(diffusers, checkpoint.family.pipeline)(
            scheduler=load_scheduler(checkpoint),
            vae=vae,
            text_encoder=None,
            tokenizer=None,
            processor=None,
            transformer=load_transformer(checkpoint, dtype),
        )
        if lora is not None:
            _load_lora(self.pipeline, lora)
        self.pipeline.vae.to(vae_device)
        self.pipeline.transformer.to(transformer_device)
        if transformer_device != vae_device:
            # The pipeline works where its VAE is; only the transformer's inputs and outputs travel.
            hook = AlignDevicesHook(execution_device=transformer_device, io_same_device=True)
            add_hook_to_module(self.pipeline.transformer, hook)
        self.pipeline.set_progress_bar_config(disable=True)

    def paint(
        self,
        images: Sequence[Image.Image],
        prompt: str,
        *,
        negative_prompt: str = NULL_PROMPT,
        steps: int = 20,
        cfg: float = 4.0,
        seed: int = 0,
        on_step: Callable[[int], object] = lambda step: None,
    ) -> Image.Image:
        """The edited image, of the proportions that the pipeline chooses: those of the first (edit) or last control.

        Args:
            images: upright RGB controls; exactly one for family edit.
            prompt, negative_prompt: instruction, and what to steer away from.
            steps: denoising steps, at least 2: the schedule has a first and a last one.
            cfg: guidance scale; 1 and below does without the negative prompt, in half the time.
            seed: of the noise.
            on_step: called with the number of steps done.

        Raises:
            UsageError: the family does not take so many images.
            RowError: a prompt cannot be embedded.
        """
        if self._max_controls is not None and len(images) > self._max_controls:
            raise UsageError(
                "more images than the model takes",
                expected=f"{self._max_controls} for family {self._encoder.recipe.family}",
                found=len(images),
                hint="an edit_plus model takes several",
            )
        embeds = self._embed(images, prompt, "prompt_embeds")
        if cfg > 1:
            embeds |= self._embed(images, negative_prompt, "negative_prompt_embeds")
        with _image_area(self.pipeline, self._area_px(images[0] if self._max_controls == 1 else images[-1])):
            painted = self.pipeline(
                image=list(images) if len(images) > 1 else images[0],
                **embeds,
                true_cfg_scale=cfg,
                num_inference_steps=steps,
                generator=torch.Generator().manual_seed(seed),
                callback_on_step_end=lambda pipeline, step, timestep, tensors: on_step(step + 1) or tensors,
            )
        return painted.images[0]  # type: ignore[no-any-return]

    def _area_px(self, image: Image.Image) -> int:
        """Area that the recipe gives the image of which the pipeline takes the proportions."""
        width, height = see(image, self._encoder.recipe).view.size
        areas = self._encoder.recipe.areas_px
        return choose_area(image.size, areas) if areas else width * height

    def _embed(self, images: Sequence[Image.Image], prompt: str, name: str) -> dict[str, Any]:
        embed = self._encoder.embed(images, normal_prompt(prompt)).to(self.pipeline.device, self.pipeline.dtype)
        mask = torch.ones(1, len(embed), dtype=torch.long, device=embed.device)
        return {name: embed[None], f"{name}_mask": mask}


def check_output(path: Path) -> None:
    """Raise UsageError when no image can be written to `path`: to be asked before the work, not after it."""
    if Image.registered_extensions().get(path.suffix.lower()) not in Image.SAVE:
        raise UsageError("the ending names no image format", where=path, expected="such as .png or .jpg")
    if not path.parent.is_dir() or path.is_dir():
        raise UsageError("nothing can be written there", where=path, expected="a file in a folder that exists")


def save_image(image: Image.Image, path: Path, settings: dict[str, Any]) -> None:
    """Write an image whole or not at all; a PNG carries `settings` as text under the name qie."""
    check_output(path)
    about = PngImagePlugin.PngInfo()
    about.add_itxt("qie", json.dumps(settings, ensure_ascii=False))
    partial = path.with_name(f".{path.name}.partial")
    try:
        image.save(partial, format=Image.registered_extensions()[path.suffix.lower()], pnginfo=about)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _check_adapter(lora: Path) -> None:
    if not (lora / ADAPTER_FILE).is_file():
        raise UsageError(
            "no adapter in this folder", where=lora, expected=ADAPTER_FILE, hint="give a checkpoint-NNNNNN folder"
        )


def _load_lora(pipeline: DiffusionPipeline, lora: Path) -> None:
    try:
        pipeline.load_lora_weights(lora, weight_name=ADAPTER_FILE, local_files_only=True)
    except (ValueError, RuntimeError, OSError) as error:
        raise UsageError(
            "the adapter does not fit this model", where=lora / ADAPTER_FILE, found=str(error).splitlines()[0]
        ) from error


@contextmanager
def _image_area(pipeline: DiffusionPipeline, area_px: int) -> Iterator[None]:
    """Let the pipeline size its images for `area_px` instead of its constant of 1024².

    The pipelines take no such argument, and neither takes latents in place of images. At the family's own area this
    changes nothing; that the whole paints what the pipeline paints is tested.
    """
    module = sys.modules[type(pipeline).__module__]
    original = module.calculate_dimensions

    def calculate(_target_area: float, ratio: float) -> tuple[int, ...]:
        return original(area_px, ratio)  # type: ignore[no-any-return]

    with mock.patch.object(module, "calculate_dimensions", calculate):
        yield
