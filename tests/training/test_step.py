"""A batch's draws and losses: what they depend on and what not, and the model called as diffusers calls it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from PIL import Image
from torch.nn.functional import huber_loss
from torch.testing import assert_close

from qie.config import LossConfig
from qie.data.batch import collate
from qie.data.plan import PlannedBatch
from qie.training import objective
from qie.training.objective import NoiseDraws, Objective, unpack, velocity
from qie.types import Batch, Sample

CPU = torch.device("cpu")
SHIFT = {"base_shift": 0.5, "max_shift": 0.9, "base_tokens": 256, "max_tokens": 8192}
TOLERANCE = 2e-6  # of a loss; rounding in float32 was seen to do 4e-7
GOLDEN = Path(__file__).resolve().parent.parent / "data" / "golden"


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


# Draws


def test_draws_have_the_shapes_and_types_that_they_promise() -> None:
    draws = make_objective(captions=0.5, controls=0.5).draw(batch_of(sample(0), sample(1)), 4)
    assert draws.noise.shape == (2, 16, 1, 8, 6) and draws.sigmas.shape == (2,)
    assert draws.noise.dtype == draws.sigmas.dtype == torch.float32
    assert draws.dropped_prompts.shape == draws.dropped_controls.shape == (2,)
    assert draws.dropped_prompts.dtype == draws.dropped_controls.dtype == torch.bool


def test_a_samples_draws_are_the_same_alone_or_in_a_batch_and_differ_between_steps_and_seeds() -> None:
    made, samples = make_objective(captions=0.5, controls=0.5), [sample(number) for number in range(8)]
    together = tensors(made.draw(batch_of(*samples), 4))
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
    assert torch.equal(torch.rand(3), expected)
    assert all(equal(tensors(found[0]), tensors(made.draw(batch, 4))))


@pytest.mark.parametrize(
    ("sampling", "given"),
    [("logit_normal", {"logit_mean": 1.5}), ("logit_normal", {"logit_std": 0.1}), ("mode", {"mode_scale": 0.1})],
)
def test_each_parameter_of_the_levels_reaches_them(sampling: str, given: dict[str, float]) -> None:
    batch = batch_of(sample(0), sample(1))
    found = make_objective(timestep_sampling=sampling, **given).draw(batch, 4).sigmas
    assert torch.equal(found, objective.draw_sigmas(3, 4, batch.keys, sampling, **given))
    assert not torch.equal(found, make_objective(timestep_sampling=sampling).draw(batch, 4).sigmas)


@pytest.mark.parametrize(("captions", "controls"), [(0.0, 1.0), (1.0, 0.0)])
def test_each_dropout_has_its_own_rate(captions: float, controls: float) -> None:
    draws = make_objective(captions=captions, controls=controls).draw(batch_of(sample(0), sample(1)), 4)
    assert draws.dropped_prompts.tolist() == [bool(captions)] * 2
    assert draws.dropped_controls.tolist() == [bool(controls)] * 2


def test_dropouts_of_equal_rate_are_drawn_apart() -> None:
    batch = batch_of(*(sample(number) for number in range(16)))
    draws = make_objective(captions=0.5, controls=0.5).draw(batch, 4)
    assert not torch.equal(draws.dropped_prompts, draws.dropped_controls)


# Losses


@pytest.mark.parametrize(
    ("shift", "factor"), [("none", 1.0), (3.0, 3.0), ("dynamic", objective.dynamic_shift(12, **SHIFT))]
)
def test_levels_are_shifted_and_told_to_the_model_and_to_the_caller(shift: Any, factor: float) -> None:
    made, batch, model = make_objective(shift=shift), batch_of(sample(0), sample(1)), Still()
    draws = made.draw(batch, 4)
    losses = made.losses(model, batch, draws)
    assert torch.equal(losses.sigmas, objective.shift_sigmas(draws.sigmas, factor))
    assert losses.sigmas.dtype == torch.float32 and losses.sigmas.device == CPU
    assert torch.equal(model.asked[0]["timestep"], losses.sigmas)
    noisy = objective.add_noise(batch.pixel_latent.float(), draws.noise, losses.sigmas)
    assert torch.equal(unpack(model.asked[0]["hidden_states"][:, :12], 8, 6), noisy)


def test_the_loss_of_a_step_is_the_weighted_mean_of_its_samples_losses(model) -> None:
    made = make_objective(captions=0.5, controls=0.5)
    batch = batch_of(sample(0), sample(1), sample(2), weights=(1.5, 0.0, 2.25))
    losses = made.losses(model, batch, made.draw(batch, 4))
    assert losses.loss.shape == (3,) and losses.loss.requires_grad and losses.loss.dtype == torch.float32
    expected = (1.5 * losses.loss[0] + 2.25 * losses.loss[2]) / 3
    assert_close(made.loss(model, batch, 4), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_target_is_what_is_stored_whatever_the_models_precision_and_wherever_the_batch_was_moved(dtype) -> None:
    made, batch = make_objective(dtype=dtype), batch_of(sample(0), sample(1))
    draws = made.draw(batch, 4)
    expected = (draws.noise - batch.pixel_latent.float()).square().flatten(1).mean(1)
    assert_close(made.losses(Still(), batch, draws).loss, expected, rtol=TOLERANCE, atol=0)
    assert_close(made.losses(Still(), made.moved(batch), draws).loss, expected, rtol=TOLERANCE, atol=0)
    rounded = (draws.noise - batch.pixel_latent.to(torch.bfloat16).float()).square().flatten(1).mean(1)
    assert ((rounded - expected) / expected).abs().max() > 1e-5, "a rounded target would be another one"


def test_a_moved_batch_is_in_the_models_precision() -> None:
    model, made = Still(), make_objective(dtype=torch.bfloat16)
    batch = made.moved(batch_of(sample(0), sample(1, 12)))
    assert batch.pixel_latent.dtype == torch.float32
    made.losses(model, batch, made.draw(batch, 4))
    asked = model.asked[0]
    assert {asked[name].dtype for name in ("hidden_states", "timestep", "encoder_hidden_states")} == {torch.bfloat16}


def test_huber_and_weighting_reach_the_loss() -> None:
    batch = batch_of(sample(0), sample(1))
    made = make_objective(kind="huber", huber_delta=0.7, weighting="cosmap", shift="none")
    draws = made.draw(batch, 4)
    each = huber_loss(torch.zeros_like(draws.noise), draws.noise - batch.pixel_latent, reduction="none", delta=0.7)
    weight = 2 / (torch.pi * (1 - 2 * draws.sigmas + 2 * draws.sigmas**2))
    found = made.losses(Still(), batch, draws).loss
    assert_close(found, each.flatten(1).mean(1) * weight, rtol=1e-5, atol=0)
    ignored = make_objective(kind="mse", huber_delta=0.7, weighting="cosmap", shift="none")
    assert not torch.allclose(ignored.losses(Still(), batch, draws).loss, found, rtol=0.1)


@pytest.mark.parametrize(("foreground", "background"), [(1.0, 0.1), (0.5, 1.0), (5.0, 2.0)])
def test_a_mask_weighs_the_loss_where_its_two_weights_differ(foreground: float, background: float) -> None:
    batch = batch_of(sample(0, mask=True), sample(1))
    assert batch.loss_mask is not None and (batch.loss_mask[1] == 255).all()
    made = make_objective(mask_foreground_weight=foreground, mask_background_weight=background)
    draws = made.draw(batch, 4)
    weight = objective.mask_weight(batch.loss_mask, foreground, background)
    error = (draws.noise - batch.pixel_latent.float()).square() * weight[:, None, None]
    found = made.losses(Still(), batch, draws).loss
    assert_close(found, error.flatten(1).mean(1), rtol=1e-5, atol=0)
    plain = make_objective().losses(Still(), batch, draws).loss
    assert abs(float(found[0] / plain[0]) - 1) > 1e-3, "the mask has no effect"


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_a_mask_of_equal_weights_changes_no_bit(weight: float) -> None:
    batch, made = batch_of(sample(0, mask=True)), make_objective()
    draws = made.draw(batch, 4)
    weighted = make_objective(mask_foreground_weight=weight, mask_background_weight=weight)
    assert torch.equal(weighted.losses(Still(), batch, draws).loss, made.losses(Still(), batch, draws).loss)


# Dropout


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
def without_prompt_mask(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(objective, "velocity", lambda *arguments: velocity(*arguments[:-1], None))
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
        with without_prompt_mask(monkeypatch):
            changed.append(made.losses(model, batch_of(*samples), draws).loss)
    token, leak = (((each - alone) / alone).abs() for each in changed)
    assert token.min() > 1000 * TOLERANCE, "one token of a prompt has no effect"
    assert leak.max() > 1000 * TOLERANCE, "padding has no effect without a mask either"


# Validation


def test_validation_losses_are_the_same_each_time_and_drop_nothing(model) -> None:
    made = make_objective(captions=1.0, controls=1.0)
    batch = batch_of(sample(0), sample(1, 12))
    found = made.validation_losses(model, batch, 0.3)
    assert found.shape == (2,) and not found.requires_grad
    assert torch.equal(found, made.validation_losses(model, batch, 0.3))
    assert torch.equal(found, replace(made, caption_dropout_rate=0.0).validation_losses(model, batch, 0.3))
    assert torch.equal(found, replace(made, control_dropout_rate=0.0).validation_losses(model, batch, 0.3))
    assert not torch.allclose(found, made.validation_losses(model, batch, 0.7), rtol=0.01)


def test_validation_sees_the_same_noise_at_all_levels_and_other_noise_than_training() -> None:
    made, batch = make_objective(), batch_of(sample(0), sample(1))
    found = made.validation_losses(Still(), batch, 0.3)
    assert torch.equal(found, made.validation_losses(Still(), batch, 0.7))
    trained = torch.stack([made.losses(Still(), batch, made.draw(batch, number)).loss for number in range(20)])
    assert not (found == trained).any()


def test_validation_sees_the_given_level_before_the_shift_and_the_models_mode_comes_back() -> None:
    made, batch, model = make_objective(shift=3.0), batch_of(sample(0), sample(1)), Still()
    made.validation_losses(model.train(), batch, 0.3)
    assert model.training and model.was_training == [False]
    made.validation_losses(model.eval(), batch, 0.3)
    assert not model.training
    assert torch.equal(model.asked[0]["timestep"], objective.shift_sigmas(torch.full((2,), 0.3), 3.0))


def test_a_validation_that_fails_leaves_the_model_in_training() -> None:
    class Broken(torch.nn.Module):
        def forward(self, **arguments: Any) -> None:
            raise ZeroDivisionError

    broken = Broken().train()
    with pytest.raises(ZeroDivisionError):
        make_objective().validation_losses(broken, batch_of(sample(0)), 0.5)
    assert broken.training


# zero_cond_t


def without_zero_cond_t(model: QwenImageTransformer2DModel) -> QwenImageTransformer2DModel:
    twin = QwenImageTransformer2DModel.from_config({**model.config, "zero_cond_t": False})
    twin.load_state_dict(model.state_dict())
    return twin.eval()


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
    for number, (given, output) in enumerate(calls):
        (grid,) = given["img_shapes"]
        sizes = [(2 * height, 2 * width) for _, height, width in grid]
        parts = given["hidden_states"].split([height * width // 4 for height, width in sizes], dim=1)
        noisy, *controls = (unpack(part, *size) for part, size in zip(parts, sizes, strict=True))
        assert len(controls) == 2
        batch = replace(batch_of(sample(0)), control_latent=tuple(controls))
        with torch.no_grad():
            found = velocity(plus, noisy, given["timestep"], batch, embeds, None)
            assert_close(given["timestep"], scheduler.sigmas[number : number + 1], rtol=1e-6, atol=0)
        # The same weights, shapes and kernels, and no mask in either.
        assert given["encoder_hidden_states_mask"] is None
        assert torch.equal(found, unpack(output[:, : parts[0].shape[1]], *sizes[0]))
        assert found.std() > 0.1


def modulated(model: QwenImageTransformer2DModel, sigma: float, batch: Batch) -> torch.Tensor:
    """The image tokens as the first block modulates them, [B, target + controls, width]."""
    seen: list[torch.Tensor] = []

    def watch(module: Any, arguments: Any, given: dict[str, Any]) -> None:
        seen.append(given["hidden_states"])

    hook = model.transformer_blocks[0].attn.register_forward_pre_hook(watch, with_kwargs=True)
    with torch.no_grad():
        velocity(model, batch.pixel_latent, torch.full((len(batch),), sigma), batch, batch.prompt_embed, None)
    hook.remove()
    return seen[0]


def test_with_zero_cond_t_controls_are_modulated_as_at_level_0_and_the_target_at_its_own(plus) -> None:
    batch, twin = batch_of(sample(0), sample(1)).to(CPU, torch.float32), without_zero_cond_t(plus)
    found, target = modulated(plus, 0.7, batch), 12
    at_0, at_level = modulated(twin, 0.0, batch), modulated(twin, 0.7, batch)
    assert_close(found[:, target:], at_0[:, target:], rtol=1e-5, atol=1e-5)
    assert_close(found[:, :target], at_level[:, :target], rtol=1e-5, atol=1e-5)
    assert (at_level - at_0)[:, target:].abs().max() > 0.1 * at_0.std(), "the level has no effect"


def test_zero_cond_t_changes_the_loss_and_such_a_model_learns(plus, tiny_edit_plus: Path) -> None:
    made, batch = make_objective(), batch_of(sample(0), sample(1, 12))
    before = made.validation_losses(plus, batch, 0.5)
    assert not torch.allclose(before, made.validation_losses(without_zero_cond_t(plus), batch, 0.5), rtol=1e-4)
    model = strong(tiny_edit_plus)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for number in range(20):
        made.loss(model, batch, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (made.validation_losses(model, batch, 0.5) < 0.8 * before).all()
