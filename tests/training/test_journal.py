"""What a run tells: metrics.jsonl, run.json, the model card, trackers, sample images."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from qie.training.flops import Architecture, step_flops
from qie.training.objective import Objective
from qie.training.reporting.card import read_run
from qie.training.reporting.metrics import LEVELS, StepMetrics, by_level
from qie.training.run import Run
from tests.training.runs import ROWS, Bench, checkpoint, lines, losses, names, validations


@pytest.fixture(scope="module")
def sampled(bench: Bench, photos: Path) -> Path:
    """A run with sample images, TensorBoard, and an adapter that does much."""
    image = str(min((photos / "control_images").glob("*.png")))
    bench.train(
        bench.folder / "sampled",
        data__area_px=64 * 64,
        data__allow_tiny=True,
        cache__accept_recipe=True,  # the sample images are smaller than those of the shards
        logging__report_to=["tensorboard"],
        logging__run_name="a run",
        train__checkpoint_every=2,
        validation__samples=[{"images": [image], "prompt": "make it night", "seed": 7}],
        validation__sample_steps=2,
    )
    return bench.folder / "sampled"


@pytest.fixture(scope="module")
def events(sampled: Path) -> EventAccumulator:
    (file,) = (sampled / "qie").glob("events.*")  # of add_hparams there are others, further down
    return EventAccumulator(str(file)).Reload()


def strictly(line: str) -> dict[str, object]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_each_step_is_a_line_whose_loss_is_the_weighted_mean(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some batches here are filled up with samples that count for nothing."""
    seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    computed = Objective.losses

    def remember(self, model, batch, draws):
        found = computed(self, model, batch, draws)
        if torch.is_grad_enabled():
            seen.append((found.loss.detach().clone(), found.sigmas, batch.weight))
        return found

    monkeypatch.setattr(Objective, "losses", remember)
    bench.train(tmp_path, data__batch_size=3, train__gradient_accumulation_steps=2)
    written = [strictly(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in written if "loss" in line]
    assert [list(line) for line in steps] == [
        [*(field.name for field in fields(StepMetrics) if field.name not in ("preference", "preserved_loss")), "time"]
    ] * 4
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert [line["step"] for line in written if "loss" not in line] == [0, 2, 4]
    assert any(bool((weight == 0).any()) for _, _, weight in seen)
    for number, line in enumerate(steps):
        loss, sigmas, weight = (torch.cat(parts) for parts in zip(*seen[2 * number : 2 * number + 2], strict=True))
        assert line["loss"] == pytest.approx(float((loss * weight).mean()), rel=1e-6)
        assert line["samples"] == int((weight > 0).sum())
        for part in range(LEVELS):
            there = (weight > 0) & (sigmas >= part / LEVELS) & (sigmas < (part + 1) / LEVELS)
            expected = pytest.approx(float(loss[there].mean()), rel=1e-6) if bool(there.any()) else None
            assert line["loss_by_level"][part] == expected
        assert line["data_wait_s"] <= line["step_time_s"]
        assert line["samples_per_s"] == pytest.approx(line["samples"] / line["step_time_s"])


def test_a_loss_that_is_no_number_is_null_in_every_file(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = Objective.losses

    def nan(self, model, batch, draws):
        found = computed(self, model, batch, draws)
        if torch.is_grad_enabled():
            found.loss.mul_(float("nan"))
        return found

    monkeypatch.setattr(Objective, "losses", nan)
    bench.train(tmp_path, train__max_nonfinite_steps=9)
    assert losses(tmp_path) == [None] * 4
    files = [*(tmp_path / "metrics.jsonl").read_text().splitlines(), (tmp_path / "run.json").read_text()]
    files.append((checkpoint(tmp_path, 4) / "state.json").read_text())
    assert all(strictly(text) for text in files)
    assert read_run(tmp_path).final_loss is None
    assert [loss for _, loss in validations(tmp_path)] == [validations(tmp_path)[0][1]] * 3, "no weight has changed"


def test_rows_kept_out_cover_the_noise_levels_before_the_first_step_every_nth_and_after_the_last(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[float] = []
    computed = Objective.validation_losses
    monkeypatch.setattr(Objective, "validation_losses", lambda *given: levels.append(given[-1]) or computed(*given))
    bench.train(tmp_path, train__max_steps=3, validation__rows=4)
    assert levels == [0.125, 0.375, 0.625, 0.875] * 3
    assert [step for step, _ in validations(tmp_path)] == [0, 2, 3]
    for line in lines(tmp_path):
        quarters = line.get("validation_loss_by_level")
        assert quarters is None or sum(quarters) / 4 == pytest.approx(line["validation_loss"])


def test_losses_by_level_are_means_of_quarters_and_both_ends_count() -> None:
    levels, losses = torch.tensor([0.0, 0.2, 0.25, 1.0]), torch.tensor([1.0, 2.0, 4.0, 8.0])
    assert by_level(levels, losses) == (1.5, 4.0, None, 8.0)


def test_run_json_and_the_card_tell_what_the_metrics_tell(sampled: Path, tiny_edit: Path) -> None:
    report, written = read_run(sampled), lines(sampled)
    assert (report.steps, report.samples, report.world_size) == (4, ROWS - 2, 1)
    assert report.base_model == str(tiny_edit) and report.family == "edit"
    assert report.final_loss == losses(sampled)[-1]
    assert list(report.validation_losses) == validations(sampled)
    assert list(report.checkpoints) == names(sampled) == ["checkpoint-000002", "checkpoint-000004"]
    assert report.finished is not None and report.started <= report.finished
    assert report.config["train"]["max_steps"] == 4
    assert len(written) == 4 + 3
    for step in (2, 4):
        card = (checkpoint(sampled, step) / "README.md").read_text()
        of_then = [loss for at, loss in validations(sampled) if at <= step]
        assert f"| steps | {step} |" in card
        assert f"| training loss, last step | {losses(sampled)[step - 1]:.4f} |" in card
        assert f"{of_then[0]:.4f} at step 0 → {of_then[-1]:.4f} at step {step}" in card


def test_until_its_end_a_run_is_not_finished_and_keeps_its_start_when_it_goes_on(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training_step = Run.training_step

    def failing(run):
        if run.step == 3:
            raise KeyboardInterrupt
        return training_step(run)

    with monkeypatch.context() as within:
        within.setattr(Run, "training_step", failing)
        bench.train(tmp_path, train__checkpoint_every=2, code=130)
    assert read_run(tmp_path).finished is None
    told = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(told | {"started": "2020-02-02T20:20:20+00:00"}))
    bench.train(tmp_path, "--resume", "latest")
    assert read_run(tmp_path).started == "2020-02-02T20:20:20+00:00"
    assert read_run(tmp_path).finished is not None


def test_samples_are_generated_at_each_validation_and_change_no_loss(
    bench: Bench, sampled: Path, photos: Path, tmp_path: Path
) -> None:
    files = sorted((sampled / "samples").glob("*.*"))
    assert [file.name for file in files] == [f"step-{step:06d}-0.png" for step in (0, 2, 4)]
    images = [Image.open(file) for file in files]
    told = [json.loads(image.text["qie"]) for image in images]
    assert [settings["step"] for settings in told] == [0, 2, 4]
    assert {(settings["prompt"], settings["seed"], settings["steps"]) for settings in told} == {("make it night", 7, 2)}
    assert len({image.tobytes() for image in images}) == 3, "the adapter is part of the model"
    ((name,),) = {tuple(settings["inputs"]) for settings in told}
    (copied,) = (sampled / "samples" / "inputs").iterdir()
    assert sampled / "samples" / name == copied
    given = np.asarray(Image.open(min((photos / "control_images").glob("*.png"))).convert("RGB"), dtype=float)
    assert np.abs(np.asarray(Image.open(copied), dtype=float) - given).mean() < 5, "the control, as a JPEG"
    bench.train(tmp_path)
    assert lines(tmp_path) == lines(sampled)


def test_tensorboard_gets_numbers_images_and_settings(sampled: Path, events: EventAccumulator) -> None:
    scalars = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    steps = [line for line in lines(sampled) if "loss" in line]
    for name in ("loss", "lr", "grad_norm"):
        assert scalars[name] == [(line["step"], pytest.approx(line[name])) for line in steps], name
    assert scalars["validation_loss"] == [(step, pytest.approx(loss)) for step, loss in validations(sampled)]
    assert "validation_loss/sigma 0.25" in scalars and "samples_per_s" in scalars and "mfu" not in scalars
    shown = events.Images("sample 0")
    assert [image.step for image in shown] == [0, 2, 4]
    for image in shown:
        (sampled / "shown.png").write_bytes(image.encoded_image_string)
        file = sampled / "samples" / f"step-{image.step:06d}-0.png"
        assert np.array_equal(np.asarray(Image.open(sampled / "shown.png")), np.asarray(Image.open(file)))
    (settings,) = (sampled / "qie").glob("*/hparams.yml")
    assert re.search(r"^train.max_steps: 4$", settings.read_text(), re.MULTILINE)


@pytest.mark.parametrize("all_trained", [False, True])
def test_mfu_is_the_model_s_flops_per_second_against_the_peak(
    bench: Bench, tiny_edit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_trained: bool
) -> None:
    batches = []
    computed = Objective.losses

    def remember(self, model, batch, draws):
        batches.extend([batch] if torch.is_grad_enabled() else [])
        return computed(self, model, batch, draws)

    monkeypatch.setattr(Objective, "losses", remember)
    lora = {"model__lora": None} if all_trained else {}
    settings = {"data__batch_size": 2, "train__gradient_accumulation_steps": 2, "train__max_steps": 2}
    bench.train(tmp_path, logging__peak_tflops=0.5, **settings, **lora)
    architecture = Architecture.of(QwenImageTransformer2DModel.load_config(tiny_edit / "transformer"))
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for number, line in enumerate(line for line in found if "loss" in line):
        flops = 0.0
        for batch in batches[2 * number : 2 * number + 2]:
            height, width = batch.pixel_latent.shape[-2:]
            (control,) = batch.control_latent
            target, controls = (height // 2) * (width // 2), (control.shape[-2] // 2) * (control.shape[-1] // 2)
            sizes = (target + controls, batch.prompt_embed.shape[1])
            flops += 2 * step_flops(architecture, *sizes, all_trained=all_trained, target_tokens=target).model
        assert line["mfu"] == pytest.approx(flops / line["step_time_s"] / 0.5e12, rel=1e-9)
        assert line["mfu"] > 0
