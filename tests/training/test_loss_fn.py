"""A loss of the caller's, `qie.train(loss_fn=…)`, and callbacks: what they get, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from qie.config import load_config
from qie.data.opening import open_stream
from qie.errors import ConfigError, QieError, UsageError
from qie.pretrained import open_pretrained
from qie.training.loop import Listener, Outcome, train
from qie.training.objective import LossFunction, loss_name
from qie.types import Batch
from tests.conftest import forget_accelerate
from tests.training.runs import Bench, losses, validations
from tests.training.test_objective import Still, batch_of, make_objective, sample


def squared(prediction: torch.Tensor, target: torch.Tensor, batch: Batch, sigmas: torch.Tensor) -> torch.Tensor:
    return (prediction - target).square().flatten(1).mean(1)


def run(bench: Bench, output: Path, loss_fn: LossFunction | None, steps: int = 2, *sets: str, **more) -> Outcome:
    forget_accelerate()
    words = [f"train.output_dir={output}", f"train.max_steps={steps}", "train.checkpoint_every=1", *sets]
    config = load_config(bench.folder / "config.yaml", words)
    pretrained = open_pretrained(
        config.model.pretrained_model_name_or_path, components=("transformer", "scheduler", "vae")
    )
    stream = open_stream(bench.folder / "shards", validation_rows=2)
    return train(config, pretrained, stream, Accelerator(cpu=True), loss_fn=loss_fn, **more)


# What the function gets


def test_the_squared_error_as_a_loss_function_is_the_loss_in_training_and_in_validation() -> None:
    model, batch, plain = Still(), batch_of(sample(1), sample(2)), make_objective(captions=0.5)
    own = replace(plain, loss_fn=squared)
    draws = plain.draw(batch, 5)
    assert torch.equal(own.losses(model, batch, draws).loss, plain.losses(model, batch, draws).loss)
    assert torch.equal(own.validation_losses(model, batch, 0.3).loss, plain.validation_losses(model, batch, 0.3).loss)


def test_it_gets_float32_noise_levels_after_the_shift_and_what_gives_back_clean_and_noisy_latents() -> None:
    batch = batch_of(sample(1, mask=True), sample(2), weights=(1.0, 0.0))
    model, got = Still(), {}

    def keep(prediction: torch.Tensor, target: torch.Tensor, batch: Batch, sigmas: torch.Tensor) -> torch.Tensor:
        got.update(prediction=prediction, target=target, batch=batch, sigmas=sigmas)
        return target.flatten(1).mean(1)

    own = replace(make_objective(dtype=torch.bfloat16), loss_fn=keep)
    draws = own.draw(batch, 1)
    found = own.losses(model, batch, draws)
    assert got["prediction"].dtype == got["target"].dtype == got["sigmas"].dtype == torch.float32
    assert torch.equal(got["target"], draws.noise - batch.pixel_latent.float())
    assert torch.equal(got["sigmas"], found.sigmas) and not torch.equal(found.sigmas, draws.sigmas)
    assert torch.equal(got["batch"].loss_mask, batch.loss_mask)
    level = got["sigmas"].view(-1, 1, 1, 1, 1)
    noisy = (1 - level) * got["batch"].pixel_latent + level * draws.noise
    torch.testing.assert_close(got["batch"].pixel_latent + level * got["target"], noisy)
    assert torch.equal(found.weight, batch.weight) and found.mean == (found.loss * batch.weight).mean()


# What is refused


@pytest.mark.parametrize(
    ("give", "found"),
    [
        (lambda error, sigmas: error.mean(), r"float32 of shape \[\]"),
        (lambda error, sigmas: error, r"shape \[2, 16, 1, 8, 6\]"),
        (lambda error, sigmas: sigmas > 0.5, "torch.bool"),
        (lambda error, sigmas: 0.5, r"found: +0\.5"),
    ],
)
def test_what_is_not_one_loss_for_each_draw_is_refused(give: Callable, found: str) -> None:
    batch = batch_of(sample(1), sample(2))
    own = replace(make_objective(), loss_fn=lambda prediction, target, batch, sigmas: give(target, sigmas))
    with pytest.raises(UsageError, match="one loss for each draw") as error:
        own.losses(Still(), batch, own.draw(batch, 0))
    assert error.match(found) and error.match(r"shape \[2\]")


def test_a_loss_without_a_gradient_is_refused_in_training_alone() -> None:
    weight, batch = torch.nn.Parameter(torch.ones(())), batch_of(sample(1))
    model = Still()
    model.forward = lambda hidden_states, **others: (hidden_states * weight,)
    own = replace(make_objective(), loss_fn=lambda prediction, *rest: squared(prediction.detach(), *rest))
    with pytest.raises(UsageError, match="has no gradient"):
        own.losses(model, batch, own.draw(batch, 0))
    assert own.validation_losses(model, batch, 0.5).loss.isfinite()


@pytest.mark.parametrize(
    "setting",
    ["weighting=cosmap", "kind=huber", "mask_foreground_weight=2.0", "mask_background_weight=0"],
)
def test_settings_of_the_loss_that_it_replaces_are_refused_before_weights_are_read(
    setting: str, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qie.training.run.TrainableModel", None)
    with pytest.raises(ConfigError, match=rf"loss\.{setting.partition('=')[0]} is part of the loss that loss_fn"):
        run(bench, tmp_path, squared, 1, f"loss.{setting}")


# Runs


def doubled(prediction: torch.Tensor, target: torch.Tensor, batch: Batch, sigmas: torch.Tensor) -> torch.Tensor:
    return 2 * squared(prediction, target, batch, sigmas)


def test_a_run_trains_with_it_and_only_one_with_the_same_resumes(bench: Bench, plain: Path, tmp_path: Path) -> None:
    said: list[tuple[str, object]] = []
    callbacks = [Listener(step=lambda metrics, name=name: said.append((name, metrics.step))) for name in "ab"]
    run(bench, tmp_path, doubled, callbacks=callbacks)
    assert said == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert losses(tmp_path)[0] == 2 * losses(plain)[0]
    assert validations(tmp_path)[0] == (0, 2 * validations(plain)[0][1])
    with pytest.raises(QieError, match="loss_fn changed") as error:
        run(bench, tmp_path, None, 3, resume="latest")
    assert error.match("'doubled'") and error.match("None")
    old = Listener(step=lambda metrics: said.append(("listener=", metrics.step)))
    with pytest.warns(DeprecationWarning, match=r"callbacks=\[…\]"):
        assert run(bench, tmp_path, partial(doubled), 3, resume="latest", listener=old).step == 3
    assert said[-1] == ("listener=", 3)


def test_names_of_loss_functions() -> None:
    class Perceptual:
        def __call__(self, *_: object) -> None: ...

    assert loss_name(squared) == loss_name(partial(squared)) == "squared"
    assert loss_name(Perceptual()).endswith("Perceptual")
