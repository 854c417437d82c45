"""Latents to pictures by the decoder half of a model's VAE."""

from __future__ import annotations

import torch
from PIL import Image

from qie.devices import resolve_device, resolve_dtype
from qie.errors import ModelError, QieError, UsageError, one_line
from qie.inference import load_vae
from qie.pretrained import content_hash, open_vae


class VaeDecoder:
    """Called with a latent as it is stored, it gives the picture that the latent is of.

    Attributes:
        content: hash of the VAE, as recipes have it.
    """

    def __init__(self, place: str) -> None:
        """Load the VAE in a folder or on the Hugging Face Hub, alone or in a model; on a GPU, if there is one.

        Raises:
            UsageError: there is none that could be loaded.
        """
        device = resolve_device("auto", "--vae")
        try:
            pretrained = open_vae(place)
            vae = load_vae(pretrained, getattr(torch, resolve_dtype("auto", device)))
            self.content = content_hash(pretrained.component("vae"))
        except ModelError as error:
            raise UsageError(
                error.what,
                where=error.where,
                expected=error.expected,
                found=error.found,
                hint="--vae takes the folder of a model in the diffusers layout, with vae/ in it, or that of a VAE",
            ) from error
        self._vae = vae.to(device).eval().requires_grad_(False)
        mean, std = (
            torch.tensor(values, device=device).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        self._mean, self._std = mean, std

    @torch.inference_mode()
    def __call__(self, latent: torch.Tensor) -> Image.Image:
        """The picture of [C, 1, H, W], normalised as it is stored. Raises QieError when the memory does not suffice."""
        values = latent[None].to(self._mean.device, torch.float32) * self._std + self._mean
        try:
            pixels = self._vae.decode(values.to(self._vae.dtype)).sample[0, :, 0].float()
        except torch.OutOfMemoryError as error:
            raise QieError(
                "the device ran out of memory while decoding a latent",
                found=one_line(error, 200),
                hint="free its memory, or hide it with CUDA_VISIBLE_DEVICES= to decode on the CPU",
            ) from error
        levels = ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        image = Image.fromarray(levels.permute(1, 2, 0).cpu().numpy())
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image) if image.mode == "RGBA" else image
