"""The objective, as pure functions: flow matching, its noise levels, weights and dropout. All in float32.

What is random here is a function of (seed, step, key of the sample) and a name, never of what was drawn before: a
resumed run, or one with another number of processes, draws the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3

from qie.types import Batch


def derive_seed(*parts: int | str) -> int:
    """A seed that depends on the parts alone: 32 bits, since torch's CPU generator ignores all others."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def generator(seed: int, step: int, key: str, what: str) -> torch.Generator:
    """A generator on the CPU whose numbers depend on the four arguments alone."""
    return torch.Generator().manual_seed(derive_seed(seed, step, key, what))


def draw_noise(seed: int, step: int, keys: Sequence[str], shape: Sequence[int]) -> torch.Tensor:
    """Standard normal noise, [B, *shape]."""
    return torch.stack([torch.randn(tuple(shape), generator=generator(seed, step, key, "noise")) for key in keys])


def draw_sigmas(seed: int, step: int, keys: Sequence[str], sampling: str) -> torch.Tensor:
    """Noise levels before the shift, [B] in (0, 1).

    `sampling` is uniform, logit_normal (mean 0, deviation 1) or mode (scale 1.29): the densities of Esser et al. 2024,
    arXiv:2403.03206, as diffusers computes them.
    """
    draws = [
        compute_density_for_timestep_sampling(
            sampling, 1, logit_mean=0.0, logit_std=1.0, mode_scale=1.29, generator=generator(seed, step, key, "sigma")
        )
        for key in keys
    ]
    return torch.cat(draws).clamp(min=1e-6)  # a weighting may divide by it


def draw_dropped(seed: int, step: int, keys: Sequence[str], rate: float) -> torch.Tensor:
    """Which samples lose their prompt in this step, [B] bool."""
    draws = [torch.rand((), generator=generator(seed, step, key, "caption dropout")) for key in keys]
    return torch.stack(draws) < rate


def dynamic_shift(
    target_tokens: int, *, base_shift: float, max_shift: float, base_tokens: int, max_tokens: int
) -> float:
    """s = e^μ, with μ linear in the number of target tokens: `calculate_shift` of diffusers' pipelines."""
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return math.exp(base_shift + slope * (target_tokens - base_tokens))


def shift_sigmas(sigmas: torch.Tensor, shift: float) -> torch.Tensor:
    """σ' = sσ / (1 + (s − 1)σ): more noise for larger images."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def add_noise(latent: torch.Tensor, noise: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
    """x_t = (1 − σ)·x₀ + σ·ε, with σ [B] over the first dimension."""
    sigmas = sigmas.view(-1, *[1] * (latent.ndim - 1))
    return (1 - sigmas) * latent + sigmas * noise


def flow_loss(
    prediction: torch.Tensor,
    latent: torch.Tensor,
    noise: torch.Tensor,
    sigmas: torch.Tensor,
    *,
    weighting: str = "none",
    pixel_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Loss of each sample, [B]: mean squared error against the velocity ε − x₀, in float32.

    Args:
        prediction, latent, noise: [B, C, 1, H, W].
        sigmas: [B].
        weighting: none, sigma_sqrt or cosmap (arXiv:2403.03206).
        pixel_weight: [B, H, W], 1 on average over each sample; see `mask_weight`.
    """
    error: torch.Tensor = (prediction.float() - (noise.float() - latent.float())).square()
    if pixel_weight is not None:
        error = error * pixel_weight[:, None, None]
    level_weight: torch.Tensor = compute_loss_weighting_for_sd3(weighting, sigmas)
    return error.flatten(1).mean(1) * level_weight


def mask_weight(loss_mask: torch.Tensor, background_weight: float) -> torch.Tensor:
    """[B, H, W] uint8 masks to weights: 1 where fully covered, `background_weight` where not, scaled to a mean of 1.

    A mask that is dark everywhere, with a background weight of 0, weighs nothing.
    """
    covered = loss_mask.float() / 255
    weight = background_weight + (1 - background_weight) * covered
    return weight / weight.mean((1, 2), keepdim=True).clamp(min=1e-6)


def drop_captions(batch: Batch, dropped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Prompt embeddings [B, L', D] and their mask with the null prompt in place of the dropped ones. Controls stay."""
    if not bool(dropped.any()):
        return batch.prompt_embed, batch.prompt_embeds_mask
    if bool(dropped.all()):
        return batch.empty_prompt_embed, batch.empty_prompt_embeds_mask
    length = max(batch.prompt_embed.shape[1], batch.empty_prompt_embed.shape[1])
    prompt, prompt_mask = _padded(batch.prompt_embed, batch.prompt_embeds_mask, length)
    empty, empty_mask = _padded(batch.empty_prompt_embed, batch.empty_prompt_embeds_mask, length)
    dropped = dropped.to(prompt.device)
    embeds = torch.where(dropped[:, None, None], empty, prompt)
    mask = torch.where(dropped[:, None], empty_mask, prompt_mask)
    return embeds, None if bool(mask.all()) else mask


def _padded(embeds: torch.Tensor, mask: torch.Tensor | None, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    missing = length - embeds.shape[1]
    mask = torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device) if mask is None else mask
    pad = torch.nn.functional.pad
    return pad(embeds, (0, 0, 0, missing)), pad(mask, (0, missing))
