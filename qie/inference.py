"""Request: diffusers' own pipeline, fed with qie's embeddings."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from unittest import mock

import diffusers
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from diffusers import AutoencoderKLQwenImage, DiffusionPipeline, QwenImageTransformer2DModel
from PIL import Image

from qie.config import AdapterConfig, Quantization
from qie.encode import Encoder
from qie.encode.scene import Scene, embed_scene
from qie.encode.sizes import Size
from qie.encode.text import MAX_POSITIONS
from qie.errors import QieError, RowError
from qie.pretrained import PretrainedModel, loading
from qie.recipe import NULL_PROMPT
from qie.training.model.load import load_scheduler, load_transformer
from qie.training.model.lora import add_frozen_adapters


def paint_scene(
    pipeline: DiffusionPipeline,
    scene: Scene,
    *,
    steps: int,
    cfg: float,
    seed: int,
    size: Size | None = None,
    on_step: Callable[[int], object] = lambda step: None,
) -> Image.Image:
    """The edited image; see `Predictor.paint`. The global random state is neither used nor changed.

    Raises:
        QieError: the device is out of memory.
    """
    embeds = {}
    width, height = size or (None, None)
    for name, embed in (("prompt_embeds", scene.prompt), ("negative_prompt_embeds", scene.negative)):
        if embed is not None:
            embeds[name] = embed[None].to(pipeline.vae.device, pipeline.vae.dtype)
            embeds[f"{name}_mask"] = torch.ones(1, len(embed), dtype=torch.long, device=pipeline.vae.device)
    try:
        with _image_area(pipeline, scene.area_px):
            painted = pipeline(
                image=list(scene.images) if len(scene.images) > 1 else scene.images[0],
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
            "a device is out of memory while painting",
            found=" ".join(str(error).split())[:200],
            hint="lower data.area_px or --size; qie-predict takes a device for each component (predict.devices)",
        ) from error
    return painted.images[0]  # type: ignore[no-any-return]


def make_pipeline(
    pretrained: PretrainedModel, vae: AutoencoderKLQwenImage, transformer: QwenImageTransformer2DModel
) -> DiffusionPipeline:
    """The family's pipeline of diffusers, without encoders. All but the transformer computes where the VAE is now."""
    # Of components on several devices, and of offloaded ones, diffusers would choose any; it asks a hook first.
    add_hook_to_module(vae, AlignDevicesHook(execution_device=vae.device))
    none = dict.fromkeys(("text_encoder", "tokenizer", "processor"))
    pipeline = getattr(diffusers, pretrained.family.pipeline)(
        scheduler=load_scheduler(pretrained), vae=vae, transformer=transformer, **none
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def load_vae(pretrained: PretrainedModel, dtype: torch.dtype) -> AutoencoderKLQwenImage:
    """The model's VAE as it was released, on the CPU."""
    folder = pretrained.component("vae")
    with loading(folder):
        return AutoencoderKLQwenImage.from_pretrained(folder, torch_dtype=dtype, use_safetensors=True)


def free(encoder: Encoder) -> None:
    """Give back the memory of an encoder's weights."""
    encoder.release()
    gc.collect()  # a model of transformers refers to itself
    torch.cuda.empty_cache()


class Predictor:
    """A model's pipeline on its devices, and the encoder that embeds for it. Weights are loaded on first use.

    Args:
        pretrained: the base model, with scheduler and vae.
        encoder: embeds prompts, and holds the image areas that the adapter was trained with.
        vae_device, transformer_device: where they live; they may differ.
        dtype: of both.
        adapters: on the transformer, each at its scale; `check_adapters` tells earlier whether they fit.
        quantize: how the transformer is stored, as it was while an adapter was trained.
        trained: has the transformer, where that is not the base model's.

    Raises:
        UsageError: when it is loaded, an adapter does not fit the model.
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
        """Of diffusers, without encoders; for `paint_scene`."""
        vae = load_vae(self.pretrained, self._dtype)
        transformer = load_transformer(
            self._trained, self._dtype, quantize=self._quantize, device=self._transformer_device
        )
        add_frozen_adapters(transformer, self._adapters)
        transformer.eval()  # an adapter comes in training mode
        pipeline = make_pipeline(self.pretrained, vae.to(self._vae_device), transformer)
        transformer.to(self._transformer_device)
        if self._transformer_device != self._vae_device:
            # The pipeline works where its VAE is; only the transformer's inputs and outputs travel.
            add_hook_to_module(transformer, AlignDevicesHook(self._transformer_device, io_same_device=True))
        return pipeline

    def embed(
        self, images: Sequence[Image.Image], prompt: str, negative_prompt: str | None, size: Size | None = None
    ) -> Scene:
        """What `paint_scene` needs of images and prompts; see `paint`. A negative prompt of None is no guidance."""
        scene = embed_scene(self._encoder, images, prompt, negative_prompt)
        # The transformer's text positions begin behind the largest half side of an image, in patches of 2×2.
        room = MAX_POSITIONS - max(size or (0,)) // 32
        longest = max(len(embed) for embed in (scene.prompt, scene.negative) if embed is not None)
        if longest > room:
            raise RowError("the prompt is too long", expected=f"at most {room} tokens, images included", found=longest)
        return scene

    def free_encoder(self) -> None:
        """Give back the memory of the encoder's weights; what is embedded next loads them again."""
        free(self._encoder)

    def paint(
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
        """The edited image, of the proportions that the pipeline chooses: those of the first (edit) or last control.

        Args:
            images: upright RGB controls; exactly one for family edit.
            prompt, negative_prompt: instruction, and what to steer away from.
            steps: denoising steps, at least 2: the schedule has a first and a last one.
            cfg: guidance scale; 1 and below does without the negative prompt, in half the time.
            seed: of the noise.
            size: (width, height) of the painted image instead, multiples of 16; controls are seen as without.
            on_step: called with the number of steps done.
            keep_encoder: for more images; without, its weights are gone before those of the pipeline are loaded.

        Raises:
            UsageError: the family does not take so many images.
            RowError: a prompt cannot be embedded.
            QieError: a device is out of memory.
        """
        scene = self.embed(images, prompt, negative_prompt if cfg > 1 else None, size)
        if not keep_encoder:
            self.free_encoder()
        return paint_scene(self.pipeline, scene, steps=steps, cfg=cfg, seed=seed, size=size, on_step=on_step)


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
