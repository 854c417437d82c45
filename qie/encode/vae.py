"""Images to latents."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage
from PIL import Image

from qie.encode.images import to_pixels


class VaeEncoder:
    """The encoder half of the checkpoint's VAE on its device; the decoder stays in host memory."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._vae = AutoencoderKLQwenImage.from_pretrained(folder, torch_dtype=dtype).eval().requires_grad_(False)
        self._vae.encoder.to(device)
        self._vae.quant_conv.to(device)
        self._mean, self._std = (
            torch.tensor(values, device=device, dtype=dtype).view(1, -1, 1, 1, 1)
            for values in (self._vae.config.latents_mean, self._vae.config.latents_std)
        )

    @torch.inference_mode()
    def encode(self, image: Image.Image) -> torch.Tensor:
        """[C, 1, H, W] in the VAE's dtype: the mode of the posterior, normalised by the VAE's mean and deviation.

        The formula is `_encode_vae_image` of diffusers' Qwen-Image-Edit pipelines.
        """
        pixels = to_pixels(image).unsqueeze(2).to(self.device, self.dtype)
        latent: torch.Tensor = self._vae.encode(pixels).latent_dist.mode()
        normal: torch.Tensor = (latent - self._mean) / self._std
        return normal[0]
