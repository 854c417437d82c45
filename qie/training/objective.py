"""The objective: the loss of a batch, in training and in validation. Flow matching, computed in float32.

Everything here is pure. Random numbers are functions of (seed, step, key of the sample) and a name, never of earlier
draws: a resumed run, or one with another number of processes, draws the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Protocol, TypeVar

import torch
from diffusers.training_utils import compute_loss_weighting_for_sd3
from torch.nn.functional import huber_loss, mse_loss, pad

from qie.config import Config, LossConfig
from qie.errors import ConfigError, UsageError
from qie.training.model.dual_stream import predict_target
from qie.training.model.lora import without_trained
from qie.training.model.single_stream import predict_targets
from qie.training.preference import Rewards, preference_loss, rewards_of
from qie.types import Batch

_Value = TypeVar("_Value")

_VALIDATION = -1  # the step whose noise a validation takes: training has no such step


@dataclass(frozen=True, eq=False)
class NoiseDraws:
    """All that is random about a batch in a step, on the CPU: k draws of noise and noise level for each sample.

    Attributes:
        noise: ε, sample by sample, [B·k, C, 1, H, W] float32.
        sigmas: noise levels before the shift, [B·k] float32.
        dropped_prompts: which samples are given the null prompt, [B] bool.
        dropped_controls: which samples are trained without their controls, [B] bool.
    """

    noise: torch.Tensor
    sigmas: torch.Tensor
    dropped_prompts: torch.Tensor
    dropped_controls: torch.Tensor


@dataclass(frozen=True, eq=False)
class Losses:
    """The losses of a batch: of k draws for each sample, sample by sample.

    Attributes:
        loss: [B·k] float32 on the model's device, before the batch's weights.
        sigmas: the noise levels of these losses, after the shift, [B·k] float32 on the model's device.
        weight: those of the batch, of each sample k times, [B·k] float32 on the model's device.
        rewards: of pairs, whose loss follows from them; None otherwise.
        preserved: which are of preserved sources, [B·k] bool; None where there are no such sources.
    """

    loss: torch.Tensor
    sigmas: torch.Tensor
    weight: torch.Tensor
    rewards: Rewards | None = None
    preserved: torch.Tensor | None = None

    @property
    def columns(self) -> torch.Tensor:
        """For metrics, [B·k, 3] without gradients: loss, noise level and weight. Of pairs, [B, 5], with the rewards of
        target and rejected one; with preserved sources, [B·k, 4]."""
        pairs = (self.rewards.target, self.rewards.rejected) if self.rewards else ()
        preserved = () if self.preserved is None else (self.preserved.float(),)
        return torch.stack([self.loss.detach().float(), self.sigmas, self.weight, *pairs, *preserved], 1)

    @property
    def mean(self) -> torch.Tensor:
        """The weighted mean, which training minimizes."""
        return (self.loss * self.weight).mean()


class LossFunction(Protocol):
    """A loss of the caller's, in the place of `flow_loss`: see `qie.train`.

    It computes the loss of each of n = B·k draws, k for each sample of the batch, sample by sample, in training and
    (without gradients) in validation. The rest follows from what it gets: the clean latent is
    x₀ = `batch.pixel_latent`, each repeated k times; the noisy one x₀ + σ·`target`; and the model's idea of the clean
    one x₀ + σ·(`target` − `prediction`).
    """

    def __call__(
        self, prediction: torch.Tensor, target: torch.Tensor, batch: Batch, sigmas: torch.Tensor
    ) -> torch.Tensor:
        """The loss of each draw, [n], before the batch's weights: qie weights it and takes the mean.

        Args:
            prediction: the model's velocity, [n, C, 1, H, W] float32, with its gradient.
            target: the velocity ε − x₀ that it should be, [n, C, 1, H, W] float32. Latents are normalized: 1 is about a
                standard deviation.
            batch: the B samples with their masks and prompts, on the model's device.
            sigmas: noise levels after the shift, [n] float32 in (0, 1].
        """


@dataclass(frozen=True)
class Objective:
    """Everything but the model that decides a batch's loss.

    Attributes:
        section: the configuration's `loss`.
        caption_dropout_rate: how often the null prompt replaces a prompt.
        seed: of noise, noise levels and dropout.
        shift_range: of a dynamic shift, the scheduler's values, see `load_shift`.
        device, dtype: where and in what precision the model computes. The loss is float32.
        control_dropout_rate: how often a sample is trained without its controls, see `velocity`.
        patch: side of a token, in latent pixels.
        draws_per_sample: k. Several draws need a model whose text and controls do not see the target.
        loss_fn: takes the place of `flow_loss`, and of the fields of `section` that `require_plain` names.
        together: several processes share the model's weights, so all of them have to call it equally often.
    """

    section: LossConfig
    caption_dropout_rate: float
    seed: int
    shift_range: dict[str, Any]
    device: torch.device
    dtype: torch.dtype
    control_dropout_rate: float = 0.0
    patch: int = 2
    draws_per_sample: int = 1
    loss_fn: LossFunction | None = None
    together: bool = False

    def draw(self, batch: Batch, step: int) -> NoiseDraws:
        """The random numbers of a batch: a function of seed, step and keys alone.

        It needs neither the model nor a shared generator, so a thread may draw ahead of the step.
        """
        section, at, draws = self.section, (self.seed, step, batch.keys), self.draws_per_sample
        pinned = self.device.type == "cuda"
        return NoiseDraws(
            noise=draw_noise(*at, batch.pixel_latent.shape[1:], draws=draws, pinned=pinned),
            sigmas=draw_sigmas(
                *at,
                section.timestep_sampling,
                logit_mean=section.logit_mean,
                logit_std=section.logit_std,
                mode_scale=section.mode_scale,
                draws=draws,
                stratified=section.stratified_sigmas,
            ),
            dropped_prompts=draw_dropped(*at, self.caption_dropout_rate, "caption"),
            dropped_controls=draw_dropped(*at, self.control_dropout_rate, "control"),
        )

    def moved(self, batch: Batch) -> Batch:
        """The batch on the model's device and in its precision. The target stays float32: as exact as it is stored.

        Moving a batch again changes nothing, so a thread may move it ahead of its step.
        """
        latent, rejected = (
            None if each is None else each.to(self.device, torch.float32, non_blocking=True)
            for each in (batch.pixel_latent, batch.rejected_latent)
        )
        assert latent is not None
        return replace(batch.to(self.device, self.dtype), pixel_latent=latent, rejected_latent=rejected)

    def losses(self, model: torch.nn.Module, batch: Batch, draws: NoiseDraws) -> Losses:
        """The loss of each draw. The batch may be on any device."""
        batch = self.moved(batch)
        draws_per_sample = len(draws.noise) // len(batch)
        latent, weight = batch.pixel_latent, batch.weight
        if draws_per_sample > 1:
            latent, weight = (each.repeat_interleave(draws_per_sample, 0) for each in (latent, weight))
        noise = draws.noise.to(self.device, non_blocking=True)
        prompt = drop_captions(batch, draws.dropped_prompts)
        sigmas = shift_sigmas(draws.sigmas, self._shift(latent)).to(self.device, non_blocking=True)
        if self.section.of_pairs:
            return self._pair_losses(model, batch, noise, sigmas, *prompt, draws.dropped_controls)
        noisy = add_noise(latent, noise, sigmas).to(self.dtype)

        def predict() -> torch.Tensor:
            return velocity(model, noisy, sigmas.to(self.dtype), batch, *prompt, draws.dropped_controls).float()

        target, preserved = noise - latent, None
        if batch.preserved:
            preserved = torch.tensor(batch.preserved).repeat_interleave(draws_per_sample)
            preserved = preserved.to(self.device, non_blocking=True)
        if preserved is not None and (any(batch.preserved) or self.together):
            target = preserved_targets(model, target, preserved, predict)
        predicted = predict()
        if self.loss_fn is not None:
            return Losses(custom_loss(self.loss_fn, predicted, target, batch, sigmas), sigmas, weight)
        pixel_weight = self._pixel_weight(batch)
        if draws_per_sample > 1 and pixel_weight is not None:
            pixel_weight = pixel_weight.repeat_interleave(draws_per_sample, 0)
        loss = flow_loss(
            predicted,
            target,
            sigmas,
            weighting=self.section.weighting,
            huber_delta=self.section.huber_delta if self.section.kind == "huber" else None,
            pixel_weight=pixel_weight,
        )
        return Losses(loss, sigmas, weight, preserved=preserved)

    def _pair_losses(
        self,
        model: torch.nn.Module,
        batch: Batch,
        noise: torch.Tensor,
        sigmas: torch.Tensor,
        prompt_embed: torch.Tensor,
        prompt_lengths: Sequence[int],
        dropped_controls: torch.Tensor,
    ) -> Losses:
        """The losses of pairs of targets, which share noise, noise level, controls and prompt: see `preference`."""
        if batch.rejected_latent is None:
            raise UsageError(
                "a sample has no rejected target, and loss.kind: flow_dpo learns from pairs alone",
                where=", ".join(key[:12] for key in batch.keys),
                hint="give each row a rejected target, or train with loss.kind: mse",
            )
        both = torch.stack([batch.pixel_latent, batch.rejected_latent.float()], 1).flatten(0, 1)
        noise, levels = noise.repeat_interleave(2, 0), sigmas.repeat_interleave(2, 0)
        noisy = add_noise(both, noise, levels).to(self.dtype)
        if batch.image_slots is None:  # else both targets share what the model computes of text and controls
            controls = tuple(latent.repeat_interleave(2, 0) for latent in batch.control_latent)
            batch = replace(batch, keys=_twice(batch.keys), control_latent=controls)
            prompt_embed, prompt_lengths = prompt_embed.repeat_interleave(2, 0), _twice(prompt_lengths)
            dropped_controls = dropped_controls.repeat_interleave(2, 0)
        weight = self._pixel_weight(batch)

        def errors() -> torch.Tensor:
            """Of each pair's targets, [B, 2]."""
            given = prompt_embed, prompt_lengths, dropped_controls
            predicted = velocity(model, noisy, levels.to(self.dtype), batch, *given)
            each = None if weight is None else weight.repeat_interleave(2, 0)
            return flow_loss(predicted, noise - both, levels, pixel_weight=each).view(-1, 2)

        with torch.no_grad(), without_trained(model):
            reference = errors()
        found = errors()
        rewards = rewards_of(found, reference, self.section.beta)
        loss = preference_loss(rewards)
        if self.section.supervised_weight:
            loss = loss + self.section.supervised_weight * found[:, 0]
        detached = Rewards(rewards.target.detach(), rewards.rejected.detach())
        return Losses(loss, sigmas, batch.weight, detached)

    def loss(self, model: torch.nn.Module, batch: Batch, step: int) -> torch.Tensor:
        """Mean loss of a batch in a training step, weighted by the batch's weights."""
        return self.losses(model, batch, self.draw(batch, step)).mean

    @torch.no_grad()
    def validation_losses(self, model: torch.nn.Module, batch: Batch, level: float) -> Losses:
        """Each sample's loss at one noise level before the shift. Nothing is dropped, and the noise never changes.

        So two such losses of a run differ only by what the model has learnt between them.
        """
        noise = draw_noise(self.seed, _VALIDATION, batch.keys, batch.pixel_latent.shape[1:])
        kept = torch.zeros(len(batch), dtype=torch.bool)
        levels = torch.full((len(batch),), level, dtype=_DRAWN)
        with _evaluating(model):
            return self.losses(model, batch, NoiseDraws(noise, levels, kept, kept))

    def _pixel_weight(self, batch: Batch) -> torch.Tensor | None:
        foreground, background = self.section.mask_foreground_weight, self.section.mask_background_weight
        if batch.loss_mask is None or foreground == background:
            return None
        return mask_weight(batch.loss_mask, foreground, background)

    def _shift(self, latent: torch.Tensor) -> float:
        if self.section.shift == "none":
            return 1.0
        if self.section.shift == "dynamic":
            target_tokens = latent.shape[-2] * latent.shape[-1] // self.patch**2
            return dynamic_shift(target_tokens, **self.shift_range)
        return float(self.section.shift)


def _twice(values: Sequence[_Value]) -> tuple[_Value, ...]:
    return tuple(value for value in values for _ in range(2))


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


# The formulas


def derive_seed(*parts: int | str) -> int:
    """A seed that depends on the parts alone: 32 bits, since torch's CPU generator ignores all others."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def generator(seed: int, step: int, key: str, what: str) -> torch.Generator:
    """A generator on the CPU whose numbers depend on the four arguments alone."""
    return torch.Generator().manual_seed(derive_seed(seed, step, key, what))


def draw_noise(
    seed: int, step: int, keys: Sequence[str], shape: Sequence[int], *, draws: int = 1, pinned: bool = False
) -> torch.Tensor:
    """Standard normal noise, so many draws for each key, [B·k, *shape].

    The first draw of a key does not depend on how many there are. `pinned` in page-locked memory, so that its copy
    does not stop the host.
    """
    noise = torch.empty(len(keys) * draws, *shape, dtype=torch.float32, pin_memory=pinned)
    for slot, (key, number) in zip(noise, product(keys, range(draws)), strict=True):
        slot.normal_(generator=generator(seed, step, key, _numbered("noise", number)))
    return noise


def _numbered(what: str, number: int) -> str:
    return f"{what} {number}" if number else what


def draw_sigmas(
    seed: int,
    step: int,
    keys: Sequence[str],
    sampling: str,
    *,
    logit_mean: float = 0.0,
    logit_std: float = 1.0,
    mode_scale: float = 1.29,
    draws: int = 1,
    stratified: bool = False,
) -> torch.Tensor:
    """Noise levels before the shift, so many for each key, [B·k] in [0.001, 1].

    The densities are those of Esser et al. 2024, arXiv:2403.03206, section 3.1, as diffusers computes them. The draw
    is the level itself, as there: a positive `logit_mean` means more noise. (Training scripts of diffusers use
    the draw as an index into falling levels, which turns that around.)

    Args:
        seed, step, keys: the draws depend on nothing else. The first of a key is the same for any number of them, but
            for stratified ones.
        sampling: uniform, logit_normal or mode.
        logit_mean, logit_std: of the normal distribution whose sigmoid logit_normal is.
        mode_scale: of mode; above 0 prefers middle levels, below 0 the ends.
        draws: k.
        stratified: the draws of a key are spread over the distribution, each distributed as it is, so that their mean
            loss varies less: the low-discrepancy sampler of Kingma et al. 2021, arXiv:2107.00630, appendix I.1. One
            draw alone cannot be.
    """
    shape = {"logit_mean": logit_mean, "logit_std": logit_std, "mode_scale": mode_scale}
    if stratified and draws > 1:
        starts = torch.cat([_uniform(generator(seed, step, key, "sigma strata")) for key in keys])
        quantiles = (starts[:, None] + torch.arange(draws, dtype=torch.float32) / draws) % 1
        found = sigma_quantile(quantiles.flatten(), sampling, **shape)
    else:
        generators = (
            generator(seed, step, key, _numbered("sigma", number)) for key, number in product(keys, range(draws))
        )
        # One by one: the last bits of several depend on how many there are.
        if sampling == "logit_normal":
            normal = (torch.normal(logit_mean, logit_std, (1,), generator=own, dtype=_DRAWN) for own in generators)
            found = torch.cat([torch.sigmoid(one) for one in normal])
        else:
            found = torch.cat([sigma_quantile(_uniform(own), sampling, **shape) for own in generators])
    # A weighting may divide by it: from the least level of diffusers' schedules on. A large mode_scale leaves [0, 1].
    return found.clamp(1e-3, 1.0)


_DRAWN = torch.float32
"""Whatever torch's default is: while a library builds a model of another dtype, in any thread, it is that."""


def _uniform(own: torch.Generator) -> torch.Tensor:
    return torch.rand(1, generator=own, dtype=_DRAWN)


def sigma_quantile(
    quantiles: torch.Tensor, sampling: str, *, logit_mean: float, logit_std: float, mode_scale: float
) -> torch.Tensor:
    """The levels at these quantiles, in [0, 1], of a density; see `draw_sigmas`."""
    if sampling == "logit_normal":
        return torch.sigmoid(logit_mean + logit_std * torch.special.ndtri(quantiles))
    if sampling == "mode":
        return 1 - quantiles - mode_scale * (torch.cos(math.pi * quantiles / 2) ** 2 - 1 + quantiles)
    return quantiles


def draw_dropped(seed: int, step: int, keys: Sequence[str], rate: float, what: str) -> torch.Tensor:
    """Which samples lose their `what` (prompt, controls) in this step, [B] bool: each `what` by its own chance."""
    return torch.cat([_uniform(generator(seed, step, key, f"{what} dropout")) for key in keys]) < rate


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
    target: torch.Tensor,
    sigmas: torch.Tensor,
    *,
    weighting: str = "none",
    huber_delta: float | None = None,
    pixel_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Loss of each sample, [B]: mean error of a velocity, in float32.

    Args:
        prediction: [B, C, 1, H, W].
        target: the velocity that it should be, as large: ε − x₀, but for preserved rows.
        sigmas: [B].
        weighting: none, sigma_sqrt or cosmap (arXiv:2403.03206).
        huber_delta: None for the squared error e²; else torch's Huber loss: e²/2, and δ(|e| − δ/2) where |e| > δ.
        pixel_weight: [B, H, W], 1 on average over each sample; see `mask_weight`.
    """
    found, target = prediction.float(), target.float()
    if huber_delta is None:
        error = mse_loss(found, target, reduction="none")
    else:
        error = huber_loss(found, target, reduction="none", delta=huber_delta)
    if pixel_weight is not None:
        error = error * pixel_weight[:, None, None]
    level_weight: torch.Tensor = compute_loss_weighting_for_sd3(weighting, sigmas)
    return error.flatten(1).mean(1) * level_weight


def preserved_targets(
    model: torch.nn.Module, velocities: torch.Tensor, preserved: torch.Tensor, predict: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """The velocities to learn, where those of preserved samples are what the model predicts without the adapter that is
    trained. So it keeps what it did with them.

    This is the differential output preservation of ai-toolkit, whose preserved prompts are those of the learnt samples
    with another word for the subject.

    Args:
        model: with its adapter.
        velocities: ε − x₀, [n, C, 1, H, W] float32.
        preserved: [n] bool.
        predict: what the model predicts as it is, as large.
    """
    with torch.no_grad(), without_trained(model):
        before = predict()
    return torch.where(preserved.view(-1, *[1] * (velocities.ndim - 1)), before, velocities)


def require_plain(config: Config) -> None:
    """Raise ConfigError when a setting is part of the loss that a loss function of the caller's replaces."""
    section, plain = config.loss, LossConfig()
    for name in ("weighting", "kind", "mask_foreground_weight", "mask_background_weight"):
        if getattr(section, name) != getattr(plain, name):
            raise ConfigError(
                f"loss.{name} is part of the loss that loss_fn replaces",
                where=f"loss.{name}",
                expected=f"{getattr(plain, name)}, the default",
                found=getattr(section, name),
                hint="loss_fn gets noise levels and the batch with its masks: weight the errors there",
            )
    if config.data.preserved:
        raise ConfigError(
            "loss_fn learns targets, and those of a preserved source are the model's own predictions",
            where="data.source",
            expected="sources without preserve",
        )


def custom_loss(
    loss_fn: LossFunction, prediction: torch.Tensor, target: torch.Tensor, batch: Batch, sigmas: torch.Tensor
) -> torch.Tensor:
    """The losses of a caller's function, [n] float32. Raises UsageError for what is not one loss for each draw."""
    loss = loss_fn(prediction.float(), target, batch, sigmas)
    if not isinstance(loss, torch.Tensor) or not loss.is_floating_point() or loss.shape != sigmas.shape:
        raise UsageError(
            "loss_fn does not give one loss for each draw",
            where=loss_name(loss_fn),
            expected=f"a tensor of floats of shape {list(sigmas.shape)}",
            found=f"{loss.dtype} of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss),
            hint="take the mean over all dimensions but the first: error.flatten(1).mean(1)",
        )
    if prediction.requires_grad and not loss.requires_grad:
        raise UsageError(
            "the loss of loss_fn has no gradient",
            where=loss_name(loss_fn),
            expected="a function of `prediction`",
            hint="compute it with torch, without detach() and torch.no_grad()",
        )
    return loss.to(sigmas.device, torch.float32)


def loss_name(loss_fn: LossFunction | None) -> str | None:
    """The name of a loss function, by which a resumed run knows it: of its code, or of its class. None without one."""
    if loss_fn is None:
        return None
    named = getattr(loss_fn, "func", loss_fn)  # of functools.partial
    return str(getattr(named, "__qualname__", type(named).__qualname__))


def mask_weight(loss_mask: torch.Tensor, foreground_weight: float, background_weight: float) -> torch.Tensor:
    """Weights of [B, H, W] uint8 masks: `foreground_weight` where fully covered, `background_weight` where not.

    Partly covered pixels weigh between the two. Weights are scaled to a mean of 1 over each sample, unless all are 0.
    """
    covered = loss_mask.float() / 255
    weight = foreground_weight * covered + background_weight * (1 - covered)
    mean = weight.mean((1, 2), keepdim=True)
    return weight / torch.where(mean > 0, mean, 1.0)


def drop_controls(control_latent: tuple[torch.Tensor, ...], dropped: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Control latents with zeros in place of all controls of the dropped samples, [B] bool."""
    if not bool(dropped.any()):
        return control_latent
    dropped = dropped.to(control_latent[0].device, non_blocking=True).view(-1, 1, 1, 1, 1)
    return tuple(latent.masked_fill(dropped, 0) for latent in control_latent)


def drop_captions(batch: Batch, dropped: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Prompt embeddings [B, L', D] and their lengths, the null prompt in place of the dropped ones. Controls stay."""
    if not bool(dropped.any()):
        return batch.prompt_embed, batch.prompt_lengths
    if bool(dropped.all()):
        return batch.empty_prompt_embed, batch.empty_lengths
    chosen = zip(dropped.tolist(), batch.prompt_lengths, batch.empty_lengths, strict=True)
    lengths = tuple(of_empty if drop else own for drop, own, of_empty in chosen)
    longest = max(batch.prompt_embed.shape[1], batch.empty_prompt_embed.shape[1])
    prompt, empty = (
        pad(embeds, (0, 0, 0, longest - embeds.shape[1])) for embeds in (batch.prompt_embed, batch.empty_prompt_embed)
    )
    dropped = dropped.to(prompt.device, non_blocking=True)
    return torch.where(dropped[:, None, None], empty, prompt)[:, : max(lengths)], lengths


# The model, called as the pipelines of diffusers call it


def velocity(
    transformer: torch.nn.Module,
    noisy: torch.Tensor,
    sigmas: torch.Tensor,
    batch: Batch,
    prompt_embed: torch.Tensor,
    prompt_lengths: Sequence[int],
    dropped_controls: torch.Tensor | None = None,
) -> torch.Tensor:
    """The model's prediction of ε − x₀ for noisy targets, [B·k, C, 1, H, W].

    σ itself is the timestep: the factor 1000 is inside the model.

    Args:
        transformer: perhaps wrapped for several processes.
        noisy, sigmas: k draws for each sample; one, where controls do not stand among the text's tokens.
        batch: its controls count, and where they stand.
        prompt_embed, prompt_lengths: [B, L, D], and the length of each, on the host.
        dropped_controls: samples without controls, [B] bool on the host. Where controls stand among the text's tokens,
            they are left out; elsewhere their latents are zeros, as in training scripts of diffusers.
    """
    dropped = torch.zeros(len(batch), dtype=torch.bool) if dropped_controls is None else dropped_controls
    height, width = noisy.shape[-2:]
    if batch.image_slots is None:
        # The controls' tokens follow the target's, and their predictions are dropped.
        latents = (noisy, *drop_controls(batch.control_latent, dropped))
        tokens = torch.cat([pack(latent) for latent in latents], dim=1)
        predicted = predict_target(transformer, tokens, sigmas, prompt_embed, prompt_lengths, _grids(latents, 2))
        return unpack(predicted, height, width)
    predicted = predict_targets(
        transformer,
        pack(noisy, 1),
        sigmas,
        [pack(latent, 1) for latent in batch.control_latent],
        prompt_embed,
        prompt_lengths,
        batch.image_slots,
        _grids((*batch.control_latent, noisy), 1),
        dropped.tolist(),
    )
    return unpack(predicted, height, width, 1)


def _grids(latents: Sequence[torch.Tensor], patch: int) -> list[tuple[int, int, int]]:
    """Frames, height and width of each latent in tokens."""
    return [(1, latent.shape[-2] // patch, latent.shape[-1] // patch) for latent in latents]


def pack(latent: torch.Tensor, patch: int = 2) -> torch.Tensor:
    """[B, C, 1, H, W] to tokens of p×p latent pixels, [B, H/p·W/p, p²·C]: `_pack_latents` of diffusers' pipelines."""
    batch, channels, _, height, width = latent.shape
    rows, columns = height // patch, width // patch
    patches = latent.reshape(batch, channels, rows, patch, columns, patch).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, rows * columns, channels * patch**2)


def unpack(tokens: torch.Tensor, height: int, width: int, patch: int = 2) -> torch.Tensor:
    """The inverse of `pack` for a latent of [C, 1, height, width]."""
    batch, _, channels = tokens.shape
    rows, columns, channels = height // patch, width // patch, channels // patch**2
    patches = tokens.view(batch, rows, columns, channels, patch, patch).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(batch, channels, 1, height, width)
