"""Images to latents.

The VAE is made for videos. For a single image every causal Conv3d gets one real frame after zeros, so only the last
temporal slice of its kernel counts: a Conv2d with that slice computes the same, several times faster. The other layers
work on [B, C, 1, H, W] unchanged. The VAE of Qwen-Image-2.1 was released like this.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import diffusers
import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d, QwenImageRMS_norm
from torch import nn

from qie.pretrained import loading

PROBE_PX = 32
PROBE_TOLERANCE = 1e-4


class VaeEncoder:
    """The encoder half of a pretrained VAE on its device. The decoder is dropped.

    Args:
        folder: the model's vae.
        device, dtype: of its computation.
        kind: name of its class in diffusers.
        compiled: run it through torch.compile.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        kind: str = "AutoencoderKLQwenImage",
        *,
        compiled: bool = False,
    ) -> None:
        self.device, self.dtype = device, dtype
        with loading(folder):
            vae = (
                getattr(diffusers, kind)
                .from_pretrained(folder, torch_dtype=dtype, use_safetensors=True)
                .eval()
                .requires_grad_(False)
            )
        self._mean, self._std = (
            torch.tensor(values, device=device, dtype=dtype).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        self._moments: Callable[[torch.Tensor], torch.Tensor] = still_encoder(vae).to(device)
        if compiled:
            self._moments = torch.compile(self._moments, dynamic=True)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """[1, channels, H, W] in [-1, 1] to [C, 1, H/scale, W/scale] in the VAE's dtype: the mode of the posterior,
        normalised by the VAE's mean and deviation.

        The formula is `_encode_vae_image` of diffusers' Qwen-Image pipelines.
        """
        return self.encode_together([pixels])[0]

    @torch.inference_mode()
    def encode_together(self, images: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Latents of several images, those of one size in one pass. The last bits depend on the batch."""
        groups: dict[torch.Size, list[int]] = defaultdict(list)
        for position, image in enumerate(images):
            groups[image.shape].append(position)
        latents: dict[int, torch.Tensor] = {}
        for positions in groups.values():
            pixels = torch.cat([images[one].to(self.device, self.dtype, non_blocking=True) for one in positions])
            latents.update(zip(positions, self._encode_pixels(pixels), strict=True))
        return [latents[position] for position in range(len(images))]

    def _encode_pixels(self, pixels: torch.Tensor) -> torch.Tensor:
        """[B, channels, H, W] to [B, C, 1, H/scale, W/scale]."""
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        mode = self._moments(pixels.unsqueeze(2)).chunk(2, dim=1)[0]
        return (mode - self._mean) / self._std


class _FrameConv(nn.Conv2d):
    """A causal Conv3d on the first frame of a video."""

    def __init__(self, video: QwenImageCausalConv3d) -> None:
        left, _, top, _, _, _ = video._padding
        super().__init__(
            video.in_channels,
            video.out_channels,
            video.kernel_size[1:],
            stride=video.stride[1:],
            padding=(top, left),
            bias=video.bias is not None,
            device="meta",
        )
        self.weight = nn.Parameter(video.weight[:, :, -1].contiguous(), requires_grad=False)
        self.bias = video.bias

    def forward(self, video: torch.Tensor) -> torch.Tensor:
        return super().forward(video[:, :, 0]).unsqueeze(2)


class _FrameNorm(nn.Module):
    """QwenImageRMS_norm over the channels of a frame. x / max(‖x‖, 1e-12)·√C is x / rms(x).

    On a GPU this is one kernel, which computes in float32 and rounds once. On a CPU the norm is rounded before it is
    multiplied, as it was when shards were first written there; in float32 both give the same bits.
    """

    def __init__(self, norm: QwenImageRMS_norm) -> None:
        super().__init__()
        self.gamma = nn.Parameter(norm.gamma.flatten().clone(), requires_grad=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        last = features.movedim(1, -1)
        if features.device.type == "cuda":
            return self.in_one_kernel(last).movedim(-1, 1)
        normal = nn.functional.rms_norm(last.float(), self.gamma.shape, eps=1e-24).to(features.dtype)
        return (normal * self.gamma).movedim(-1, 1)

    def in_one_kernel(self, last: torch.Tensor) -> torch.Tensor:
        """Of features whose channels come last."""
        rows = last.flatten(0, -2)  # torch takes several kernels for what looks like a picture with its channels last
        return nn.functional.rms_norm(rows, self.gamma.shape, self.gamma, eps=1e-24).view(last.shape)


class _Still(nn.Module):
    """The VAE's encoder and its last convolution, without the cache that links the frames of a video."""

    def __init__(self, vae: diffusers.ModelMixin) -> None:
        super().__init__()
        self.encoder, self.quant_conv = vae.encoder, vae.quant_conv

    def forward(self, video: torch.Tensor) -> torch.Tensor:
        moments: torch.Tensor = self.quant_conv(self.encoder(video))
        return moments


def still_encoder(vae: diffusers.ModelMixin) -> nn.Module:
    """The fast encoder with `vae`'s weights; the VAE's own encoder, with a warning, if the two differ."""
    channels = vae.config.get("in_channels", 3)
    probe = torch.randn(1, channels, 1, PROBE_PX, PROBE_PX, generator=torch.Generator().manual_seed(0)).to(vae.dtype)
    with torch.inference_mode():
        expected = vae._encode(probe).float()
        try:
            still: nn.Module = without_time(copy.deepcopy(_Still(vae)))
            still = still.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            worst = float((still(probe).float() - expected).abs().max() / expected.std())
            reason = f"it is {worst:.1e} of the deviation away"
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            worst, reason = float("inf"), str(error)
    limit = PROBE_TOLERANCE if vae.dtype == torch.float32 else 0.1
    if worst <= limit:
        return still
    warnings.warn(f"this VAE is encoded by its full, slower path: without its time axis {reason}", stacklevel=2)
    return _Whole(vae)


class _Whole(nn.Module):
    """The VAE's own encoder: `_encode`, before the posterior."""

    def __init__(self, vae: diffusers.ModelMixin) -> None:
        super().__init__()
        vae.decoder = nn.Identity()  # not needed, so not on the device either
        self.vae = vae

    def forward(self, video: torch.Tensor) -> torch.Tensor:
        moments: torch.Tensor = self.vae._encode(video)
        return moments


def without_time(module: nn.Module) -> nn.Module:
    """Replace a VAE's layers, in place, by those that compute the same on videos of one frame, [B, C, 1, H, W]."""
    for name, child in module.named_children():
        if isinstance(child, QwenImageCausalConv3d):
            setattr(module, name, _FrameConv(child))
        elif isinstance(child, QwenImageRMS_norm) and not isinstance(child.bias, nn.Parameter):
            setattr(module, name, _FrameNorm(child))
        else:
            without_time(child)
    return module
