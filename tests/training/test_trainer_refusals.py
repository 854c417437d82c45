"""What qie-train refuses, and how it stops: one message that says what is wrong and what to do, and nothing lost."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from safetensors.torch import load_file, save_file

from qie.data.sources import open_source
from qie.precompute import precompute
from qie.training import checkpoint as checkpoint_module
from qie.training.checkpoint import OPTIMIZER_FILE, load
from qie.training.control import Asked
from qie.training.model.lora import adapter_tensors
from qie.training.objective import Losses, Objective
from qie.training.processes import agreement
from qie.training.run import Run
from tests.training.runs import ADAPTER, Bench, checkpoint, lines, losses, names, tree


@pytest.fixture
def stopped(plain: Path, tmp_path: Path) -> Path:
    """The same, stopped after its second step."""
    shutil.copytree(plain, tmp_path / "stopped")
    for step in (3, 4):
        shutil.rmtree(checkpoint(tmp_path / "stopped", step))
    return tmp_path / "stopped"


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads the model's weights fails."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(QwenImageTransformer2DModel, "from_pretrained", refuse)
    monkeypatch.setattr(checkpoint_module, "content_hash", refuse)


def poisoned(monkeypatch: pytest.MonkeyPatch, bad: Callable[[int], bool]) -> list[tuple[str, ...]]:
    """The last sample's loss is NaN in the training batches, from 1, that `bad` names; gives the keys of all."""
    batches: list[tuple[str, ...]] = []
    computed = Objective.losses

    def losses(self, model, batch, draws) -> Losses:
        found = computed(self, model, batch, draws)
        if torch.is_grad_enabled():
            batches.append(batch.keys)
            if bad(len(batches)):
                found.loss[-1] *= math.nan
        return found

    monkeypatch.setattr(Objective, "losses", losses)
    return batches


# Losses that are no number


def test_a_loss_that_is_no_number_stops_the_run_with_its_sample_and_changes_no_weight(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Run] = []
    training_step = Run.training_step
    monkeypatch.setattr(Run, "training_step", lambda run: runs.append(run) or training_step(run))
    keys = poisoned(monkeypatch, lambda batch: batch == 6)
    settings = {"data__batch_size": 2, "train__gradient_accumulation_steps": 2, "train__checkpoint_every": 2}
    message = bench.train(tmp_path, **settings, code=1).stderr
    assert "the loss is not finite" in message and "step 3" in message
    assert keys[5][-1][:12] in message
    assert not any(key[:12] in message for key in {*keys[4], *keys[5][:-1]} - {keys[5][-1]})
    assert names(tmp_path) == ["checkpoint-000002"] and load(checkpoint(tmp_path, 2)).step == 2
    saved = load_file(checkpoint(tmp_path, 2) / ADAPTER)
    for name, tensor in adapter_tensors(runs[-1].trainable.transformer).items():
        assert torch.equal(tensor, saved[f"transformer.{name}"]), name

    # What the message says can be done, can be done.
    assert "train.max_nonfinite_steps" in message and "--resume latest" in message
    keys.clear()
    poisoned(monkeypatch, lambda batch: batch == 2)
    bench.train(tmp_path, "--resume", "latest", **settings, train__max_nonfinite_steps=2)
    assert [loss is None for loss in losses(tmp_path)] == [False, False, True, False]


def test_steps_whose_loss_is_no_number_are_left_out_until_there_are_too_many_in_a_row(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned(monkeypatch, lambda batch: batch in (2, 4, 5, 7, 8, 9))
    settings = {"train__max_nonfinite_steps": 3, "train__checkpoint_every": 1, "train__ema_decay": 0.9}
    message = bench.train(tmp_path, train__max_steps=20, **settings, code=1).stderr
    assert "in 3 steps in a row" in message and "step 9" in message
    bad = [line["step"] for line in lines(tmp_path) if "loss" in line and line["loss"] is None]
    assert bad == [2, 4, 5, 7, 8]
    for step in bad:
        for name in (ADAPTER, f"ema/{ADAPTER}"):
            mine, before = (checkpoint(tmp_path, number) / name for number in (step, step - 1))
            assert mine.read_bytes() == before.read_bytes(), (step, name)
        mine, before = (load_file(checkpoint(tmp_path, number) / OPTIMIZER_FILE) for number in (step, step - 1))
        assert all(torch.equal(mine[name], before[name]) for name in mine if "group" not in name)
    assert (checkpoint(tmp_path, 6) / ADAPTER).read_bytes() != (checkpoint(tmp_path, 5) / ADAPTER).read_bytes()

    # A run that is resumed among them goes on counting.
    poisoned(monkeypatch, lambda batch: True)
    message = bench.train(tmp_path, "--resume", "latest", train__max_steps=20, **settings, code=1).stderr
    assert "in 3 steps in a row" in message and "step 9" in message


# Disks and signals


def test_a_full_disk_while_saving_is_explained_and_the_run_goes_on_from_the_checkpoint_before(
    bench: Bench, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Path] = []

    def full(tensors: dict[str, torch.Tensor], file: Path) -> None:
        saved.append(file)
        if len(saved) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, file)

    monkeypatch.setattr(checkpoint_module, "save_file", full)
    message = bench.train(tmp_path, train__checkpoint_every=1, code=1).stderr
    assert "cannot be written" in message and "No space left" in message
    assert f"--resume {checkpoint(tmp_path, 1)}" in message
    assert names(tmp_path) == ["checkpoint-000001"] and load(checkpoint(tmp_path, 1)).step == 1
    bench.train(tmp_path, "--resume", checkpoint(tmp_path, 1), train__checkpoint_every=1)
    assert lines(tmp_path) == lines(plain)
    assert (checkpoint(tmp_path, 4) / ADAPTER).read_bytes() == (checkpoint(plain, 4) / ADAPTER).read_bytes()


def signalled(monkeypatch: pytest.MonkeyPatch, step: int, *signals: int) -> None:
    training_step = Run.training_step

    def interrupted(run: Run):
        if run.step == step:
            for number in signals:
                os.kill(os.getpid(), number)
        return training_step(run)

    monkeypatch.setattr(Run, "training_step", interrupted)


def test_ctrl_c_twice_stops_at_once_and_says_how_to_go_on(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGINT)
    signalled(monkeypatch, 3, signal.SIGINT, signal.SIGINT)
    message = bench.train(tmp_path, train__checkpoint_every=2, code=130).stderr
    assert "--resume latest" in message
    assert names(tmp_path) == ["checkpoint-000002"] and len(losses(tmp_path)) == 3
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("others", [0.0, 1.0])
def test_a_process_stops_when_any_of_its_group_was_asked_to(others: float) -> None:
    group = SimpleNamespace(
        num_processes=2, is_main_process=False, device="cpu", reduce=lambda flags, how: flags + others
    )
    with agreement(group, Asked) as agreed:
        assert agreed().stop == bool(others)
        os.kill(os.getpid(), signal.SIGTERM)
        assert agreed().stop


def test_a_run_that_sigterm_stopped_ends_with_0_and_goes_on_as_if_it_had_never_stopped(
    bench: Bench, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two validations, that is: to stop adds none."""
    with monkeypatch.context() as within:
        signalled(within, 2, signal.SIGTERM)
        assert "stopped after 3 steps" in bench.train(tmp_path).stdout
    assert load(checkpoint(tmp_path, 3)).step == 3
    bench.train(tmp_path, "--resume", "latest")
    assert lines(tmp_path) == lines(plain)


# Resuming


def other_model(tiny_edit: Path, tmp_path: Path) -> dict[str, object]:
    shutil.copytree(tiny_edit, tmp_path / "model")
    file = next((tmp_path / "model" / "transformer").glob("*.safetensors"))
    tensors = load_file(file)
    name = min(tensors)
    tensors[name] = tensors[name] + 1
    save_file(tensors, file, {"format": "pt"})
    return {"model__pretrained_model_name_or_path": str(tmp_path / "model")}


OTHERS: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "rank": ({"model__lora": {"r": 5}}, ("model.lora.r changed", "'model.lora.r': 4", "'model.lora.r': 5")),
    "targets": ({"model__lora": {"r": 4, "target_modules": ["to_q"]}}, ("model.lora.target_modules changed", "to_k")),
    "no adapter": ({"model__lora": None}, ("model.lora changed", "None")),
    "quantisation": ({"model__quantize": "nf4"}, ("model.quantize changed", "None", "nf4")),
    "products": (
        {"model__quantize": "fp8", "train__fp8_compute": True},
        ("model.quantize, train.fp8_compute changed", "None", "True"),
    ),
    "adapters": ({"model__adapters": [{"path": "style.safetensors"}]}, ("model.adapters changed", "style.safetensors")),
    "adapters of training alone": (
        {"model__adapters": [{"path": "style.safetensors", "train_only": True}]},
        ("model.adapters changed", "'train_only': True"),
    ),
    "precision": ({"train__mixed_precision": "bf16"}, ("train.mixed_precision changed", "no", "bf16")),
    "kept precision": ({"train__trained_dtype": "bfloat16"}, ("train.trained_dtype changed", "float32", "bfloat16")),
    "optimizer": ({"optimizer__class_path": "torch.optim.SGD"}, ("optimizer.class_path changed", "AdamW", "SGD")),
    "rate": ({"optimizer__init_args": {"lr": 0.02}}, ("optimizer.init_args.lr changed", "0.01", "0.02")),
    "schedule": (
        {"lr_scheduler__scheduler_type": "linear"},
        ("lr_scheduler.scheduler_type changed", "linear"),
    ),
    "average": ({"train__ema_decay": 0.5}, ("train.ema_decay changed", "None", "0.5")),
    "accumulation": ({"train__gradient_accumulation_steps": 2}, ("train.gradient_accumulation_steps changed",)),
    "batch": ({"data__batch_size": 2}, ("global_batch_size changed",)),
    "seed": ({"train__seed": 1}, ("seed changed",)),
    "validation": ({"validation__rows": 3}, ("validation_rows changed",)),
}


@pytest.mark.parametrize(("settings", "words"), OTHERS.values(), ids=OTHERS.keys())
def test_a_checkpoint_of_another_run_is_refused_with_what_changed(
    bench: Bench, stopped: Path, settings: dict[str, object], words: tuple[str, ...]
) -> None:
    refused_to_resume(bench, stopped, settings, words)


def refused_to_resume(bench: Bench, stopped: Path, settings: dict[str, object], words: tuple[str, ...]) -> None:
    before = tree(stopped)
    result = bench.train(stopped, "--resume", "latest", **settings, code=None)
    assert result.exit_code in (1, 2), result.output
    assert all(word in result.stderr for word in (*words, "to do:")), result.stderr
    assert len(result.stderr.splitlines()) <= 6 and result.stdout == ""
    assert tree(stopped) == before


def test_a_checkpoint_of_another_base_model_or_of_other_data_is_refused(
    bench: Bench, stopped: Path, tiny_edit: Path, photos: Path, encoder, tmp_path: Path
) -> None:
    refused_to_resume(bench, stopped, other_model(tiny_edit, tmp_path), ("base model changed",))
    precompute(open_source(photos), encoder, tmp_path / "shards", rows=(0, 8))
    settings: dict[str, object] = {"cache__cache_dir": str(tmp_path / "shards")}
    refused_to_resume(bench, stopped, settings, ("belongs to another stream: samples changed",))


def test_a_damaged_checkpoint_is_named_with_the_one_before_and_that_one_works(
    bench: Bench, plain: Path, stopped: Path
) -> None:
    file = checkpoint(stopped, 2) / OPTIMIZER_FILE
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    words = ("damaged", OPTIMIZER_FILE, f"--resume {checkpoint(stopped, 1)}")
    refused_to_resume(bench, stopped, {}, words)
    bench.train(stopped, "--resume", checkpoint(stopped, 1), train__checkpoint_every=1)
    assert lines(stopped) == lines(plain)


def test_a_checkpoint_of_a_later_step_than_the_last_is_refused(bench: Bench, stopped: Path, no_weights: None) -> None:
    refused_to_resume(
        bench, stopped, {"train__max_steps": 1}, ("later than the run's last step", "at most step 1", "step 2")
    )


def test_a_run_that_is_done_ends_at_once_and_changes_nothing(bench: Bench, plain: Path) -> None:
    before = tree(plain)
    result = bench.train(plain, "--resume", "latest", train__checkpoint_every=1)
    assert f"done after 4 steps; weights and state in {checkpoint(plain, 4)}" in result.stdout
    assert tree(plain) == before


def test_there_has_to_be_something_to_resume(bench: Bench, plain: Path, tmp_path: Path, no_weights: None) -> None:
    assert "no checkpoint to resume" in bench.train(tmp_path, "--resume", "latest", code=2).stderr
    for folder in (tmp_path / "nowhere", plain, plain / "metrics.jsonl"):
        message = bench.train(tmp_path, "--resume", folder, code=2).stderr
        assert "no such checkpoint" in message and str(folder) in message
    assert list(tmp_path.iterdir()) == []


# Settings that do not fit


BEFORE_WEIGHTS: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "targets": ({"model__lora": {"target_modules": ["to_q", "to_w"]}}, ("to_w", "to_q", "model.lora.target_modules")),
    "rank": ({"model__lora": {"r": 0}}, ("model.lora.r", "greater than 0")),
    "tracker": ({"logging__report_to": ["wandb"]}, ("wandb is not installed", "pip install wandb")),
    "unknown tracker": ({"logging__report_to": ["paper"]}, ("logging.report_to", "tensorboard")),
    "optimizer": ({"optimizer__class_path": "torch.optim.AdamX"}, ("optimizer.class_path", "torch.optim.AdamW")),
    "arguments": ({"optimizer__init_args": {"rate": 1}}, ("optimizer.init_args", "rate")),
    "schedule": (
        {"lr_scheduler__class_path": "torch.optim.lr_scheduler.StepLR"},
        ("lr_scheduler.init_args", "step_size"),
    ),
    "rows": ({"validation__rows": 16}, ("validation.rows leaves nothing to train on", "fewer than 9", "16")),
    "tail": ({"data__batch_size": 99, "data__tail": "drop"}, ("batch",)),
    "epochs of unknown length, followed": ({"train__epochs": 1, "--follow": True}, ("train.epochs", "train.max_steps")),
    "epochs of unknown length, live": (
        {"train__epochs": 1, "cache__write_through": True, "cache__use_cache": False},
        ("train.epochs", "train.max_steps"),
    ),
}


@pytest.mark.parametrize(("settings", "words"), BEFORE_WEIGHTS.values(), ids=BEFORE_WEIGHTS.keys())
def test_what_does_not_fit_is_refused_before_weights_are_read(
    bench: Bench, photos: Path, tmp_path: Path, no_weights: None, settings: dict[str, object], words: tuple[str, ...]
) -> None:
    flags = [name for name in settings if name.startswith("--")]
    given = {name: value for name, value in settings.items() if name not in flags}
    given |= {"data__source": str(photos)} if "train__epochs" in settings else {}
    message = bench.train(tmp_path / "run", *flags, **given, code=2).stderr
    assert all(word in message for word in words), message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("backend", "why"),
    [("nativ", "no such attention backend"), ("flex", "FlexAttention has no backward pass on a CPU")],
)
def test_an_attention_backend_that_cannot_train_here_is_refused_before_weights_are_read(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, why: str
) -> None:
    monkeypatch.setattr(QwenImageTransformer2DModel, "from_pretrained", None)
    for trained in ({}, {"model__lora": None}):
        message = bench.train(tmp_path / "run", model__attention_backend=backend, code=2, **trained).stderr
        assert why in message and "native" in message
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("lora", "named", "words"),
    [
        ({"r": 8}, "continue_from", ("the adapter to continue from does not fit model.lora", "rank 4")),
        ({"r": 4, "lora_alpha": 8.0}, "continue_from", ("scaled by 8, and not by 2", "lora_alpha has to be 32")),
        ({"kind": "lokr"}, "adapters", ("adapters of several kinds", "each a LoKr", "a LoRA", "qie export --merge")),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_before_weights_are_read(
    bench: Bench, plain: Path, tmp_path: Path, no_weights: None, lora: dict[str, object], named: str, words
) -> None:
    there = str(checkpoint(plain, 4))
    model = {"model__lora": lora | ({"continue_from": there} if named == "continue_from" else {})}
    model |= {"model__adapters": [{"path": there}]} if named == "adapters" else {}
    for flags in ((), ("--dry-run",)):
        message = bench.train(tmp_path / "run", *flags, code=2, **model).stderr
        assert all(word in message for word in words), message
        assert not (tmp_path / "run").exists()


# Checkpoints that someone has changed, with hashes that fit


GONE = object()


def edited(*place: str, value: object = GONE) -> Callable[[Path], None]:
    """Sets an entry of state.json, or takes it away."""

    def edit(folder: Path) -> None:
        state = json.loads((folder / "state.json").read_text())
        entry = state
        for name in place[:-1]:
            entry = entry[name]
        entry[place[-1]] = value
        if value is GONE:
            del entry[place[-1]]
        (folder / "state.json").write_text(json.dumps(state))

    return edit


def replaced(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Changes the tensors of a file."""

    def replace(folder: Path) -> None:
        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name)

    return replace


def first_of(tensors: dict[str, torch.Tensor]) -> str:
    return min(name for name, tensor in tensors.items() if tensor.ndim and tensor.dtype == torch.float32)


def spoil(tensors: dict[str, torch.Tensor], value: float) -> None:
    tensors[first_of(tensors)].view(-1)[-1] = value


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[first_of(tensors)] = torch.zeros(3, 5)


def rename(tensors: dict[str, torch.Tensor]) -> None:
    tensors["nobody/exp_avg"] = tensors.pop(first_of(tensors))


def garbage(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(b"no tensors") and None  # type: ignore[func-returns-value]


def gone(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


EMA = f"ema/{ADAPTER}"
STATE = {
    "step is text": edited("step", value="2"),
    "step is another": edited("step", value=1),
    "batches are fewer than steps": edited("batches", value=0),
    "stream is a list": edited("stream", value=[]),
    "epoch is huge": edited("stream", "epoch", value=10**30),
    "position is behind the epoch": edited("stream", "position", value=10**6),
    "optimizer is missing": edited("optimizer"),
    "a group too many": edited("optimizer", "group 7/lr", value=1),
    "state of no parameter": edited("optimizer", "nobody/step", value=1),
    "rate is no number": edited("optimizer", "group 0/lr", value=math.nan),
    "schedule is empty": edited("schedule", value={}),
    "schedule is of another step": edited("schedule", "last_epoch", value=0),
    "run is a list": edited("run", value=[]),
    "files are a list": edited("files", value=[]),
}
FILES = {
    "no moments": (OPTIMIZER_FILE, gone(OPTIMIZER_FILE)),
    "moments are noise": (OPTIMIZER_FILE, garbage(OPTIMIZER_FILE)),
    "a moment is NaN": (OPTIMIZER_FILE, replaced(OPTIMIZER_FILE, lambda tensors: spoil(tensors, math.nan))),
    "a moment is infinite": (OPTIMIZER_FILE, replaced(OPTIMIZER_FILE, lambda tensors: spoil(tensors, math.inf))),
    "a moment of no parameter": (OPTIMIZER_FILE, replaced(OPTIMIZER_FILE, rename)),
    "a moment of another shape": (OPTIMIZER_FILE, replaced(OPTIMIZER_FILE, reshape)),
    "a moment is missing": (OPTIMIZER_FILE, replaced(OPTIMIZER_FILE, lambda tensors: tensors.pop(first_of(tensors)))),
}
FILES |= {
    f"{name}: {what}": (name, change)
    for name in (ADAPTER, EMA)
    for what, change in {
        "missing": gone(name),
        "noise": garbage(name),
        "NaN": replaced(name, lambda tensors: spoil(tensors, math.nan)),
        "another shape": replaced(name, reshape),
    }.items()
}
TAMPERED = {name: ("state.json", change) for name, change in STATE.items()} | FILES


def with_fitting_hashes(folder: Path) -> None:
    state = json.loads((folder / "state.json").read_text())
    state.pop("sha256", None)
    if isinstance(state["files"], dict):
        for name, facts in list(state["files"].items()):
            file = folder / name
            if not file.is_file():
                del state["files"][name]
            elif isinstance(facts, dict):
                facts.update(size=file.stat().st_size, sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    (folder / "state.json").write_text(json.dumps(state))


@pytest.fixture(scope="module")
def averaged(bench: Bench) -> Path:
    """A run of two steps with averages."""
    bench.train(bench.folder / "averaged", train__max_steps=2, train__checkpoint_every=1, train__ema_decay=0.5)
    return bench.folder / "averaged"


def test_checkpoints_that_were_changed_are_refused_with_the_file_and_the_one_before(
    bench: Bench, averaged: Path, tmp_path: Path
) -> None:
    shutil.copytree(averaged, tmp_path / "unhashed")
    with_fitting_hashes(checkpoint(tmp_path / "unhashed", 2))  # as earlier versions wrote it
    settings = {"train__ema_decay": 0.5, "train__max_steps": 3}
    bench.train(tmp_path / "unhashed", "--resume", "latest", **settings)
    for number, (what, (name, change)) in enumerate(TAMPERED.items()):
        output = tmp_path / str(number)
        shutil.copytree(averaged, output)
        change(checkpoint(output, 2))
        with_fitting_hashes(checkpoint(output, 2))
        result = bench.train(output, "--resume", "latest", code=None, **settings)
        assert result.exit_code == 1, (what, result.output)
        assert "damaged" in result.stderr or "different tensors" in result.stderr, (what, result.stderr)
        assert name.partition("/")[0] in result.stderr and str(checkpoint(output, 2)) in result.stderr, (
            what,
            result.stderr,
        )
        assert names(output) == ["checkpoint-000001", "checkpoint-000002"], what


def test_a_transformer_that_was_changed_is_refused(bench: Bench, tmp_path: Path) -> None:
    settings = {"model__lora": None, "train__max_steps": 1, "optimizer__init_args": {"lr": 1e-3}}
    bench.train(tmp_path / "all", **settings)
    weights = "transformer/diffusion_pytorch_model.safetensors"

    def narrower(folder: Path) -> None:
        config = json.loads((folder / "transformer" / "config.json").read_text())
        (folder / "transformer" / "config.json").write_text(json.dumps(config | {"num_layers": 1}))

    changes = [
        narrower,
        gone("transformer/config.json"),
        garbage("transformer/config.json"),
        garbage(weights),
        replaced(weights, lambda tensors: spoil(tensors, math.nan)),
        replaced(weights, lambda tensors: tensors.pop(first_of(tensors))),
        replaced(weights, reshape),
    ]
    for number, change in enumerate(changes):
        output = tmp_path / str(number)
        shutil.copytree(tmp_path / "all", output)
        change(checkpoint(output, 1))
        with_fitting_hashes(checkpoint(output, 1))
        message = bench.train(output, "--resume", "latest", code=1, **settings | {"train__max_steps": 2}).stderr
        assert "damaged" in message and "transformer: " in message, (number, message)


def test_weights_that_are_not_finite_are_not_saved(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Run.training_step

    def overflow(run: Run):
        found = step(run)
        if run.step == 2:
            next(iter(run.trainable.parameters.values())).data.view(-1)[0] = math.inf
        return found

    monkeypatch.setattr(Run, "training_step", overflow)
    message = bench.train(tmp_path, train__max_steps=2, train__checkpoint_every=1, code=1).stderr
    assert "not finite" in message and "lora_A" in message and "--resume latest" in message
    assert names(tmp_path) == ["checkpoint-000001"]
