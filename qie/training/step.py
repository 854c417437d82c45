"""The objective on a batch: what one forward pass of training, or of validation, computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from qie.config import LossConfig
from qie.training import objective
from qie.training.model import velocity
from qie.types import Batch


@dataclass(frozen=True)
class Objective:
    """Everything that decides a batch's loss, but the model.

    Attributes:
        section: the configuration's `loss`.
        caption_dropout_rate: how often the null prompt replaces a prompt.
        seed: of noise, noise levels and dropout.
        dynamic_shift: the scheduler's values, see `load_shift`.
        device, dtype: where and in what precision the model computes. The loss is float32.
    """

    section: LossConfig
    caption_dropout_rate: float
    seed: int
    dynamic_shift: dict[str, Any]
    device: torch.device
    dtype: torch.dtype

    def loss(self, model: torch.nn.Module, batch: Batch, step: int) -> torch.Tensor:
        """Mean loss of a batch in a training step, weighted by the batch's weights."""
        sigmas = objective.draw_sigmas(self.seed, step, batch.keys, self.section.timestep_sampling)
        dropped = objective.draw_dropped(self.seed, step, batch.keys, self.caption_dropout_rate)
        batch = batch.to(self.device, self.dtype)
        prompt = objective.drop_captions(batch, dropped)
        return (self._losses(model, batch, step, sigmas, prompt) * batch.weight).mean()

    @torch.no_grad()
    def validation_loss(self, model: torch.nn.Module, batches: Iterable[Batch], count: int) -> float:
        """Mean loss over `count` batches of one sample each, with noise that never changes.

        Sample number i of n is seen at the noise level (i + ½)/n before the shift: together they cover all levels, and
        since levels and noise are fixed, two losses of a run differ by what was learnt alone.
        """
        was_training = model.training
        model.eval()
        total = 0.0
        for number, batch in enumerate(batches):
            batch = batch.to(self.device, self.dtype)
            sigmas = torch.full((len(batch),), (number + 0.5) / count)
            prompt = batch.prompt_embed, batch.prompt_embeds_mask
            total += float(self._losses(model, batch, -1, sigmas, prompt).mean())
        model.train(was_training)
        return total / count

    def _losses(
        self,
        model: torch.nn.Module,
        batch: Batch,
        step: int,
        sigmas: torch.Tensor,
        prompt: tuple[torch.Tensor, torch.Tensor | None],
    ) -> torch.Tensor:
        """Each sample's loss, [B], at noise levels `sigmas` before the shift."""
        latent = batch.pixel_latent.float()
        noise = objective.draw_noise(self.seed, step, batch.keys, latent.shape[1:]).to(self.device)
        sigmas = objective.shift_sigmas(sigmas, self._shift(latent)).to(self.device)
        noisy = objective.add_noise(latent, noise, sigmas).to(self.dtype)
        predicted = velocity(model, noisy, sigmas.to(self.dtype), batch, *prompt)
        weight = None
        if batch.loss_mask is not None and self.section.mask_background_weight != 1.0:
            weight = objective.mask_weight(batch.loss_mask, self.section.mask_background_weight)
        return objective.flow_loss(
            predicted, latent, noise, sigmas, weighting=self.section.weighting, pixel_weight=weight
        )

    def _shift(self, latent: torch.Tensor) -> float:
        if self.section.shift == "none":
            return 1.0
        if self.section.shift == "dynamic":
            target_tokens = latent.shape[-2] * latent.shape[-1] // 4
            return objective.dynamic_shift(target_tokens, **self.dynamic_shift)
        return float(self.section.shift)
