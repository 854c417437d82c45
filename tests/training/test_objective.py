"""Flow matching as diffusers defines it, and randomness that depends on nothing but seed, step and sample."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_shift
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import huber_loss
from torch.testing import assert_close

from qie.training.objective import (
    add_noise,
    draw_dropped,
    draw_noise,
    draw_sigmas,
    drop_captions,
    drop_controls,
    dynamic_shift,
    flow_loss,
    generator,
    mask_weight,
    pack,
    shift_sigmas,
    unpack,
)
from qie.types import Batch

KEYS = tuple(f"{number:064x}" for number in range(4))
SHIFT = {"base_shift": 0.5, "max_shift": 0.9, "base_tokens": 256, "max_tokens": 8192}  # the released scheduler's
SAMPLINGS = ("uniform", "logit_normal", "mode")
deterministic = settings(derandomize=True, deadline=None, database=None, max_examples=200)


def latents(*shape: int, seed: int = 0) -> torch.Tensor:
    """Values as wide as normalised latents are, with a few far out."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=random)
    return torch.where(torch.rand(shape, generator=random) < 0.02, values * 8, values)


def embeddings(*shape: int, seed: int = 0) -> torch.Tensor:
    """Values as uneven as hidden states of Qwen2.5-VL: mostly of order 1, in some channels thousands."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=random) * torch.exp(2 * torch.randn(shape[-1], generator=random))
    values[..., 0] *= 5000
    return values.clamp(-65504, 65504)


# Noise levels


@deterministic
@given(st.integers(1, 20_000))
def test_the_dynamic_shift_is_that_of_diffusers_by_the_number_of_target_tokens(tokens: int) -> None:
    mu = calculate_shift(tokens, base_seq_len=256, max_seq_len=8192, base_shift=0.5, max_shift=0.9)
    assert dynamic_shift(tokens, **SHIFT) == pytest.approx(math.exp(mu), rel=1e-12)


def test_the_dynamic_shift_grows_with_the_image_between_its_two_points() -> None:
    assert dynamic_shift(256, **SHIFT) == pytest.approx(math.exp(0.5))
    assert dynamic_shift(8192, **SHIFT) == pytest.approx(math.exp(0.9))
    assert dynamic_shift(64 * 64, **SHIFT) == pytest.approx(2.0, abs=0.01), "at 1024²"
    assert dynamic_shift(256, **SHIFT) < dynamic_shift(4096, **SHIFT) < dynamic_shift(8192, **SHIFT)


@pytest.mark.parametrize("shift", [1.0, 0.5, 3.0, 12.0])
def test_a_static_shift_is_that_of_diffusers_scheduler(shift: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    unshifted = FlowMatchEulerDiscreteScheduler(shift=1.0).sigmas
    assert len(unshifted) == 1000
    assert_close(shift_sigmas(unshifted, shift), scheduler.sigmas, rtol=1e-6, atol=0)


@pytest.mark.parametrize("tokens", [64, 256, 1024, 4096, 8192, 16384])
def test_a_dynamic_shift_is_that_of_diffusers_scheduler(tokens: int) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="exponential")
    levels = torch.linspace(1.0, 0.02, 50)
    mu = calculate_shift(tokens, base_seq_len=256, max_seq_len=8192, base_shift=0.5, max_shift=0.9)
    scheduler.set_timesteps(sigmas=levels.tolist(), mu=mu)
    found = shift_sigmas(levels, dynamic_shift(tokens, **SHIFT))
    assert_close(found, scheduler.sigmas[:-1], rtol=1e-5, atol=0)
    assert_close(found, scheduler.time_shift(mu, 1.0, levels), rtol=1e-5, atol=0)


def test_a_shift_of_1_changes_nothing_and_the_ends_stay() -> None:
    levels = torch.linspace(0, 1, 11)
    assert torch.equal(shift_sigmas(levels, 1.0), levels)
    assert shift_sigmas(torch.tensor([0.0, 1.0]), 3.0).tolist() == [0.0, 1.0]
    assert (shift_sigmas(levels[1:-1], 3.0) > levels[1:-1]).all()


def test_noise_is_added_as_diffusers_scheduler_adds_it() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    latent, noise = latents(5, 16, 1, 4, 6), latents(5, 16, 1, 4, 6, seed=1)
    steps = torch.tensor([0, 1, 300, 700, 999])
    expected = scheduler.scale_noise(latent, scheduler.timesteps[steps], noise)
    assert_close(add_noise(latent, noise, scheduler.sigmas[steps]), expected, rtol=0, atol=1e-6)


def test_at_level_0_there_is_no_noise_and_at_level_1_nothing_else() -> None:
    latent, noise = latents(2, 16, 1, 4, 6), latents(2, 16, 1, 4, 6, seed=1)
    found = add_noise(latent, noise, torch.tensor([0.0, 1.0]))
    assert torch.equal(found[0], latent[0]) and torch.equal(found[1], noise[1])


# Loss


def test_the_loss_of_a_perfect_prediction_is_0() -> None:
    latent, noise = latents(3, 16, 1, 4, 6), latents(3, 16, 1, 4, 6, seed=1)
    assert flow_loss(noise - latent, latent, noise, torch.full((3,), 0.5)).tolist() == [0.0, 0.0, 0.0]


def test_the_velocity_leads_from_any_level_back_to_the_image() -> None:
    """x_t − σ·v = x₀: what the sampler does with the prediction is what the loss teaches."""
    latent, noise = latents(3, 16, 1, 4, 6), latents(3, 16, 1, 4, 6, seed=1)
    sigmas = torch.tensor([0.1, 0.5, 0.9])
    noisy = add_noise(latent, noise, sigmas)
    assert_close(noisy - sigmas.view(-1, 1, 1, 1, 1) * (noise - latent), latent, rtol=0, atol=1e-5)
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=[0.5])
    stepped = scheduler.step((noise - latent)[1:2], scheduler.timesteps[0], noisy[1:2]).prev_sample
    assert_close(stepped, latent[1:2], rtol=0, atol=1e-5)


def test_the_loss_is_each_samples_mean_squared_error() -> None:
    latent, noise, error = (latents(3, 16, 1, 4, 6, seed=seed) for seed in range(3))
    error *= torch.tensor([1.0, 10.0, 0.01]).view(-1, 1, 1, 1, 1)
    found = flow_loss(noise - latent + error, latent, noise, torch.rand(3))
    expected = torch.stack([(sample.double() ** 2).mean() for sample in error]).float()
    assert_close(found, expected, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize(
    ("weighting", "formula"),
    [
        ("none", lambda sigma: 1.0),
        ("sigma_sqrt", lambda sigma: sigma**-2),
        ("cosmap", lambda sigma: 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))),
    ],
)
def test_each_weighting_follows_its_formula(weighting: str, formula: Callable[[float], float]) -> None:
    latent, noise, prediction = (latents(4, 16, 1, 4, 6, seed=seed) for seed in range(3))
    sigmas = torch.tensor([0.05, 0.3, 0.5, 0.97])
    plain = flow_loss(prediction, latent, noise, sigmas)
    found = flow_loss(prediction, latent, noise, sigmas, weighting=weighting)
    assert_close(found / plain, torch.tensor([formula(sigma) for sigma in sigmas.tolist()]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("weighting", ["none", "sigma_sqrt", "cosmap"])
def test_each_weighting_is_that_of_diffusers(weighting: str) -> None:
    latent, noise, prediction = (latents(4, 16, 1, 4, 6, seed=seed) for seed in range(3))
    sigmas = torch.tensor([0.001, 0.3, 0.5, 1.0])
    factor = compute_loss_weighting_for_sd3(weighting, sigmas)
    # As the training scripts of diffusers write it.
    error = factor.view(-1, 1, 1, 1, 1).float() * (prediction.float() - (noise - latent).float()) ** 2
    found = flow_loss(prediction, latent, noise, sigmas, weighting=weighting)
    assert_close(found, error.reshape(4, -1).mean(1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("delta", [0.05, 1.0, 3.0])
def test_the_huber_loss_is_half_the_square_up_to_delta_and_a_line_beyond(delta: float) -> None:
    latent, noise = latents(3, 16, 1, 4, 6), latents(3, 16, 1, 4, 6, seed=1)
    off = latents(3, 16, 1, 4, 6, seed=2) * torch.tensor([0.1, 1.0, 10.0]).view(-1, 1, 1, 1, 1)
    found = flow_loss(noise - latent + off, latent, noise, torch.full((3,), 0.5), huber_delta=delta)
    size = off.double().abs()
    expected = torch.where(size <= delta, size**2 / 2, delta * (size - delta / 2))
    assert_close(found.double(), expected.flatten(1).mean(1), rtol=1e-4, atol=1e-7)


def test_the_huber_loss_is_weighted_as_the_squared_one_and_lets_no_error_pull_harder_than_delta() -> None:
    latent, noise, prediction = (latents(2, 16, 1, 4, 6, seed=seed) for seed in range(3))
    sigmas, weight = torch.tensor([0.2, 0.8]), mask_weight(masks()[:2], 1.0, 0.5)
    prediction.requires_grad_(True)
    plain = flow_loss(prediction, latent, noise, sigmas, huber_delta=0.3)
    plain.sum().backward()
    assert prediction.grad.abs().max() * prediction[0].numel() == pytest.approx(0.3)
    with torch.no_grad():
        weighted = flow_loss(
            prediction, latent, noise, sigmas, huber_delta=0.3, weighting="cosmap", pixel_weight=weight
        )
        each = huber_loss(prediction, noise - latent, reduction="none", delta=0.3)
    expected = (each * weight[:, None, None]).flatten(1).mean(1) * 2 / (math.pi * (1 - 2 * sigmas + 2 * sigmas**2))
    assert_close(weighted, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("huber_delta", [None, 100.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_is_computed_in_float32_whatever_it_is_given(dtype: torch.dtype, huber_delta: float | None) -> None:
    prediction, latent, noise = (latents(2, 16, 1, 32, 32, seed=seed).to(dtype) for seed in range(3))
    found = flow_loss(prediction, latent, noise, torch.tensor([0.2, 0.8]), huber_delta=huber_delta)
    assert found.dtype == torch.float32
    exact = (prediction.double() - (noise.double() - latent.double())).square().flatten(1).mean(1)
    assert_close(found.double() * (1 if huber_delta is None else 2), exact, rtol=1e-5, atol=0)


def test_a_pixel_weight_of_1_changes_nothing_and_weights_count_where_they_are() -> None:
    latent, noise, prediction = (latents(2, 16, 1, 4, 6, seed=seed) for seed in range(3))
    sigmas = torch.tensor([0.2, 0.8])
    plain = flow_loss(prediction, latent, noise, sigmas)
    assert torch.equal(flow_loss(prediction, latent, noise, sigmas, pixel_weight=torch.ones(2, 4, 6)), plain)
    weight = torch.zeros(2, 4, 6)
    weight[0, 1, 2] = weight[1, 3, 5] = 24.0
    error = (prediction - (noise - latent)).square()
    expected = torch.stack([error[0, :, 0, 1, 2].mean(), error[1, :, 0, 3, 5].mean()])
    assert_close(flow_loss(prediction, latent, noise, sigmas, pixel_weight=weight), expected)


def masks() -> torch.Tensor:
    soft = torch.linspace(0, 255, 24).reshape(4, 6)
    half = torch.zeros(4, 6)
    half[:, :3] = 255
    one = torch.zeros(4, 6)
    one[2, 2] = 255
    return torch.stack([soft, half, one, torch.full((4, 6), 255), torch.zeros(4, 6)]).to(torch.uint8)


@pytest.mark.parametrize("background", [0.01, 0.1, 0.5, 1.0, 2.0, 10.0])
def test_mask_weights_are_1_on_average_and_in_the_asked_proportion(background: float) -> None:
    weight = mask_weight(masks(), 1.0, background)
    assert weight.dtype == torch.float32
    assert_close(weight.mean((1, 2)), torch.ones(5), rtol=1e-5, atol=0)
    assert float(weight[1, 0, 5] / weight[1, 0, 0]) == pytest.approx(background, rel=1e-5)
    assert float(weight[0, 0, 0] / weight[0, -1, -1]) == pytest.approx(background, rel=1e-5)
    assert_close(weight[3], torch.ones(4, 6))
    assert_close(weight[4], torch.ones(4, 6))


def test_a_background_of_weight_0_leaves_what_the_mask_covers() -> None:
    weight = mask_weight(masks()[:4], 1.0, 0.0)
    assert_close(weight.mean((1, 2)), torch.ones(4), rtol=1e-5, atol=0)
    assert (weight[1, :, 3:] == 0).all() and (weight[2] > 0).sum() == 1


def test_a_foreground_of_weight_0_leaves_what_the_mask_does_not_cover() -> None:
    assert_close(mask_weight(masks(), 0.0, 3.0), mask_weight(255 - masks(), 3.0, 0.0), rtol=1e-5, atol=1e-6)
    assert (mask_weight(masks(), 0.0, 3.0)[1, :, :3] == 0).all()


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 7.0, 1e6])
def test_only_the_ratio_of_the_two_weights_matters(scale: float) -> None:
    expected = mask_weight(masks(), 1.0, 0.2)
    assert_close(mask_weight(masks(), scale, 0.2 * scale), expected, rtol=1e-5, atol=0)
    assert not torch.allclose(mask_weight(masks(), 0.2, 1.0), expected, rtol=0.1)


def test_a_mask_that_weighs_nothing_anywhere_weighs_nothing() -> None:
    nothing, everything = torch.zeros(1, 4, 6, dtype=torch.uint8), torch.full((1, 4, 6), 255, dtype=torch.uint8)
    assert (mask_weight(nothing, 1.0, 0.0) == 0).all()
    assert (mask_weight(everything, 0.0, 1.0) == 0).all()


def test_a_mask_that_covers_as_little_as_can_be_still_weighs_1_on_average() -> None:
    mask = torch.zeros(1, 128, 128, dtype=torch.uint8)
    mask[0, 5, 7] = 1
    weight = mask_weight(mask, 1.0, 0.0)
    assert float(weight.mean()) == pytest.approx(1.0) and float(weight[0, 5, 7]) == pytest.approx(128 * 128)


# Tokens


@pytest.mark.parametrize("size", [(4, 6), (2, 2), (128, 96), (8, 2)])
def test_packing_is_that_of_diffusers_pipeline(size: tuple[int, int]) -> None:
    latent = latents(3, 16, 1, *size)
    expected = QwenImageEditPlusPipeline._pack_latents(latent, 3, 16, *size)
    assert torch.equal(pack(latent), expected)
    assert pack(latent).shape == (3, size[0] * size[1] // 4, 64)


@pytest.mark.parametrize("size", [(4, 6), (2, 2), (128, 96), (8, 2)])
def test_unpacking_is_that_of_diffusers_pipeline(size: tuple[int, int]) -> None:
    tokens = latents(3, size[0] * size[1] // 4, 64)
    expected = QwenImageEditPlusPipeline._unpack_latents(tokens, size[0] * 8, size[1] * 8, vae_scale_factor=8)
    assert torch.equal(unpack(tokens, *size), expected)


@pytest.mark.parametrize("size", [(4, 6), (2, 2), (128, 96), (8, 2)])
def test_packing_and_unpacking_undo_each_other(size: tuple[int, int]) -> None:
    latent, tokens = latents(2, 16, 1, *size), latents(2, size[0] * size[1] // 4, 64)
    assert torch.equal(unpack(pack(latent), *size), latent)
    assert torch.equal(pack(unpack(tokens, *size)), tokens)


# Randomness


def test_a_generator_does_not_depend_on_what_was_drawn_before() -> None:
    def draw() -> torch.Tensor:
        return torch.rand(3, generator=generator(0, 5, KEYS[0], "noise"))

    first = draw()
    for other in ((0, 4, KEYS[0], "noise"), (0, 5, KEYS[1], "noise")):
        torch.rand(100, generator=generator(*other))
    torch.rand(5)
    assert torch.equal(draw(), first)


def test_drawing_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    draw_noise(0, 0, KEYS, (16, 1, 4, 6))
    draw_sigmas(0, 0, KEYS, "logit_normal")
    draw_dropped(0, 0, KEYS, 0.5, "caption")
    assert torch.equal(torch.rand(3), expected)


def test_each_argument_of_a_generator_counts_and_none_runs_into_the_next() -> None:
    arguments = [
        (0, 0, "1", "noise"),
        (1, 0, "1", "noise"),
        (0, 1, "1", "noise"),
        (0, 0, "2", "noise"),
        (0, 0, "1", "sigma"),
        (1, 23, "1", "noise"),
        (12, 3, "1", "noise"),
        (0, 11, "1", "noise"),
        (0, 1, "11", "noise"),
        (0, -1, "1", "noise"),
        (2**63, 2**40, "1", "noise"),
    ]
    draws = {tuple(torch.rand(4, generator=generator(*each)).tolist()) for each in arguments}
    assert len(draws) == len(arguments)


def test_a_samples_noise_is_the_same_alone_or_in_a_batch() -> None:
    together = draw_noise(3, 7, KEYS, (16, 1, 4, 6))
    for position, key in enumerate(KEYS):
        assert torch.equal(draw_noise(3, 7, [key], (16, 1, 4, 6))[0], together[position])
    assert torch.equal(draw_noise(3, 7, KEYS[::-1], (16, 1, 4, 6)), together.flip(0))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_samples_level_and_dropout_are_the_same_alone_or_in_a_batch(sampling: str) -> None:
    sigmas, dropped = draw_sigmas(3, 7, KEYS, sampling), draw_dropped(3, 7, KEYS, 0.5, "caption")
    assert torch.equal(torch.cat([draw_sigmas(3, 7, [key], sampling) for key in KEYS]), sigmas)
    assert torch.equal(torch.cat([draw_dropped(3, 7, [key], 0.5, "caption") for key in KEYS]), dropped)


def test_noise_differs_between_samples_steps_and_seeds() -> None:
    draws = [draw_noise(seed, step, KEYS, (16, 1, 4, 6)) for seed, step in ((0, 0), (0, 1), (1, 0), (0, -1))]
    flat = torch.cat(draws).flatten(1)
    likeness = torch.corrcoef(flat) - torch.eye(len(flat))
    assert likeness.abs().max() < 0.2


def test_noise_is_standard_normal_within_a_sample_and_across_samples() -> None:
    keys = [f"{number:064x}" for number in range(500)]
    noise = draw_noise(0, 0, keys, (16, 1, 4, 6))
    assert noise.dtype == torch.float32
    assert abs(float(noise.mean())) < 0.01 and float(noise.std()) == pytest.approx(1, abs=0.01)
    across = noise.flatten(1)[:, :50]
    assert across.mean(0).abs().max() < 0.2 and (across.std(0) - 1).abs().max() < 0.15
    inside = noise.flatten()
    quantiles = torch.quantile(inside, torch.tensor([0.025, 0.25, 0.5, 0.75, 0.975]))
    assert_close(quantiles, torch.tensor([-1.96, -0.674, 0.0, 0.674, 1.96]), rtol=0, atol=0.02)


def test_a_samples_noise_is_torchs_own() -> None:
    expected = torch.randn(16, 1, 4, 6, generator=generator(3, 7, KEYS[1], "noise"))
    assert torch.equal(draw_noise(3, 7, KEYS, (16, 1, 4, 6))[1], expected)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_levels_are_those_of_diffusers_with_the_given_parameters(sampling: str) -> None:
    given = {"logit_mean": 0.7, "logit_std": 0.4, "mode_scale": -0.6}
    found = draw_sigmas(1, 2, KEYS, sampling, **given)
    random = [generator(1, 2, key, "sigma") for key in KEYS]
    expected = [compute_density_for_timestep_sampling(sampling, 1, generator=each, **given) for each in random]
    assert torch.equal(found, torch.cat(expected))


def mode_level(u: float, scale: float = 1.29) -> float:
    return 1 - u - scale * (math.cos(math.pi * u / 2) ** 2 - 1 + u)


@pytest.mark.parametrize(
    ("sampling", "quantile"),
    [
        ("uniform", lambda share: share),
        ("logit_normal", lambda share: float(torch.special.ndtri(torch.tensor(share)).sigmoid())),
        ("mode", lambda share: mode_level(1 - share)),
    ],
)
def test_levels_have_the_quantiles_of_their_density(sampling: str, quantile: Callable[[float], float]) -> None:
    sigmas = draw_sigmas(0, 0, [str(number) for number in range(6000)], sampling)
    assert sigmas.dtype == torch.float32 and sigmas.shape == (6000,)
    assert sigmas.min() > 0 and sigmas.max() < 1
    assert float(sigmas.mean()) == pytest.approx(0.5, abs=0.01), "all three are symmetric about the middle"
    shares = torch.tensor([0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99])
    expected = torch.tensor([quantile(share) for share in shares.tolist()])
    assert_close(torch.quantile(sigmas, shares), expected, rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("sampling", "given", "quantile"),
    [
        ("logit_normal", {"logit_mean": 1.2, "logit_std": 0.5}, lambda z: 1 / (1 + math.exp(-(1.2 + 0.5 * z[1])))),
        ("logit_normal", {"logit_mean": -0.5, "logit_std": 2.0}, lambda z: 1 / (1 + math.exp(-(-0.5 + 2.0 * z[1])))),
        ("mode", {"mode_scale": -0.6}, lambda z: mode_level(1 - z[0], -0.6)),
        ("mode", {"mode_scale": 0.0}, lambda z: z[0]),
    ],
)
def test_the_parameters_of_a_density_move_its_quantiles(
    sampling: str, given: dict[str, float], quantile: Callable[[tuple[float, float]], float]
) -> None:
    """A positive logit_mean means more noise, as in arXiv:2403.03206."""
    sigmas = draw_sigmas(0, 0, [str(number) for number in range(6000)], sampling, **given)
    shares = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])
    pairs = zip(shares.tolist(), torch.special.ndtri(shares).tolist(), strict=True)
    expected = torch.tensor([quantile(pair) for pair in pairs])
    assert_close(torch.quantile(sigmas, shares), expected, rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("sampling", "given"),
    [("mode", {"mode_scale": 20.0}), ("mode", {"mode_scale": -3.0}), ("logit_normal", {"logit_std": 40.0})],
)
def test_levels_stay_where_noise_and_weights_are_defined_whatever_the_parameters(
    sampling: str, given: dict[str, float]
) -> None:
    sigmas = draw_sigmas(0, 0, [str(number) for number in range(500)], sampling, **given)
    assert sigmas.min() >= 1e-3 and sigmas.max() <= 1
    assert sigmas.min() == FlowMatchEulerDiscreteScheduler().sigmas.min(), "the least level of diffusers"


def test_levels_are_as_spread_over_the_steps_of_one_sample_as_over_samples() -> None:
    sigmas = torch.cat([draw_sigmas(0, step, KEYS[:1], "uniform") for step in range(3000)])
    assert float(sigmas.mean()) == pytest.approx(0.5, abs=0.02)
    assert float(sigmas.std()) == pytest.approx(12**-0.5, abs=0.01)
    assert abs(float(torch.corrcoef(torch.stack([sigmas[:-1], sigmas[1:]]))[0, 1])) < 0.05


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
def test_as_many_captions_are_dropped_as_asked_for(rate: float) -> None:
    dropped = draw_dropped(0, 0, [str(number) for number in range(4000)], rate, "caption")
    assert dropped.dtype == torch.bool
    share = float(dropped.float().mean())
    assert share == rate if rate in (0.0, 1.0) else share == pytest.approx(rate, abs=0.015)


def test_what_drops_with_a_low_rate_drops_with_a_higher_one_too() -> None:
    keys = [str(number) for number in range(500)]
    assert not (draw_dropped(0, 0, keys, 0.1, "caption") & ~draw_dropped(0, 0, keys, 0.3, "caption")).any()


def test_dropouts_follow_neither_the_noise_level_nor_each_other() -> None:
    keys = [str(number) for number in range(3000)]
    dropouts = [draw_dropped(0, 0, keys, 0.5, what).float() for what in ("caption", "control")]
    likeness = torch.corrcoef(torch.stack([draw_sigmas(0, 0, keys, "uniform"), *dropouts]))
    assert (likeness - torch.eye(3)).abs().max() < 0.05


# Dropout


def test_dropped_controls_are_zeros_in_all_controls_of_the_sample_and_others_stay() -> None:
    controls = (latents(3, 16, 1, 4, 6), latents(3, 16, 1, 2, 8, seed=1).half())
    controls[0][1, 0, 0, 0, 0] = math.nan
    found = drop_controls(controls, torch.tensor([False, True, False]))
    for before, after in zip(controls, found, strict=True):
        assert (after[1] == 0).all() and after.dtype == before.dtype
        assert torch.equal(after[[0, 2]], before[[0, 2]])
        assert not (before[1] == 0).all(), "the batch stays as it was"
    assert drop_controls(controls, torch.zeros(3, dtype=torch.bool)) is controls


def batch(prompt_lengths: list[int], empty_lengths: list[int]) -> Batch:
    """A batch as `collate` makes it: padded with zeros to the longest, no mask where nothing is padded."""

    def padded(lengths: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        embeds = embeddings(len(lengths), max(lengths), 8, seed=seed)
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        return embeds * mask[..., None], None if bool(mask.all()) else mask

    count = len(prompt_lengths)
    prompt, prompt_mask = padded(prompt_lengths, seed=1)
    empty, empty_mask = padded(empty_lengths, seed=2)
    return Batch(
        keys=KEYS[:count],
        indices=tuple(range(count)),
        weight=torch.ones(count),
        pixel_latent=latents(count, 16, 1, 4, 6),
        control_latent=(latents(count, 16, 1, 4, 6, seed=1),),
        prompt_embed=prompt,
        prompt_embeds_mask=prompt_mask,
        empty_tail=empty,
        shared_prefixes=(0,) * count,
        empty_lengths=tuple(empty_lengths),
        empty_prompt_embeds_mask=empty_mask,
    )


LENGTHS = [
    ([9, 9, 9], [7, 7, 7]),  # nothing is padded
    ([9, 12, 10], [7, 7, 7]),  # a batch of one image size
    ([9, 12, 10], [7, 5, 7]),
    ([6, 6, 6], [9, 7, 8]),  # prompts shorter than the null prompt
    ([7, 7, 7], [7, 7, 7]),
    ([7, 6, 5], [5, 6, 7]),
]


@pytest.mark.parametrize(("prompts", "empties"), LENGTHS)
@pytest.mark.parametrize("dropped", [[1, 0, 0], [0, 1, 0], [0, 1, 1], [1, 1, 0], [0, 0, 0], [1, 1, 1]])
def test_each_sample_keeps_exactly_the_tokens_of_its_own_prompt_or_null_prompt(
    prompts: list[int], empties: list[int], dropped: list[int]
) -> None:
    whole = batch(prompts, empties)
    embeds, mask = drop_captions(whole, torch.tensor(dropped, dtype=torch.bool))
    for number, drop in enumerate(dropped):
        length = empties[number] if drop else prompts[number]
        source = whole.empty_prompt_embed if drop else whole.prompt_embed
        attended = torch.ones(embeds.shape[1], dtype=torch.bool) if mask is None else mask[number]
        assert attended.tolist() == [True] * length + [False] * (embeds.shape[1] - length)
        assert torch.equal(embeds[number, :length], source[number, :length])
        assert (embeds[number, length:] == 0).all()
    assert mask is None or not bool(mask.all()), "attention is faster without a mask that masks nothing"
    assert embeds.dtype == whole.prompt_embed.dtype


def test_dropping_nothing_or_everything_copies_nothing() -> None:
    whole = batch([9, 12, 10], [7, 5, 7])
    embeds, mask = drop_captions(whole, torch.zeros(3, dtype=torch.bool))
    assert embeds is whole.prompt_embed and mask is whole.prompt_embeds_mask
    embeds, mask = drop_captions(whole, torch.ones(3, dtype=torch.bool))
    assert embeds is whole.empty_prompt_embed and mask is whole.empty_prompt_embeds_mask


def test_dropping_leaves_the_batch_as_it_was() -> None:
    whole, same = batch([9, 12, 10], [7, 5, 7]), batch([9, 12, 10], [7, 5, 7])
    drop_captions(whole, torch.tensor([True, False, True]))
    assert torch.equal(whole.prompt_embed, same.prompt_embed)
    assert torch.equal(whole.prompt_embeds_mask, same.prompt_embeds_mask)
    assert torch.equal(whole.empty_prompt_embed, same.empty_prompt_embed)


def test_dropping_keeps_the_precision_of_the_embeddings() -> None:
    whole = batch([9, 12, 10], [7, 5, 7])
    half = whole.to(torch.device("cpu"), torch.bfloat16)
    embeds, _ = drop_captions(half, torch.tensor([True, False, True]))
    assert embeds.dtype == torch.bfloat16
    assert torch.equal(embeds[1, :12], half.prompt_embed[1])
