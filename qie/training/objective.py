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
from torch.nn.functional import huber_loss, mse_loss, pad

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
    noise = torch.empty(len(keys), *shape, dtype=torch.float32)
    for slot, key in zip(noise, keys, strict=True):
        slot.normal_(generator=generator(seed, step, key, "noise"))
    return noise


def draw_sigmas(
    seed: int,
    step: int,
    keys: Sequence[str],
    sampling: str,
    *,
    logit_mean: float = 0.0,
    logit_std: float = 1.0,
    mode_scale: float = 1.29,
) -> torch.Tensor:
    """Noise levels before the shift, [B] in [0.001, 1].

    The densities are those of Esser et al. 2024, arXiv:2403.03206, section 3.1, as diffusers computes them. What is
    drawn is the level itself, as there: a positive `logit_mean` means more noise. (Training scripts of diffusers use
    the draw as an index into falling levels, which turns that around.)

    Args:
        seed, step, keys: all that the draws depend on.
        sampling: uniform, logit_normal or mode.
        logit_mean, logit_std: of the normal distribution whose sigmoid logit_normal is.
        mode_scale: of mode; above 0 prefers middle levels, below 0 the ends.
    """
    draws = [
        compute_density_for_timestep_sampling(
            sampling,
            1,
            logit_mean=logit_mean,
            logit_std=logit_std,
            mode_scale=mode_scale,
            generator=generator(seed, step, key, "sigma"),
        )
        for key in keys
    ]
    # A weighting may divide by it: from the least level of diffusers' schedules on. A large mode_scale leaves [0, 1].
    return torch.cat(draws).clamp(1e-3, 1.0)


def draw_dropped(seed: int, step: int, keys: Sequence[str], rate: float, what: str) -> torch.Tensor:
    """Which samples lose their `what` (prompt, controls) in this step, [B] bool: each `what` by its own chance."""
    draws = [torch.rand((), generator=generator(seed, step, key, f"{what} dropout")) for key in keys]
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
    huber_delta: float | None = None,
    pixel_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Loss of each sample, [B]: mean error against the velocity ε − x₀, in float32.

    Args:
        prediction, latent, noise: [B, C, 1, H, W].
        sigmas: [B].
        weighting: none, sigma_sqrt or cosmap (arXiv:2403.03206).
        huber_delta: None for the squared error e²; else torch's Huber loss: e²/2, and δ(|e| − δ/2) where |e| > δ.
        pixel_weight: [B, H, W], 1 on average over each sample; see `mask_weight`.
    """
    found, target = prediction.float(), noise.float() - latent.float()
    if huber_delta is None:
        error = mse_loss(found, target, reduction="none")
    else:
        error = huber_loss(found, target, reduction="none", delta=huber_delta)
    if pixel_weight is not None:
        error = error * pixel_weight[:, None, None]
    level_weight: torch.Tensor = compute_loss_weighting_for_sd3(weighting, sigmas)
    return error.flatten(1).mean(1) * level_weight


def mask_weight(loss_mask: torch.Tensor, foreground_weight: float, background_weight: float) -> torch.Tensor:
    """Weights of [B, H, W] uint8 masks: `foreground_weight` where fully covered, `background_weight` where not.

    Between them by degree, and scaled to a mean of 1 over each sample. What weighs nothing anywhere weighs nothing.
    """
    covered = loss_mask.float() / 255
    weight = foreground_weight * covered + background_weight * (1 - covered)
    mean = weight.mean((1, 2), keepdim=True)
    return weight / torch.where(mean > 0, mean, 1.0)


def drop_controls(control_latent: tuple[torch.Tensor, ...], dropped: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Control latents with zeros in place of all controls of the dropped samples, [B] bool."""
    if not bool(dropped.any()):
        return control_latent
    dropped = dropped.to(control_latent[0].device).view(-1, 1, 1, 1, 1)
    return tuple(latent.masked_fill(dropped, 0) for latent in control_latent)


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
    return pad(embeds, (0, 0, 0, missing)), pad(mask, (0, missing))
