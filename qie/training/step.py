"""The objective on a batch: what one forward pass of training, or of validation, computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from qie.config import LossConfig
from qie.training import objective
from qie.training.model.load import velocity
from qie.types import Batch

_VALIDATION = -1  # the step whose noise validation sees: none of training


@dataclass(frozen=True, eq=False)
class Draws:
    """All that is random about a batch in a step, on the CPU.

    Attributes:
        noise: ε, [B, C, 1, H, W] float32.
        sigmas: noise levels before the shift, [B] float32.
        dropped_prompts: which samples are given the null prompt, [B] bool.
        dropped_controls: which samples are given zeros for their controls' latents, [B] bool.
    """

    noise: torch.Tensor
    sigmas: torch.Tensor
    dropped_prompts: torch.Tensor
    dropped_controls: torch.Tensor


@dataclass(frozen=True, eq=False)
class Losses:
    """What a forward pass says of each sample.

    Attributes:
        loss: [B] float32 on the model's device, before the batch's weights.
        sigmas: the noise levels it was taken at, after the shift, [B] float32 on the CPU.
    """

    loss: torch.Tensor
    sigmas: torch.Tensor


@dataclass(frozen=True)
class Objective:
    """Everything that decides a batch's loss, but the model.

    Attributes:
        section: the configuration's `loss`.
        caption_dropout_rate: how often the null prompt replaces a prompt.
        seed: of noise, noise levels and dropout.
        dynamic_shift: the scheduler's values, see `load_shift`.
        device, dtype: where and in what precision the model computes. The loss is float32.
        control_dropout_rate: how often zeros replace the latents of a sample's controls.
    """

    section: LossConfig
    caption_dropout_rate: float
    seed: int
    dynamic_shift: dict[str, Any]
    device: torch.device
    dtype: torch.dtype
    control_dropout_rate: float = 0.0

    def draw(self, batch: Batch, step: int) -> Draws:
        """The random numbers of a batch: a function of seed, step and keys alone.

        Uses neither the model nor a generator that anyone else sees, so it may run in any thread, ahead of time.
        """
        section, at = self.section, (self.seed, step, batch.keys)
        return Draws(
            noise=objective.draw_noise(*at, batch.pixel_latent.shape[1:]),
            sigmas=objective.draw_sigmas(
                *at,
                section.timestep_sampling,
                logit_mean=section.logit_mean,
                logit_std=section.logit_std,
                mode_scale=section.mode_scale,
            ),
            dropped_prompts=objective.draw_dropped(*at, self.caption_dropout_rate, "caption"),
            dropped_controls=objective.draw_dropped(*at, self.control_dropout_rate, "control"),
        )

    def moved(self, batch: Batch) -> Batch:
        """The batch where the model is, and in its precision, but for the target: that stays as exact as it is stored.

        Twice is as once, so whoever has time to move a batch beforehand may.
        """
        latent = batch.pixel_latent.to(self.device, torch.float32, non_blocking=True)
        return replace(batch.to(self.device, self.dtype), pixel_latent=latent)

    def losses(self, model: torch.nn.Module, batch: Batch, draws: Draws) -> Losses:
        """Each sample's loss; the batch may lie anywhere."""
        batch = self.moved(batch)
        latent, noise = batch.pixel_latent, draws.noise.to(self.device, non_blocking=True)
        prompt = objective.drop_captions(batch, draws.dropped_prompts)
        batch = replace(batch, control_latent=objective.drop_controls(batch.control_latent, draws.dropped_controls))
        levels = objective.shift_sigmas(draws.sigmas, self._shift(latent))
        sigmas = levels.to(self.device, non_blocking=True)
        noisy = objective.add_noise(latent, noise, sigmas).to(self.dtype)
        predicted = velocity(model, noisy, sigmas.to(self.dtype), batch, *prompt)
        loss = objective.flow_loss(
            predicted,
            latent,
            noise,
            sigmas,
            weighting=self.section.weighting,
            huber_delta=self.section.huber_delta if self.section.kind == "huber" else None,
            pixel_weight=self._pixel_weight(batch),
        )
        return Losses(loss, levels)

    def loss(self, model: torch.nn.Module, batch: Batch, step: int) -> torch.Tensor:
        """Mean loss of a batch in a training step, weighted by the batch's weights."""
        losses = self.losses(model, batch, self.draw(batch, step))
        return (losses.loss * batch.weight.to(self.device)).mean()

    @torch.no_grad()
    def validation_losses(self, model: torch.nn.Module, batch: Batch, level: float) -> torch.Tensor:
        """Each sample's loss at a noise level before the shift, [B], with nothing dropped and noise that never changes.

        Since level and noise are fixed, two such losses of a run differ by what was learnt alone.
        """
        noise = objective.draw_noise(self.seed, _VALIDATION, batch.keys, batch.pixel_latent.shape[1:])
        kept = torch.zeros(len(batch), dtype=torch.bool)
        with _evaluating(model):
            return self.losses(model, batch, Draws(noise, torch.full((len(batch),), level), kept, kept)).loss

    def _pixel_weight(self, batch: Batch) -> torch.Tensor | None:
        foreground, background = self.section.mask_foreground_weight, self.section.mask_background_weight
        if batch.loss_mask is None or foreground == background:
            return None
        return objective.mask_weight(batch.loss_mask, foreground, background)

    def _shift(self, latent: torch.Tensor) -> float:
        if self.section.shift == "none":
            return 1.0
        if self.section.shift == "dynamic":
            target_tokens = latent.shape[-2] * latent.shape[-1] // 4
            return objective.dynamic_shift(target_tokens, **self.dynamic_shift)
        return float(self.section.shift)


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
