"""The half of `QwenImageEditTrainer` that embeds, decodes and paints."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.image_processor import VaeImageProcessor
from numpy.typing import NDArray
from PIL import Image

from qie.config import Config
from qie.devices import resolve_device, resolve_dtype
from qie.encode import Encoder
from qie.errors import UsageError
from qie.opening import open_encoder, open_painter
from qie.predict import Painter, free, load_vae
from qie.pretrained import ENCODERS, Checkpoint, open_checkpoint

Pixels = NDArray[np.uint8]
Images = Image.Image | Sequence[Image.Image]


def ignored(argument: str, now: str) -> None:
    """Warn that an argument of the caller's caller has no meaning any more."""
    warnings.warn(f"{argument} is ignored; now: {now}", DeprecationWarning, stacklevel=3)


class PaintingTrainer:
    """Of a configuration: its encoder and its painter, opened when they are first needed."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._checkpoint: Checkpoint | None = None
        self._encoder: Encoder | None = None
        self._painter: Painter | None = None
        self._vae: AutoencoderKLQwenImage | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        """The base model. Now: `qie.open_checkpoint`."""
        if self._checkpoint is None:
            model, parts = self.config.model, (*ENCODERS, "transformer", "scheduler")
            self._checkpoint = open_checkpoint(model.pretrained_model_name_or_path, model.family, parts)
        return self._checkpoint

    @property
    def encoder(self) -> Encoder:
        """VAE and text encoder under one recipe. Now: `qie.open_encoder(config)`."""
        if self._encoder is None:
            self._encoder = open_encoder(self.config)
        return self._encoder

    @property
    def vae(self) -> AutoencoderKLQwenImage:
        """The VAE of diffusers, frozen, for `decode_vae_latent`. Now: `qie.predict.load_vae`."""
        if self._vae is None:
            device = resolve_device(self.config.predict.devices.vae, "predict.devices.vae")
            dtype = getattr(torch, resolve_dtype(self.config.cache.compute_dtype, device))
            self._vae = load_vae(self.checkpoint, dtype).to(device).eval().requires_grad_(False)
        return self._vae

    def setup_predict(self) -> None:
        """Make ready to paint, with the adapter of `load_lora`, which is `model.lora.continue_from`.

        Weights are loaded by the first `predict`. Now: `painter = qie.open_painter(config, lora)`.
        """
        lora = self.config.model.lora
        self._painter = open_painter(self.config, lora.continue_from if lora else None)

    def predict(
        self,
        prompt_image: Images,
        prompt: str | Sequence[str],
        negative_prompt: str | None = None,
        num_inference_steps: int = 20,
        true_cfg_scale: float = 4.0,
        image_latents: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        prompt_embeds_mask: torch.Tensor | None = None,
        weight_dtype: torch.dtype | None = None,
        *,
        seed: int = 0,
    ) -> Pixels | list[Pixels]:
        """Edited images, each [height, width, 3] uint8. Now: `painter.paint(images, prompt, steps=, cfg=, seed=)`.

        Args:
            prompt_image: an image; with several prompts, one for each of them; with one prompt, all of its controls.
            prompt: one, or several for several results.
            negative_prompt: None does without guidance.
            image_latents, prompt_embeds, prompt_embeds_mask: refused. Now: `qie.predict.paint_scene`.
            weight_dtype: ignored. Now: `cache.compute_dtype`.
            seed: of the noise.

        Raises:
            UsageError: numbers of images and prompts do not fit, or tensors are given.
        """
        if any(given is not None for given in (image_latents, prompt_embeds, prompt_embeds_mask)):
            raise UsageError("predict takes images and prompts, no tensors", hint="qie.predict.paint_scene takes both")
        if weight_dtype is not None:
            ignored("weight_dtype", "cache.compute_dtype in the configuration")
        if self._painter is None:
            self.setup_predict()
        assert self._painter is not None
        cfg = 1.0 if negative_prompt is None else true_cfg_scale
        painted = [
            np.asarray(
                self._painter.paint(
                    images, text, negative_prompt=negative_prompt or " ", steps=num_inference_steps, cfg=cfg, seed=seed
                )
            )
            for images, text in _scenes(prompt_image, prompt)
        ]
        return painted[0] if isinstance(prompt, str) else painted

    def encode_prompt(
        self, prompt: str | Sequence[str], image: Images, device: torch.device | str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings [B, L, D], padded with zeros, and their mask [B, L]. Now: `encoder.embed(images, prompt)`.

        Args:
            prompt: one or several.
            image: see `predict`.
            device: where the outcome goes; the encoder computes on `cache.text_encoder_device`.
        """
        embeds = [self.encoder.embed(images, text) for images, text in _scenes(image, prompt)]
        padded = torch.nn.utils.rnn.pad_sequence(embeds, batch_first=True)
        lengths = torch.tensor([len(embed) for embed in embeds])
        mask = (torch.arange(padded.shape[1])[None] < lengths[:, None]).long()
        return padded.to(device), mask.to(device or padded.device)

    def decode_vae_latent(self, latents: torch.Tensor) -> Pixels:
        """Latents as shards hold them, [C, 1, H, W] or [B, C, 1, H, W], to pixels: [8H, 8W, 3] or [B, 8H, 8W, 3] uint8.

        Now: the VAE of diffusers, `qie.predict.load_vae`, fed with z · std + mean.
        """
        if latents.ndim not in (4, 5) or latents.shape[-3] != 1:
            found = list(latents.shape)
            raise UsageError("these are no latents", expected="[C, 1, H, W] or [B, C, 1, H, W]", found=found)
        vae, batch = self.vae, latents if latents.ndim == 5 else latents[None]
        mean, std = (
            torch.tensor(values, device=vae.device, dtype=vae.dtype).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        with torch.inference_mode():
            pixels = vae.decode(batch.to(vae.device, vae.dtype) * std + mean, return_dict=False)[0][:, :, 0]
        decoded = (VaeImageProcessor().postprocess(pixels, output_type="np") * 255).round().astype(np.uint8)
        return decoded if latents.ndim == 5 else decoded[0]  # type: ignore[no-any-return]

    def _release_encoders(self) -> None:
        """Give back the memory of whatever encodes, decodes or paints."""
        if self._encoder is not None:
            free(self._encoder)
        self._encoder, self._painter, self._vae = None, None, None


def _scenes(images: Images, prompt: str | Sequence[str]) -> list[tuple[list[Image.Image], str]]:
    """The controls of each prompt."""
    given = [images] if isinstance(images, Image.Image) else list(images)
    if isinstance(prompt, str):
        return [(given, prompt)]
    if len(given) != len(prompt):
        raise UsageError("several prompts need an image each", expected=len(prompt), found=len(given))
    return [([image], text) for image, text in zip(given, prompt, strict=True)]
