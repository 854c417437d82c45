"""Flow-DPO: a model that learns which of two targets people like, from pairs alone.

The loss of a pair at one noise level, with one noise for both targets (Diffusion-DPO, Wallace et al. 2023,
arXiv:2311.12908, equation 14; for flow matching, Liu et al. 2025, arXiv:2501.13918, equation 6, with a constant β):

    reward(x) = −β/2 · (‖v − v_θ(x_σ)‖² − ‖v − v_ref(x_σ)‖²)        v = ε − x
    loss      = −log sigmoid(reward(target) − reward(rejected))

Squares are means over a latent's values, so that β means the same for each image size. The reference v_ref is the model
without the adapter that is trained.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid


@dataclass(frozen=True, eq=False)
class Rewards:
    """The implicit rewards of both targets of B pairs, [B] float32 each."""

    target: torch.Tensor
    rejected: torch.Tensor

    @property
    def margin(self) -> torch.Tensor:
        """[B]: above 0 where the model prefers what people prefer."""
        return self.target - self.rejected


def rewards_of(errors: torch.Tensor, reference: torch.Tensor, beta: float) -> Rewards:
    """The rewards of pairs, from mean squared errors of the model and of the reference: [B, 2], target and rejected."""
    target, rejected = (-beta / 2 * (errors - reference)).unbind(1)
    return Rewards(target, rejected)


def preference_loss(rewards: Rewards) -> torch.Tensor:
    """The loss of each pair, [B]; log 2 where both rewards are equal, as before the first step."""
    return -logsigmoid(rewards.margin)
