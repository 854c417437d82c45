"""Fit and train the small model's VAE: an AutoencoderKLQwenImage of 1.4 M parameters, on photographs.

    python tools/small_vae.py WORK [--steps N] [--threads N] [--seed N]

Reads WORK/photographs/*.jpg and keeps every eighth one out. Writes, in WORK/vae, vae.pt (averaged weights), state.pt
(a run that was stopped goes on from it) and log.jsonl (PSNR at 256² of the photographs kept out).

The encoder is fitted, not trained: it computes the first 16 principal components of 8×8 blocks. The decoder is trained
to undo it. Both are 2-D while they train. A causal 3-D convolution that sees one frame uses only the last temporal
slice of its kernel, so `to_video` puts the weights there and zeros elsewhere.
"""

# ruff: noqa: E402 - what libraries say while they are imported is silenced before that
from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from qie.quiet_libraries import quiet_imports

quiet_imports()
import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import (
    QwenImageResample,
    QwenImageResidualBlock,
)
from PIL import Image
from torch import nn
from torch.nn import functional

from qie.encode.vae import without_time

SHAPE: dict[str, Any] = {
    "base_dim": 12,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 1,
    "temperal_downsample": [False, False, False],
}
LATENTS = 16
HALF, QUARTER = 12, 24  # numbers that the encoder keeps of 2×2 and of 4×4 pixels
LATENT_STD = 2.0  # as wide as the released VAE's latents
LOG_VARIANCE = -6.0
FLAT, DECODER_FLAT = 1024.0, 6.0  # a constant channel so large that RMS norm divides by about the same everywhere
HELD_OUT_EACH = 8
CROP_PX, BATCH, LEARNING_RATE, WARM_UP = 96, 12, 2e-3, 200
L1_WEIGHT, MOST_LATENT_NOISE = 0.05, 0.2
SAVE_EVERY_S, MEASURE_EVERY = 90.0, 250


# The VAE without its time axis


def still_vae() -> AutoencoderKLQwenImage:
    """The VAE with random weights, which computes on one frame. Its state has the video VAE's names."""
    vae = AutoencoderKLQwenImage(**SHAPE)
    without_time(vae)
    return vae.requires_grad_(True)


@torch.no_grad()
def to_video(state: dict[str, torch.Tensor]) -> AutoencoderKLQwenImage:
    """The video VAE that computes on one frame what the still one of this state computes."""
    vae = AutoencoderKLQwenImage(**SHAPE)
    weights = vae.state_dict()
    if weights.keys() != state.keys():
        raise ValueError(f"this is no state of the small VAE: {sorted(weights.keys() ^ state.keys())[:3]}")
    for name, weight in weights.items():
        if weight.ndim == 5:
            weight.zero_()[:, :, -1] = state[name]
        else:
            weight.copy_(state[name].reshape(weight.shape))
    vae.load_state_dict(weights)
    return vae


def encode(vae: AutoencoderKLQwenImage, pixels: torch.Tensor) -> torch.Tensor:
    """[B, 3, H, W] in [-1, 1] to the posterior's mode, [B, 16, H/8, W/8]."""
    moments: torch.Tensor = vae.quant_conv(vae.encoder(pixels[:, :, None]))
    return moments[:, :LATENTS, 0]


def decode(vae: AutoencoderKLQwenImage, latents: torch.Tensor) -> torch.Tensor:
    pixels: torch.Tensor = vae.decoder(vae.post_quant_conv(latents[:, :, None]))
    return pixels[:, :, 0]


# Its start


@torch.no_grad()
def fit_encoder(vae: AutoencoderKLQwenImage, squares: torch.Tensor) -> torch.Tensor:
    """Make the encoder the first 16 principal components of 8×8 blocks of these images, [N, 3, 256, 256] in [-1, 1].

    Residual blocks add nothing; every downsampling convolution gathers 2×2 pixels. 2×2 pixels are 12 numbers and fit;
    of 4×4 pixels' 48 numbers, the 24 that the components need most are kept. SiLU is undone by pairs:
    silu(x) - silu(-x) = x.

    Returns:
        The components, [16, 3, 8, 8], which the encoder equals but for what is lost of 4×4 pixels.
    """
    final = _components(squares)
    quarter, rest = _through_quarters(final, squares)
    encoder = vae.encoder
    for block in encoder.modules():
        if isinstance(block, QwenImageResidualBlock):
            _clear(block.conv2)
            if isinstance(block.conv_shortcut, nn.Conv2d):
                _clear(block.conv_shortcut)
                block.conv_shortcut.weight[: block.in_dim, :, 0, 0] = torch.eye(block.in_dim)
    _clear(encoder.mid_block.attentions[0].proj)
    _clear(encoder.conv_in)
    encoder.conv_in.weight[:3, :, 1, 1] = torch.eye(3)
    first, second, third = (block.resample[1] for block in encoder.down_blocks if isinstance(block, QwenImageResample))
    for conv in (first, second, third):
        _clear(conv)
    first.weight[:HALF, :3, :2, :2] = torch.eye(HALF).view(HALF, 3, 2, 2)
    # [24, colour, I, i, J, j] of 4×4 pixels: 2×2 groups (I, J) of 2×2 pixels (i, j).
    groups = quarter.view(QUARTER, 3, 2, 2, 2, 2).permute(0, 1, 3, 5, 2, 4)
    second.weight[:QUARTER, :HALF, :2, :2] = groups.reshape(QUARTER, HALF, 2, 2)
    third.weight[:LATENTS, :QUARTER, :2, :2], third.weight[LATENTS : 2 * LATENTS, :QUARTER, :2, :2] = rest, -rest
    third.bias[-1] = FLAT
    encoder.norm_out.gamma.fill_(FLAT / encoder.norm_out.gamma.numel() ** 0.5)
    _clear(encoder.conv_out)
    encoder.conv_out.weight[:LATENTS, : 2 * LATENTS, 1, 1] = torch.eye(LATENTS).repeat(1, 2)
    encoder.conv_out.weight[:LATENTS, LATENTS : 2 * LATENTS] *= -1
    encoder.conv_out.bias[LATENTS:] = LOG_VARIANCE
    for conv in (vae.quant_conv, vae.post_quant_conv):
        _clear(conv)
        conv.weight[:, :, 0, 0] = torch.eye(len(conv.weight))
    return final.view(LATENTS, 3, 8, 8)


def _blocks(images: torch.Tensor, side: int) -> torch.Tensor:
    """Disjoint blocks of images, [N·blocks, 3·side·side] float64."""
    cut = images.double().unfold(2, side, side).unfold(3, side, side)
    return cut.permute(0, 2, 3, 1, 4, 5).reshape(-1, 3 * side * side)


def _components(squares: torch.Tensor) -> torch.Tensor:
    """[16, 192]: the directions of most variance, scaled to LATENT_STD, the sign of each fixed by its sum."""
    found = torch.linalg.eigh(torch.cov(_blocks(squares, 8).T))
    directions: torch.Tensor = found.eigenvectors.flip(1)[:, :LATENTS]
    variances: torch.Tensor = found.eigenvalues.flip(0)[:LATENTS]
    signs = torch.where(directions.sum(0) < 0, -1.0, 1.0)
    return (directions * signs / variances.sqrt() * LATENT_STD).T.float()


def _through_quarters(final: torch.Tensor, squares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The components by way of 24 numbers of each 4×4 pixels, as [24, 48] and [16, 24, 2, 2]: the best such factors."""
    spread = torch.linalg.cholesky(torch.cov(_blocks(squares, 4).T) + 1e-6 * torch.eye(48, dtype=torch.float64))
    wanted = final.double().view(LATENTS, 3, 2, 4, 2, 4).permute(2, 4, 0, 1, 3, 5).reshape(4 * LATENTS, 48)
    left, sizes, right = torch.linalg.svd(wanted @ spread, full_matrices=False)
    quarter = right[:QUARTER] @ torch.linalg.inv(spread)
    rest = (left[:, :QUARTER] * sizes[:QUARTER]).view(2, 2, LATENTS, QUARTER).permute(2, 3, 0, 1)
    return quarter.float(), rest.float()


def _clear(conv: nn.Conv2d) -> None:
    conv.weight.zero_()
    if conv.bias is not None:
        conv.bias.zero_()


@torch.no_grad()
def start_decoder(vae: AutoencoderKLQwenImage, seed: int) -> None:
    """Weights from which the decoder learns fast: blocks add little, and upsampling interpolates."""
    decoder, generator = vae.decoder, torch.Generator().manual_seed(seed)

    def mixing(rows: int, columns: int) -> torch.Tensor:
        return nn.init.orthogonal_(torch.empty(rows, columns), generator=generator)

    for name, weight in decoder.named_parameters():
        if name.endswith("bias"):
            weight.zero_()
        elif weight.ndim == 4:
            weight.copy_(torch.randn(weight.shape, generator=generator) / (3 * weight[0].numel()) ** 0.5)
    for block in decoder.modules():
        if isinstance(block, QwenImageResidualBlock):
            block.conv2.weight.mul_(0.1)
            if isinstance(block.conv_shortcut, nn.Conv2d):
                block.conv_shortcut.weight[:, :, 0, 0] = mixing(block.out_dim, block.in_dim)
    _clear(decoder.mid_block.attentions[0].proj)
    decoder.conv_in.weight.mul_(0.3)[:, :, 1, 1] += mixing(decoder.conv_in.out_channels, LATENTS) / LATENT_STD
    smooth = torch.tensor([0.25, 0.5, 0.25])
    ups = [block.upsamplers[0].resample[1] for block in decoder.up_blocks if block.upsamplers is not None]
    for conv in ups:
        mixed = mixing(conv.out_channels, conv.in_channels)
        conv.weight.mul_(0.5).add_(mixed[:, :, None, None] * smooth[:, None] * smooth)
    # The last one gives colours, their negatives, and a constant: see FLAT, and the pairs of `fit_encoder`.
    ups[-1].weight[3:6] = -ups[-1].weight[:3]
    ups[-1].weight[6], ups[-1].bias[6] = 0.0, DECODER_FLAT
    decoder.norm_out.gamma.fill_(DECODER_FLAT / decoder.norm_out.gamma.numel() ** 0.5)
    decoder.conv_out.weight.mul_(0.1)[:, :6, 1, 1] += torch.cat([torch.eye(3), -torch.eye(3)], 1)


# Photographs


def split(folder: Path) -> tuple[list[Path], list[Path]]:
    """The photographs to train on, and those kept out of all training."""
    files = sorted(folder.glob("*.jpg"))
    if len(files) < 2 * HELD_OUT_EACH:
        raise SystemExit(f"{folder} holds {len(files)} photographs (*.jpg): at least {2 * HELD_OUT_EACH} are needed")
    kept_out = files[::HELD_OUT_EACH]
    return [file for file in files if file not in kept_out], kept_out


def central_square(file: Path, side_px: int = 256) -> Image.Image:
    with Image.open(file) as source:
        image = source.convert("RGB")
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    box = (left, top, left + side, top + side)
    return image.resize((side_px, side_px), Image.Resampling.LANCZOS, box)


def pixels(images: Sequence[Image.Image]) -> torch.Tensor:
    """[N, 3, H, W] in [-1, 1]."""
    levels = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
    return levels.permute(0, 3, 1, 2).float() / 127.5 - 1


def iter_crops(files: Sequence[Path], seed: int) -> Iterator[torch.Tensor]:
    """Batches of crops, [BATCH, 3, CROP_PX, CROP_PX], from every scale of the photographs."""
    scales = []
    for file in files:
        with Image.open(file) as source:
            image = source.convert("RGB")
        while min(image.size) >= 160:
            scales.append(torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous())
            image = image.resize((int(image.width / 1.6), int(image.height / 1.6)), Image.Resampling.LANCZOS)
    chance = random.Random(seed)
    while True:
        crops = []
        for _ in range(BATCH):
            scale = chance.choice(scales)
            top, left = (chance.randrange(side - CROP_PX + 1) for side in scale.shape[1:])
            crop = scale[:, top : top + CROP_PX, left : left + CROP_PX].float()
            crop = crop.flip(2) if chance.random() < 0.5 else crop
            # Edits give grey pictures and negatives: the decoder meets some.
            crop = crop.mean(0, keepdim=True).expand(3, -1, -1) if chance.random() < 0.1 else crop
            crops.append(255 - crop if chance.random() < 0.05 else crop)
        yield torch.stack(crops) / 127.5 - 1


def psnr(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of each image, in dB; values in [-1, 1]."""
    return -10 * ((found.clamp(-1, 1) - expected).square().flatten(1).mean(1) / 4).log10()


# Training


class Training:
    """The decoder, its optimizer, its average, and where it stands. All of it is in `state.pt`."""

    def __init__(self, work: Path, steps: int, seed: int) -> None:
        self.folder, self.steps = work / "vae", steps
        self.folder.mkdir(parents=True, exist_ok=True)
        self.files, kept_out = split(work / "photographs")
        torch.manual_seed(seed)
        self.vae = still_vae()
        self.parameters = list(self.vae.decoder.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
        self.step, self.seconds = 0, 0.0
        if (self.folder / "state.pt").exists():
            self._restore(torch.load(self.folder / "state.pt", weights_only=True))
        else:
            self.components = fit_encoder(self.vae, pixels([central_square(file) for file in self.files]))
            start_decoder(self.vae, seed)
            self.average = [weight.detach().clone() for weight in self.parameters]
            write_aside(self.vae.state_dict(), self.folder / "vae.pt")  # its encoder is final
        self.vae.to(memory_format=torch.channels_last)
        self.expected = pixels([central_square(file) for file in kept_out])
        with torch.no_grad():
            self.latents = torch.cat([encode(self.vae, one[None]) for one in self.expected])
        self.crops = iter_crops(self.files, seed + self.step)

    def _restore(self, saved: dict[str, Any]) -> None:
        self.vae.load_state_dict(saved["vae"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.average, self.step, self.seconds = saved["average"], saved["step"], saved["seconds"]
        self.components = saved["components"]

    def save(self) -> None:
        own = {"vae": self.vae.state_dict(), "optimizer": self.optimizer.state_dict(), "components": self.components}
        write_aside(
            own | {"average": self.average, "step": self.step, "seconds": self.seconds}, self.folder / "state.pt"
        )

    def take_step(self) -> None:
        done = self.step / self.steps
        rate = LEARNING_RATE * min(1.0, (self.step + 1) / WARM_UP) * max(0.02, (1 + math.cos(math.pi * done)) / 2)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        expected = next(self.crops)
        # What the encoder computes, to a thousandth of the latents' deviation, in one convolution.
        latents = functional.conv2d(expected, self.components, stride=8)
        # The transformer's latents are never exact: the decoder learns to live with noise.
        latents += torch.randn_like(latents) * MOST_LATENT_NOISE * torch.rand(len(latents), 1, 1, 1)
        error = decode(self.vae, latents.contiguous(memory_format=torch.channels_last)) - expected
        self.optimizer.zero_grad(set_to_none=True)
        (error.square().mean() + L1_WEIGHT * error.abs().mean()).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.step += 1
        with torch.no_grad():
            share = 1 - min(0.999, self.step / (self.step + 50))
            torch._foreach_lerp_(self.average, [weight.detach() for weight in self.parameters], share)

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """PSNR of the photographs kept out, with the averaged weights, which it writes to `vae.pt`."""
        own = [weight.detach().clone() for weight in self.parameters]
        for weight, averaged in zip(self.parameters, self.average, strict=True):
            weight.copy_(averaged)
        found = torch.cat(
            [
                psnr(decode(self.vae, one[None]), image[None])
                for one, image in zip(self.latents, self.expected, strict=True)
            ]
        )
        write_aside(self.vae.state_dict(), self.folder / "vae.pt")
        for weight, kept in zip(self.parameters, own, strict=True):
            weight.copy_(kept)
        return {
            "step": self.step,
            "seconds": round(self.seconds, 1),
            "psnr": round(float(found.mean()), 3),
            "least": round(float(found.min()), 3),
        }

    def run(self) -> None:
        saved = started = time.monotonic()
        before = self.seconds
        while self.step < self.steps:
            self.take_step()
            now = time.monotonic()
            self.seconds = before + now - started
            if self.step in (1, 20, 50, 100) or self.step % MEASURE_EVERY == 0 or self.step == self.steps:
                line = self.measure()
                print(line, flush=True)
                with (self.folder / "log.jsonl").open("a", encoding="utf-8") as log:
                    log.write(json.dumps(line) + "\n")
            if now - saved > SAVE_EVERY_S or self.step == self.steps:
                self.save()
                saved = now


def write_aside(value: object, path: Path) -> None:
    """Save under another name, then rename: a run that is stopped leaves no half file."""
    part = path.with_suffix(".part")
    torch.save(value, part)
    part.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fit and train the small model's VAE on photographs.")
    parser.add_argument("work", metavar="WORK", type=Path, help="folder with photographs/; vae/ is written into it")
    parser.add_argument("--steps", type=int, default=3500, help="training steps altogether (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    Training(options.work, options.steps, options.seed).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
