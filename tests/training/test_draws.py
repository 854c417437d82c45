"""Several draws of noise for each sample, and batches of Qwen-Image-2.1: each loss is that of its draw alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers.training_utils import compute_density_for_timestep_sampling

from qie.config import LossConfig
from qie.data.batch import collate
from qie.data.plan import PlannedBatch
from qie.errors import ConfigError, ModelError
from qie.families import FAMILIES
from qie.training.model.single_stream import use_single_stream
from qie.training.model.training_forward import use_training_forward
from qie.training.objective import Objective, draw_dropped, draw_noise, draw_sigmas, sigma_quantile
from qie.training.run import require_one_draw
from qie.types import Batch, Sample
from tests.training.adapters import trained_adapter

SHIFT = {"base_shift": 0.5, "max_shift": 1.15, "base_tokens": 256, "max_tokens": 4096}
KEYS = [f"{number:064x}" for number in range(3)]
SHAPES = {"logit_normal": {"logit_mean": 0.4, "logit_std": 1.2, "mode_scale": 1.0}, "mode": {"mode_scale": 1.29}}
DEFAULTS = {"logit_mean": 0.0, "logit_std": 1.0, "mode_scale": 1.29}


# The draws


def test_the_first_draw_of_a_sample_is_the_same_for_any_number_of_them_and_all_differ() -> None:
    one, three = (draw_noise(3, 7, KEYS, (2, 4), draws=count) for count in (1, 3))
    assert torch.equal(three[::3], one) and len({float(noise[0, 0]) for noise in three}) == 9
    one, three = (draw_sigmas(3, 7, KEYS, "uniform", draws=count) for count in (1, 3))
    assert torch.equal(three[::3], one) and len(set(three.tolist())) == 9


@pytest.mark.parametrize("stratified", [False, True])
@pytest.mark.parametrize("sampling", ["uniform", "logit_normal", "mode"])
def test_draws_are_the_same_while_another_thread_builds_a_model(sampling: str, stratified: bool) -> None:
    """Of another dtype, which is then torch's default in all threads."""

    def drawn() -> tuple[torch.Tensor, torch.Tensor]:
        dropped = draw_dropped(3, 7, [str(key) for key in range(200)], 0.5, "caption")
        return draw_sigmas(3, 7, KEYS, sampling, draws=4, stratified=stratified), dropped

    expected, before = drawn(), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert all(map(torch.equal, drawn(), expected))
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("sampling", ["uniform", "logit_normal", "mode"])
def test_a_quantile_is_where_the_density_has_it(sampling: str) -> None:
    shape = DEFAULTS | SHAPES.get(sampling, {})
    expected = compute_density_for_timestep_sampling(sampling, 500, **shape, generator=torch.Generator().manual_seed(4))
    chosen = torch.Generator().manual_seed(4)
    if sampling == "logit_normal":
        drawn = torch.normal(shape["logit_mean"], shape["logit_std"], (500,), generator=chosen)
        quantiles = torch.special.ndtr((drawn.double() - shape["logit_mean"]) / shape["logit_std"])
    else:
        quantiles = torch.rand(500, generator=chosen)
    torch.testing.assert_close(sigma_quantile(quantiles, sampling, **shape).float(), expected, rtol=1e-5, atol=1e-6)


def test_stratified_levels_of_a_sample_are_a_step_apart_and_each_is_distributed_as_one_alone() -> None:
    keys = [str(number) for number in range(2000)]
    levels = draw_sigmas(0, 0, keys, "uniform", draws=4, stratified=True).view(-1, 4)
    steps = levels.sort(dim=1).values.diff(dim=1)
    torch.testing.assert_close(steps, torch.full_like(steps, 0.25), rtol=0, atol=1.1e-3)  # the least level is 0.001
    for draw in levels.unbind(1):
        assert (draw.sort().values - torch.linspace(0, 1, 2000)).abs().max() < 0.04, "not uniform"
    alone = draw_sigmas(0, 0, keys, "uniform", draws=4).view(-1, 4)
    assert levels.mean(1).std() < 0.5 * alone.mean(1).std(), "a sample's mean level varies less"


def test_one_draw_cannot_be_stratified() -> None:
    assert torch.equal(draw_sigmas(0, 0, KEYS, "mode", stratified=True), draw_sigmas(0, 0, KEYS, "mode"))


# Their losses


@pytest.fixture(scope="module")
def model(tiny_21: Path) -> torch.nn.Module:
    transformer = trained_adapter(tiny_21, r=4)
    use_training_forward(transformer)
    return transformer.train()


def objective(draws: int = 1, **dropout: float) -> Objective:
    captions, controls = dropout.get("captions", 0.0), dropout.get("controls", 0.0)
    cpu = torch.device("cpu")
    return Objective(LossConfig(), captions, 3, SHIFT, cpu, torch.float32, controls, patch=1, draws_per_sample=draws)


def sample(number: int, tokens: int, controls: int = 1) -> Sample:
    """With values as wide as real ones."""
    random = torch.Generator().manual_seed(number)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random) * 2

    return Sample(
        key=f"{number:064x}",
        prompt="",
        pixel_latent=values(64, 1, 4, 6).half(),
        control_latent=tuple(values(64, 1, 4, 2 + 2 * control).half() for control in range(controls)),
        prompt_embed=values(tokens, 32).bfloat16(),
        prompt_embeds_mask=torch.ones(tokens, dtype=torch.bool),
        empty_tail=values(3, 32).bfloat16(),
        empty_prompt_embeds_mask=torch.ones(8, dtype=torch.bool),
        shared_prefix=5,
        image_slots=tuple(range(2, 2 + controls)),
    )


def batch_of(samples: Sequence[Sample], weights: Sequence[float] = ()) -> Batch:
    return collate(samples, PlannedBatch(tuple(range(len(samples))), tuple(weights) or (1.0,) * len(samples)))


def gradients(model: torch.nn.Module) -> torch.Tensor:
    found = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    return torch.cat(found)


def near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


@pytest.mark.parametrize("controls", [0, 1, 3])
def test_a_batch_of_unequal_prompts_has_the_losses_and_gradients_of_its_samples_alone(model, controls: int) -> None:
    """Captions and controls dropped, too."""
    made = objective(captions=0.5, controls=0.5)
    samples = [sample(number, tokens, controls) for number, tokens in enumerate((9, 21, 7, 14))]
    step = 6
    draws = made.draw(batch_of(samples), step)
    assert 0 < int(draws.dropped_prompts.sum()) < 4 and 0 < int(draws.dropped_controls.sum()) < 4
    losses = []
    for one in samples:
        loss = made.loss(model, batch_of([one]), step)
        (loss / 4).backward()
        losses.append(float(loss.detach()))
    expected = gradients(model)
    found = made.losses(model, batch_of(samples), draws)
    found.mean.backward()
    torch.testing.assert_close(found.loss.detach(), torch.tensor(losses), rtol=1e-5, atol=0)
    assert near(gradients(model), expected, 1e-5)


@pytest.mark.parametrize("controls", [0, 1, 3])
def test_k_draws_have_the_losses_and_gradients_of_k_rows(model, controls: int) -> None:
    made, weights = objective(draws=3), (1.5, 0.5)
    batch = batch_of([sample(1, 9, controls), sample(2, 7, controls)], weights)
    draws = made.draw(batch, 4)
    losses = torch.empty(2, 3)
    for number in range(3):
        row = replace(draws, noise=draws.noise[number::3], sigmas=draws.sigmas[number::3])
        alone = made.losses(model, batch, row)
        (alone.mean / 3).backward()
        losses[:, number] = alone.loss.detach()
    expected = gradients(model)
    found = made.losses(model, batch, draws)
    found.mean.backward()
    torch.testing.assert_close(found.loss.detach(), losses.flatten(), rtol=1e-6, atol=0)
    assert near(gradients(model), expected, 1e-5)
    assert found.weight.tolist() == [1.5] * 3 + [0.5] * 3
    assert torch.equal(made.loss(model, batch, 4), found.mean)


def test_a_sample_that_loses_its_controls_is_one_that_never_had_any(model) -> None:
    made, whole = objective(controls=1.0), sample(1, 9, 2)
    never = replace(whole, control_latent=(), image_slots=())
    assert torch.equal(made.loss(model, batch_of([whole]), 0), made.loss(model, batch_of([never]), 0))
    assert not torch.equal(made.loss(model, batch_of([whole]), 0), objective().loss(model, batch_of([whole]), 0))


def test_a_mask_weighs_each_draw_and_validation_has_one(model) -> None:
    mask = torch.zeros(4, 6, dtype=torch.uint8)
    mask[:, :3] = 255
    made = replace(objective(draws=2), section=LossConfig(mask_background_weight=0.1))
    masked, plain = batch_of([replace(sample(1, 9), loss_mask=mask)]), batch_of([sample(1, 9)])
    draws = made.draw(masked, 0)
    found, unweighted = (made.losses(model, batch, draws).loss for batch in (masked, plain))
    assert found.shape == (2,) and ((found - unweighted).abs() > 1e-3 * unweighted).all()
    assert made.validation_losses(model, plain, 0.5).loss.shape == (1,)


# What is refused


def test_several_draws_need_a_prefix_that_they_can_share() -> None:
    for family in FAMILIES.values():
        require_one_draw(family, 1)
        if family.interleaved:
            require_one_draw(family, 4)
            continue
        with pytest.raises(ConfigError, match="no prefix that several draws could share") as caught:
            require_one_draw(family, 2)
        assert caught.value.where == "train.draws_per_sample" and caught.value.found == 2


def test_a_transformer_whose_text_sees_the_noise_level_is_refused(tiny_21: Path) -> None:
    transformer = trained_adapter(tiny_21, r=4)
    transformer.register_to_config(causal_condition=False)
    with pytest.raises(ModelError, match="causal_condition"):
        use_single_stream(transformer)
