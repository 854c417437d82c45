"""The objective: flow matching as diffusers defines it; randomness of seed, step and sample alone; the model's call."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPlusPipeline,
    QwenImageTransformer2DModel,
)
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_shift
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.testing import assert_close

from qie.config import LossConfig
from qie.data.batch import collate
from qie.data.plan import PlannedBatch
from qie.training import objective
from qie.training.objective import (
    NoiseDraws,
    Objective,
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
    velocity,
)
from qie.types import Batch, Sample

CPU = torch.device("cpu")
KEYS = tuple(f"{number:064x}" for number in range(4))
SHIFT = {"base_shift": 0.5, "max_shift": 0.9, "base_tokens": 256, "max_tokens": 8192}  # the released scheduler's
SAMPLINGS = ("uniform", "logit_normal", "mode")
TOLERANCE = 2e-6  # of a loss; rounding in float32 was seen to do 4e-7
GOLDEN = Path(__file__).resolve().parent.parent / "data" / "golden"
deterministic = settings(derandomize=True, deadline=None, database=None, max_examples=200)


def latents(*shape: int, seed: int = 0) -> torch.Tensor:
    """Values as wide as normalised latents are, with a few far out."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=random)
    return torch.where(torch.rand(shape, generator=random) < 0.02, values * 8, values)


def flow(count: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latent, noise and prediction of so many samples."""
    latent, noise, prediction = (latents(count, 16, 1, 4, 6, seed=seed + part) for part in range(3))
    return latent, noise, prediction


# Noise levels


@deterministic
@given(st.integers(1, 20_000))
@example(256)
@example(8192)
def test_the_dynamic_shift_is_that_of_diffusers_by_the_number_of_target_tokens(tokens: int) -> None:
    mu = calculate_shift(tokens, base_seq_len=256, max_seq_len=8192, base_shift=0.5, max_shift=0.9)
    assert dynamic_shift(tokens, **SHIFT) == pytest.approx(math.exp(mu), rel=1e-12)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="exponential")
    levels = torch.linspace(1.0, 0.02, 50)
    scheduler.set_timesteps(sigmas=levels.tolist(), mu=mu)
    assert_close(shift_sigmas(levels, dynamic_shift(tokens, **SHIFT)), scheduler.sigmas[:-1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("shift", [1.0, 0.5, 3.0, 12.0])
def test_a_static_shift_is_that_of_diffusers_scheduler_and_1_changes_no_bit(shift: float) -> None:
    unshifted = FlowMatchEulerDiscreteScheduler(shift=1.0).sigmas
    found = shift_sigmas(unshifted, shift)
    assert_close(found, FlowMatchEulerDiscreteScheduler(shift=shift).sigmas, rtol=1e-6, atol=0)
    assert shift != 1 or torch.equal(found, unshifted)
    assert shift_sigmas(torch.tensor([0.0, 1.0]), shift).tolist() == [0.0, 1.0]


def test_noise_is_added_as_diffusers_scheduler_adds_it_none_at_level_0_and_nothing_else_at_level_1() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    latent, noise, _ = flow(5)
    steps = torch.tensor([0, 1, 300, 700, 999])
    expected = scheduler.scale_noise(latent, scheduler.timesteps[steps], noise)
    assert_close(add_noise(latent, noise, scheduler.sigmas[steps]), expected, rtol=0, atol=1e-6)
    ends = add_noise(latent, noise, torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0]))
    assert torch.equal(ends[0], latent[0]) and torch.equal(ends[1], noise[1])


# Loss


def test_the_velocity_of_loss_0_leads_from_any_level_back_to_the_image() -> None:
    """x_t − σ·v = x₀: what the sampler does with the prediction is what the loss teaches."""
    latent, noise, _ = flow(3)
    sigmas = torch.tensor([0.1, 0.5, 0.9])
    assert flow_loss(noise - latent, noise - latent, sigmas).tolist() == [0.0, 0.0, 0.0]
    noisy = add_noise(latent, noise, sigmas)
    assert_close(noisy - sigmas.view(-1, 1, 1, 1, 1) * (noise - latent), latent, rtol=0, atol=1e-5)
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=[0.5])
    stepped = scheduler.step((noise - latent)[1:2], scheduler.timesteps[0], noisy[1:2]).prev_sample
    assert_close(stepped, latent[1:2], rtol=0, atol=1e-5)


def cosmap(sigma: float) -> float:
    return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))


WEIGHTINGS = {"none": lambda sigma: 1.0, "sigma_sqrt": lambda sigma: sigma**-2, "cosmap": cosmap}


@pytest.mark.parametrize(("weighting", "formula"), WEIGHTINGS.items(), ids=WEIGHTINGS)
@pytest.mark.parametrize("delta", [None, 0.05, 1.0, 3.0])
def test_each_samples_loss_is_its_mean_error_by_kind_and_weighting(
    weighting: str, formula: Callable[[float], float], delta: float | None
) -> None:
    latent, noise, error = flow(4)
    error = error * torch.tensor([0.01, 0.1, 1.0, 10.0]).view(-1, 1, 1, 1, 1)
    sigmas = torch.tensor([0.001, 0.3, 0.5, 1.0])
    found = flow_loss(noise - latent + error, noise - latent, sigmas, weighting=weighting, huber_delta=delta)
    size = error.double().abs()
    each = size**2 if delta is None else torch.where(size <= delta, size**2 / 2, delta * (size - delta / 2))
    weights = torch.tensor([formula(sigma) for sigma in sigmas.tolist()]).double()
    assert_close(found.double(), each.flatten(1).mean(1) * weights, rtol=1e-4, atol=1e-7)
    assert_close(compute_loss_weighting_for_sd3(weighting, sigmas).double(), weights, rtol=1e-5, atol=0)


@pytest.mark.parametrize("huber_delta", [None, 100.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_is_computed_in_float32_whatever_it_is_given(dtype: torch.dtype, huber_delta: float | None) -> None:
    prediction, target = (latents(2, 16, 1, 32, 32, seed=seed).to(dtype) for seed in range(2))
    found = flow_loss(prediction, target, torch.tensor([0.2, 0.8]), huber_delta=huber_delta)
    assert found.dtype == torch.float32
    exact = (prediction.double() - target.double()).square().flatten(1).mean(1)
    assert_close(found.double() * (1 if huber_delta is None else 2), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("huber_delta", [None, 100.0])
def test_a_pixel_weight_of_1_changes_nothing_and_weights_count_where_they_are(huber_delta: float | None) -> None:
    latent, noise, prediction = flow(2)
    given = {"sigmas": torch.tensor([0.2, 0.8]), "huber_delta": huber_delta}
    target = noise - latent
    plain = flow_loss(prediction, target, **given)
    assert torch.equal(flow_loss(prediction, target, pixel_weight=torch.ones(2, 4, 6), **given), plain)
    weight = torch.zeros(2, 4, 6)
    weight[0, 1, 2] = weight[1, 3, 5] = 24.0
    error = (prediction - target).square() / (1 if huber_delta is None else 2)
    expected = torch.stack([error[0, :, 0, 1, 2].mean(), error[1, :, 0, 3, 5].mean()])
    assert_close(flow_loss(prediction, target, pixel_weight=weight, **given), expected)


WEIGHT = st.one_of(st.just(0.0), st.floats(1e-6, 1e6))


@deterministic
@given(st.binary(min_size=24, max_size=24), WEIGHT, WEIGHT)
@example(bytes(24), 1.0, 0.0)  # weighs nothing anywhere
@example(bytes([255] * 24), 0.0, 1.0)
@example(bytes([1] + [0] * 23), 1.0, 0.0)  # covers as little as can be
@example(bytes([255] * 12 + [0] * 12), 1.0, 0.1)
def test_mask_weights_are_in_the_asked_proportion_and_1_on_average(
    covered: bytes, foreground: float, background: float
) -> None:
    mask = torch.tensor(list(covered), dtype=torch.uint8).view(1, 4, 6)
    share = mask.double() / 255
    raw = foreground * share + background * (1 - share)
    expected = raw / raw.mean() if raw.mean() > 0 else raw
    found = mask_weight(mask, foreground, background)
    assert found.dtype == torch.float32
    assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


# Tokens


@pytest.mark.parametrize("size", [(4, 6), (2, 2), (128, 96), (8, 2)])
def test_packing_and_unpacking_are_those_of_diffusers_pipeline_and_undo_each_other(size: tuple[int, int]) -> None:
    latent, tokens = latents(3, 16, 1, *size), latents(3, size[0] * size[1] // 4, 64)
    assert torch.equal(pack(latent), QwenImageEditPlusPipeline._pack_latents(latent, 3, 16, *size))
    expected = QwenImageEditPlusPipeline._unpack_latents(tokens, size[0] * 8, size[1] * 8, vae_scale_factor=8)
    assert torch.equal(unpack(tokens, *size), expected)
    assert torch.equal(unpack(pack(latent), *size), latent) and torch.equal(pack(unpack(tokens, *size)), tokens)


# Randomness


def test_each_argument_of_a_generator_counts_none_runs_into_the_next_and_earlier_draws_do_not() -> None:
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
    draws = [torch.rand(4, generator=generator(*each)).tolist() for each in arguments]
    assert len(set(map(tuple, draws))) == len(arguments)
    assert [torch.rand(4, generator=generator(*each)).tolist() for each in reversed(arguments)] == draws[::-1]


def test_noise_is_torchs_own_and_differs_between_samples_steps_and_seeds() -> None:
    expected = torch.randn(16, 1, 4, 6, generator=generator(3, 7, KEYS[1], "noise"))
    assert torch.equal(draw_noise(3, 7, KEYS, (16, 1, 4, 6))[1], expected) and expected.dtype == torch.float32
    draws = [draw_noise(seed, step, KEYS, (16, 1, 4, 6)) for seed, step in ((0, 0), (0, 1), (1, 0), (0, -1))]
    flat = torch.cat(draws).flatten(1)
    assert (torch.corrcoef(flat) - torch.eye(len(flat))).abs().max() < 0.2
    many = draw_noise(0, 0, [f"{number:064x}" for number in range(500)], (50,))
    assert many.mean(0).abs().max() < 0.2 and (many.std(0) - 1).abs().max() < 0.15, "across samples, too"


def mode_level(u: float, scale: float = 1.29) -> float:
    return 1 - u - scale * (math.cos(math.pi * u / 2) ** 2 - 1 + u)


def logit_normal(mean: float, spread: float) -> Callable[[float], float]:
    return lambda share: 1 / (1 + math.exp(-(mean + spread * float(torch.special.ndtri(torch.tensor(share))))))


@pytest.mark.parametrize(
    ("sampling", "given", "quantile"),
    [
        ("uniform", {}, lambda share: share),
        ("logit_normal", {}, logit_normal(0, 1)),
        ("logit_normal", {"logit_mean": 1.2, "logit_std": 0.5}, logit_normal(1.2, 0.5)),
        ("logit_normal", {"logit_mean": -0.5, "logit_std": 2.0}, logit_normal(-0.5, 2.0)),
        ("mode", {}, lambda share: mode_level(1 - share)),
        ("mode", {"mode_scale": -0.6}, lambda share: mode_level(1 - share, -0.6)),
        ("mode", {"mode_scale": 0.0}, lambda share: share),
    ],
)
def test_levels_are_those_of_diffusers_and_have_the_quantiles_of_their_density(
    sampling: str, given: dict[str, float], quantile: Callable[[float], float]
) -> None:
    """A positive logit_mean means more noise, as in arXiv:2403.03206."""
    keys = [str(number) for number in range(6000)]
    sigmas = draw_sigmas(0, 0, keys, sampling, **given)
    defaults = {"logit_mean": 0.0, "logit_std": 1.0, "mode_scale": 1.29} | given
    random = [generator(0, 0, key, "sigma") for key in keys[:4]]
    expected = [compute_density_for_timestep_sampling(sampling, 1, generator=each, **defaults) for each in random]
    assert torch.equal(sigmas[:4], torch.cat(expected).clamp(min=1e-3)) and sigmas.dtype == torch.float32
    shares = torch.tensor([0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99])
    quantiles = torch.tensor([quantile(share) for share in shares.tolist()])
    assert_close(torch.quantile(sigmas, shares), quantiles, rtol=0, atol=0.02)


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


def test_as_many_are_dropped_as_asked_for_and_those_of_a_lower_rate_with_a_higher_one_too() -> None:
    keys = [str(number) for number in range(4000)]
    dropped = {rate: draw_dropped(0, 0, keys, rate, "caption") for rate in (0.0, 0.1, 0.3, 0.5, 1.0)}
    for rate, found in dropped.items():
        share = float(found.float().mean())
        assert share == rate if rate in (0.0, 1.0) else share == pytest.approx(rate, abs=0.015)
    assert not any((dropped[low] & ~dropped[high]).any() for low, high in pairwise(dropped))


def test_dropouts_follow_neither_the_noise_level_nor_each_other() -> None:
    keys = [str(number) for number in range(3000)]
    dropouts = [draw_dropped(0, 0, keys, 0.5, what).float() for what in ("caption", "control")]
    likeness = torch.corrcoef(torch.stack([draw_sigmas(0, 0, keys, "uniform"), *dropouts]))
    assert (likeness - torch.eye(3)).abs().max() < 0.05


# What is dropped


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
        embeds = latents(len(lengths), max(lengths), 8, seed=seed)
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
        prompt_lengths=tuple(prompt_lengths),
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
    embeds, lengths = drop_captions(whole, torch.tensor(dropped, dtype=torch.bool))
    assert embeds.shape[1] == max(lengths)
    for number, drop in enumerate(dropped):
        length = empties[number] if drop else prompts[number]
        source = whole.empty_prompt_embed if drop else whole.prompt_embed
        assert lengths[number] == length
        assert torch.equal(embeds[number, :length], source[number, :length])
        assert (embeds[number, length:] == 0).all()
    if not any(dropped):
        assert embeds is whole.prompt_embed, "nothing is copied"
    if all(dropped):
        assert embeds is whole.empty_prompt_embed


def test_dropping_leaves_the_batch_as_it_was_and_keeps_its_precision() -> None:
    whole, same = (batch([9, 12, 10], [7, 5, 7]).to(CPU, torch.bfloat16) for _ in range(2))
    embeds, _ = drop_captions(whole, torch.tensor([True, False, True]))
    for name in ("prompt_embed", "prompt_embeds_mask", "empty_prompt_embed"):
        assert torch.equal(getattr(whole, name), getattr(same, name))
    assert embeds.dtype == torch.bfloat16 and torch.equal(embeds[1, :12], whole.prompt_embed[1])


def make_objective(
    *, captions: float = 0.0, controls: float = 0.0, dtype: torch.dtype = torch.float32, seed: int = 3, **section: Any
) -> Objective:
    return Objective(LossConfig(**section), captions, seed, SHIFT, CPU, dtype, controls)


def sample(number: int, tokens: int = 9, empty: int = 6, *, mask: bool = False) -> Sample:
    """Values as wide as real ones, and wider: what is lost or leaks shows."""
    random = torch.Generator().manual_seed(number)

    def values(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=random) * 2).half()

    return Sample(
        key=f"{number:064x}",
        prompt="",
        pixel_latent=values(16, 1, 8, 6),
        control_latent=(values(16, 1, 8, 6), values(16, 1, 4, 8)),
        prompt_embed=values(tokens, 32),
        prompt_embeds_mask=torch.ones(tokens, dtype=torch.bool),
        empty_tail=values(empty - 2, 32),
        empty_prompt_embeds_mask=torch.ones(empty, dtype=torch.bool),
        shared_prefix=2,
        loss_mask=torch.randint(256, (8, 6), generator=random).to(torch.uint8) if mask else None,
    )


def batch_of(*samples: Sample, weights: tuple[float, ...] | None = None) -> Batch:
    return collate(samples, PlannedBatch(tuple(range(len(samples))), weights or (1.0,) * len(samples)))


class Still(torch.nn.Module):
    """Predicts 0 everywhere, and keeps what it was asked: the loss is that of the target alone."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[dict[str, Any]] = []
        self.was_training: list[bool] = []

    def forward(self, hidden_states: torch.Tensor, **others: Any) -> tuple[torch.Tensor]:
        self.asked.append({"hidden_states": hidden_states, **others})
        self.was_training.append(self.training)
        return (torch.zeros_like(hidden_states),)


def strong(folder: Path) -> QwenImageTransformer2DModel:
    """The tiny transformer with the prompt's part in it scaled up, so that what it predicts hangs on each token."""
    model = QwenImageTransformer2DModel.from_pretrained(folder / "transformer")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("add_k_proj.weight", "add_v_proj.weight", "txt_in.weight", "proj_out.weight")):
                weight.mul_(4)
    return model


@pytest.fixture(scope="module", params=["tiny_edit", "tiny_edit_plus"])
def model(request: pytest.FixtureRequest) -> QwenImageTransformer2DModel:
    return strong(request.getfixturevalue(request.param)).eval()


@pytest.fixture(scope="module")
def plus(tiny_edit_plus: Path) -> QwenImageTransformer2DModel:
    """With zero_cond_t, as from the release 2511 on."""
    model = strong(tiny_edit_plus).eval()
    assert model.config.zero_cond_t
    return model


def tensors(draws: NoiseDraws) -> list[torch.Tensor]:
    return [getattr(draws, field.name) for field in fields(NoiseDraws)]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> list[bool]:
    return [torch.equal(mine, its) for mine, its in zip(one, other, strict=True)]


# The draws of a batch


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_samples_draws_are_the_same_alone_or_in_a_batch_and_differ_between_steps_and_seeds(sampling: str) -> None:
    made = make_objective(captions=0.5, controls=0.5, timestep_sampling=sampling)
    samples = [sample(number) for number in range(8)]
    draws = made.draw(batch_of(*samples), 4)
    assert draws.noise.shape == (8, 16, 1, 8, 6) and draws.sigmas.shape == (8,)
    assert draws.noise.dtype == draws.sigmas.dtype == torch.float32
    assert draws.dropped_prompts.dtype == draws.dropped_controls.dtype == torch.bool
    together = tensors(draws)
    for number, each in enumerate(samples):
        alone = tensors(made.draw(batch_of(each), 4))
        assert all(equal(alone, [tensor[number : number + 1] for tensor in together]))
    for other in (made.draw(batch_of(*samples), 5), replace(made, seed=4).draw(batch_of(*samples), 4)):
        assert not any(equal(together, tensors(other)))


def test_draws_need_no_data_and_another_thread_draws_the_same_without_touching_the_global_generator() -> None:
    made, batch = make_objective(captions=0.5, controls=0.5), batch_of(*(sample(number) for number in range(4)))
    shapes = replace(batch, pixel_latent=batch.pixel_latent.to("meta"))
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    found: list[NoiseDraws] = []
    thread = threading.Thread(target=lambda: found.append(made.draw(shapes, 4)))
    thread.start()
    thread.join()
    assert all(equal(tensors(found[0]), tensors(made.draw(batch, 4))))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("sampling", "given"),
    [("logit_normal", {"logit_mean": 1.5}), ("logit_normal", {"logit_std": 0.1}), ("mode", {"mode_scale": 0.1})],
)
def test_each_parameter_of_the_levels_reaches_them(sampling: str, given: dict[str, float]) -> None:
    batch = batch_of(sample(0), sample(1))
    found = make_objective(timestep_sampling=sampling, **given).draw(batch, 4).sigmas
    assert torch.equal(found, draw_sigmas(3, 4, batch.keys, sampling, **given))
    assert not torch.equal(found, make_objective(timestep_sampling=sampling).draw(batch, 4).sigmas)


def test_each_dropout_has_its_own_rate() -> None:
    for captions, controls in ((0.0, 1.0), (1.0, 0.0)):
        draws = make_objective(captions=captions, controls=controls).draw(batch_of(sample(0), sample(1)), 4)
        assert draws.dropped_prompts.tolist() == [bool(captions)] * 2
        assert draws.dropped_controls.tolist() == [bool(controls)] * 2


# Losses


@pytest.mark.parametrize(("shift", "factor"), [("none", 1.0), (3.0, 3.0), ("dynamic", dynamic_shift(12, **SHIFT))])
def test_levels_are_shifted_and_told_to_the_model_and_to_the_caller(shift: Any, factor: float) -> None:
    made, batch, model = make_objective(shift=shift), batch_of(sample(0), sample(1)), Still()
    draws = made.draw(batch, 4)
    losses = made.losses(model, batch, draws)
    assert torch.equal(losses.sigmas, shift_sigmas(draws.sigmas, factor))
    assert losses.sigmas.dtype == torch.float32 and losses.sigmas.device == CPU
    assert torch.equal(model.asked[0]["timestep"], losses.sigmas)
    noisy = add_noise(batch.pixel_latent.float(), draws.noise, losses.sigmas)
    assert torch.equal(unpack(model.asked[0]["hidden_states"][:, :12], 8, 6), noisy)


def test_the_loss_of_a_step_is_the_weighted_mean_of_its_samples_losses(model) -> None:
    made = make_objective(captions=0.5, controls=0.5)
    batch = batch_of(sample(0), sample(1), sample(2), weights=(1.5, 0.0, 2.25))
    losses = made.losses(model, batch, made.draw(batch, 4))
    assert losses.loss.shape == (3,) and losses.loss.requires_grad and losses.loss.dtype == torch.float32
    expected = (1.5 * losses.loss[0] + 2.25 * losses.loss[2]) / 3
    assert_close(made.loss(model, batch, 4), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_moved_batch_is_in_the_models_precision_but_its_target_is_what_is_stored(dtype: torch.dtype) -> None:
    made, batch, model = make_objective(dtype=dtype), batch_of(sample(0), sample(1, 12)), Still()
    draws = made.draw(batch, 4)
    expected = (draws.noise - batch.pixel_latent.float()).square().flatten(1).mean(1)
    for moved in (batch, made.moved(batch)):
        assert_close(made.losses(model, moved, draws).loss, expected, rtol=1e-7, atol=0)
    asked = model.asked[-1]
    assert {asked[name].dtype for name in ("hidden_states", "timestep", "encoder_hidden_states")} == {dtype}
    rounded = (draws.noise - batch.pixel_latent.to(torch.bfloat16).float()).square().flatten(1).mean(1)
    assert ((rounded - expected) / expected).abs().max() > 1e-5, "a rounded target would be another one"


def test_huber_and_weighting_reach_the_loss_and_delta_only_that_of_huber() -> None:
    batch, given = batch_of(sample(0), sample(1)), {"huber_delta": 0.7, "weighting": "cosmap", "shift": "none"}
    draws = make_objective().draw(batch, 4)
    parts = (torch.zeros_like(draws.noise), draws.noise - batch.pixel_latent, draws.sigmas)
    for kind, delta in (("huber", 0.7), ("mse", None)):
        found = make_objective(kind=kind, **given).losses(Still(), batch, draws).loss
        assert_close(found, flow_loss(*parts, weighting="cosmap", huber_delta=delta), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("foreground", "background"), [(1.0, 0.1), (0.5, 1.0), (5.0, 2.0), (1.0, 1.0), (0.3, 0.3)])
def test_a_mask_weighs_the_loss_where_its_two_weights_differ_and_else_changes_no_bit(
    foreground: float, background: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(sample(0, mask=True), sample(1))
    assert batch.loss_mask is not None and (batch.loss_mask[1] == 255).all()
    made = make_objective(mask_foreground_weight=foreground, mask_background_weight=background)
    draws = made.draw(batch, 4)
    if foreground == background:
        monkeypatch.setattr(objective, "mask_weight", None)  # nobody asks for weights
    found, plain = (each.losses(Still(), batch, draws).loss for each in (made, make_objective()))
    if foreground == background:
        assert torch.equal(found, plain)
        return
    weight = mask_weight(batch.loss_mask, foreground, background)
    error = (draws.noise - batch.pixel_latent.float()).square() * weight[:, None, None]
    assert_close(found, error.flatten(1).mean(1), rtol=1e-5, atol=0)
    assert abs(float(found[0] / plain[0]) - 1) > 1e-3, "the mask has no effect"


# Dropout and padding in a batch


def test_a_sample_without_controls_is_one_whose_controls_are_zeros_and_keeps_its_prompt(model) -> None:
    made, samples = make_objective(controls=0.5), [sample(number) for number in range(4)]
    batch = batch_of(*samples)
    draws = made.draw(batch, 4)
    dropped = draws.dropped_controls.tolist()
    assert 0 < sum(dropped) < 4
    blank = [replace(each, control_latent=tuple(map(torch.zeros_like, each.control_latent))) for each in samples]
    expected = batch_of(*(blank[n] if drop else samples[n] for n, drop in enumerate(dropped)))
    none = replace(draws, dropped_controls=torch.zeros(4, dtype=torch.bool))
    with torch.no_grad():
        found, plain = made.losses(model, batch, draws).loss, made.losses(model, batch, none).loss
        # One pass over the same numbers: zeros are zeros, whoever wrote them.
        assert torch.equal(found, made.losses(model, expected, none).loss)
    changed = ((found - plain) / plain).abs() > 1000 * TOLERANCE
    assert changed.tolist() == dropped, "controls have an effect where they were dropped, and nowhere else"


@contextmanager
def without_prompt_lengths(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def padded(*arguments: Any) -> torch.Tensor:
        *others, prompt, _, dropped = arguments
        return velocity(*others, prompt, prompt.shape[1:2] * len(prompt), dropped)

    with monkeypatch.context() as patched:
        patched.setattr(objective, "velocity", padded)
        yield


def with_another_last_token(whole: Sample) -> Sample:
    prompt, empty = whole.prompt_embed.clone(), whole.empty_tail.clone()
    prompt[-1], empty[-1] = prompt[-1].flip(0) * 2, empty[-1].flip(0) * 2
    return replace(whole, prompt_embed=prompt, empty_tail=empty)


@pytest.mark.parametrize("number", [0, 1, 7, 11])
def test_padding_does_not_leak_a_batch_has_the_mean_of_its_samples_losses(
    model, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of four lengths, null prompts of three, each dropped or not, controls too."""
    made = make_objective(captions=0.5, controls=0.5, seed=0)
    samples = [sample(0, 9), sample(1, 21, 8), sample(2, 4, 5), sample(3, 14, 7)]
    draws = made.draw(batch_of(*samples), number)
    assert 0 < int(draws.dropped_prompts.sum()) < 4 and 0 < int(draws.dropped_controls.sum()) < 4
    with torch.no_grad():
        alone = torch.stack([made.loss(model, batch_of(each), number) for each in samples])
        together = made.losses(model, batch_of(*samples), draws).loss
        assert_close(together, alone, rtol=TOLERANCE, atol=0)
        assert_close(made.loss(model, batch_of(*samples), number), alone.mean(), rtol=TOLERANCE, atol=0)
        changed = [made.losses(model, batch_of(*map(with_another_last_token, samples)), draws).loss]
        with without_prompt_lengths(monkeypatch):
            changed.append(made.losses(model, batch_of(*samples), draws).loss)
    token, leak = (((each - alone) / alone).abs() for each in changed)
    assert token.min() > 1000 * TOLERANCE, "one token of a prompt has no effect"
    assert leak.max() > 1000 * TOLERANCE, "padding has no effect where it is read"


# Validation


def test_validation_losses_are_the_same_each_time_and_drop_nothing(model) -> None:
    made = make_objective(captions=1.0, controls=1.0)
    batch = batch_of(sample(0), sample(1, 12))
    found = made.validation_losses(model, batch, 0.3).loss
    assert found.shape == (2,) and not found.requires_grad
    for same in (made, replace(made, caption_dropout_rate=0.0), replace(made, control_dropout_rate=0.0)):
        assert torch.equal(found, same.validation_losses(model, batch, 0.3).loss)
    assert not torch.allclose(found, made.validation_losses(model, batch, 0.7).loss, rtol=0.01)


def test_validation_takes_the_level_before_the_shift_noise_unlike_trainings_and_gives_the_models_mode_back() -> None:
    made, batch, model = make_objective(shift=3.0), batch_of(sample(0), sample(1)), Still()
    found = made.validation_losses(model.train(), batch, 0.3).loss
    assert model.training and model.was_training == [False]
    assert torch.equal(model.asked[0]["timestep"], shift_sigmas(torch.full((2,), 0.3), 3.0))
    assert torch.equal(found, made.validation_losses(model.eval(), batch, 0.7).loss), "the same noise at all levels"
    assert not model.training
    trained = torch.stack([made.losses(Still(), batch, made.draw(batch, number)).loss for number in range(20)])
    assert not (found == trained).any()


def test_a_validation_that_fails_leaves_the_model_in_training() -> None:
    class Broken(torch.nn.Module):
        def forward(self, **arguments: Any) -> None:
            raise ZeroDivisionError

    broken = Broken().train()
    with pytest.raises(ZeroDivisionError):
        make_objective().validation_losses(broken, batch_of(sample(0)), 0.5)
    assert broken.training


# zero_cond_t


def test_velocity_is_bit_for_bit_what_the_released_pipeline_computes_in_each_step(
    plus, tiny_edit_plus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", 128 * 128)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(tiny_edit_plus / "scheduler")
    vae = AutoencoderKLQwenImage.from_pretrained(tiny_edit_plus / "vae")
    pipeline = diffusers.QwenImageEditPlusPipeline(scheduler, vae, None, None, None, plus)
    pipeline.set_progress_bar_config(disable=True)
    embeds = sample(0, 11).prompt_embed.float()[None]
    calls: list[tuple[dict[str, Any], torch.Tensor]] = []

    def watch(module: Any, arguments: Any, given: dict[str, Any], output: Any) -> None:
        calls.append((given, output[0]))

    hook = plus.register_forward_hook(watch, with_kwargs=True)
    try:
        pipeline(
            image=[Image.open(GOLDEN / name).convert("RGB") for name in ("chelsea.png", "coffee.png")],
            prompt_embeds=embeds,
            prompt_embeds_mask=torch.ones(embeds.shape[:2], dtype=torch.long),
            true_cfg_scale=1.0,
            height=96,
            width=160,
            num_inference_steps=3,
            generator=torch.Generator().manual_seed(5),
            output_type="latent",
        )
    finally:
        hook.remove()
    assert len(calls) == 3
    for number, (asked, output) in enumerate(calls):
        (grid,) = asked["img_shapes"]
        sizes = [(2 * height, 2 * width) for _, height, width in grid]
        parts = asked["hidden_states"].split([height * width // 4 for height, width in sizes], dim=1)
        noisy, *controls = (unpack(part, *size) for part, size in zip(parts, sizes, strict=True))
        assert len(controls) == 2
        batch = replace(batch_of(sample(0)), control_latent=tuple(controls))
        with torch.no_grad():
            found = velocity(plus, noisy, asked["timestep"], batch, embeds, [11])
            assert_close(asked["timestep"], scheduler.sigmas[number : number + 1], rtol=1e-6, atol=0)
        # The same weights, shapes and kernels, and no mask in either.
        assert asked["encoder_hidden_states_mask"] is None
        assert torch.equal(found, unpack(output[:, : parts[0].shape[1]], *sizes[0]))
        assert found.std() > 0.1
