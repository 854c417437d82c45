"""What qie-train does, from its command line to its checkpoints: steps, epochs, averages, ways to save memory."""

from __future__ import annotations

import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from safetensors.torch import load_file

from qie.config import Config
from qie.data.live import LiveSamples
from qie.data.sources import SourceSpec, open_source
from qie.precompute import precompute
from qie.pretrained import ONE_LOAD, loading
from qie.shards.shard_set import ShardSet
from qie.training import run as run_module
from qie.training.loop import unheeded
from qie.training.model import trainable
from qie.training.model.blocks import compile_blocks
from qie.training.objective import Objective
from qie.training.reporting.card import read_run
from qie.training.run import Run
from tests.training.adapters import transformer_of
from tests.training.runs import ADAPTER, ROWS, Bench, checkpoint, lines, losses, names, tree, validations

FULL = {"model__lora": None, "optimizer__init_args": {"lr": 1e-3}}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each sample was trained on."""
    times: Counter[str] = Counter()
    computed = Objective.losses

    def losses(self, model, batch, draws):
        if torch.is_grad_enabled():
            times.update(key for key, weight in zip(batch.keys, batch.weight, strict=True) if weight > 0)
        return computed(self, model, batch, draws)

    monkeypatch.setattr(Objective, "losses", losses)
    return times


def resumed(bench: Bench, whole: Path, step: int, output: Path, **settings: object) -> Path:
    """A run that goes on from a copy of one checkpoint of another run."""
    shutil.copytree(checkpoint(whole, step), checkpoint(output, step))
    bench.train(output, "--resume", "latest", **settings)
    return output


def same_end(bench: Bench, whole: Path, output: Path, step: int, last: int, **settings: object) -> None:
    """That a run resumed after `step` takes the steps that the whole run took, and leaves what it left, bit for bit."""
    resumed(bench, whole, step, output, train__max_steps=last, **settings)
    assert lines(output) == [line for line in lines(whole) if line["step"] > step]
    mine, theirs = tree(checkpoint(output, last)), tree(checkpoint(whole, last))
    assert mine.keys() == theirs.keys()
    # The card tells of times and state.json of the card; diffusers writes into a config.json where it was read from.
    told = ("README.md", "state.json", "config.json")
    assert [name for name in mine if mine[name] != theirs[name] and not name.endswith(told)] == []


# Length


@pytest.mark.parametrize(("batch_size", "accumulated", "steps"), [(2, 3, 4), (3, 1, 8), (20, 1, 8)])
def test_in_so_many_epochs_each_sample_is_trained_on_so_often(
    bench: Bench, tmp_path: Path, trained: Counter[str], batch_size: int, accumulated: int, steps: int
) -> None:
    bench.train(tmp_path, train__epochs=2, data__batch_size=batch_size, train__gradient_accumulation_steps=accumulated)
    assert sorted(trained.values()) == [2] * (ROWS - 2)
    found = [line for line in lines(tmp_path) if "loss" in line]
    assert len(found) == steps
    assert sum(line["samples"] for line in found) == 2 * (ROWS - 2), "what only fills a batch up is no sample"


def test_epochs_that_are_added_to_a_finished_run_are_whole_ones(
    bench: Bench, tmp_path: Path, trained: Counter[str]
) -> None:
    """The last step of the first run had fewer batches than the others."""
    settings = {"train__gradient_accumulation_steps": 4}
    bench.train(tmp_path, train__epochs=1, **settings)
    bench.train(tmp_path, "--resume", "latest", train__epochs=3, **settings)
    assert sorted(trained.values()) == [3] * (ROWS - 2)


def test_epochs_of_different_lengths_are_each_whole(
    tiny_edit: Path, photos: Path, encoder, tmp_path: Path, trained: Counter[str]
) -> None:
    """Half of 9 rows are 4 in the first epoch and 5 in the second."""
    bench = Bench.make(tmp_path / "bench", tiny_edit, photos, encoder)
    shutil.rmtree(tmp_path / "bench" / "shards")
    parts = [SourceSpec(str(photos), "half")]
    precompute(open_source(parts), encoder, tmp_path / "bench" / "shards", rows=(0, ROWS))
    mixed = [{"source": str(photos), "name": "half", "weight": 0.5}]
    bench.train(tmp_path / "run", train__epochs=2, validation__rows=0, data__source=mixed, cache__trust_published=True)
    assert sorted(trained.values()) == [1] * ROWS


@pytest.mark.parametrize("longest", [None, 1e-3])
def test_longer_gradients_are_scaled_down(bench: Bench, tmp_path: Path, longest: float | None) -> None:
    """Of an adapter that begins, only the second factor has a gradient, and it is 0 before."""
    plain = {"optimizer__class_path": "torch.optim.SGD", "optimizer__init_args": {"lr": 0.5}}
    bench.train(tmp_path, train__max_steps=1, train__max_grad_norm=longest, **plain)
    (line,) = (line for line in lines(tmp_path) if "loss" in line)
    steps = [
        weight.square().sum()
        for name, weight in load_file(checkpoint(tmp_path, 1) / ADAPTER).items()
        if "lora_B" in name
    ]
    assert line["grad_norm"] > 1e-3, "told before it is clipped"
    expected = line["lr"] * (longest or line["grad_norm"])
    assert float(sum(steps)) ** 0.5 == pytest.approx(expected, rel=1e-4)


# Averages and continued runs


def test_the_average_is_that_of_the_formula(bench: Bench, tmp_path: Path) -> None:
    """Seen on second factors, which begin as zeros."""
    bench.train(tmp_path, train__max_steps=3, train__checkpoint_every=1, train__ema_decay=0.25)
    expected = torch.zeros(())
    for step, decay in [(1, 2 / 11), (2, 3 / 12), (3, 0.25)]:  # 4/13 is more than 0.25
        weights, average = (load_file(checkpoint(tmp_path, step) / part / ADAPTER) for part in ("", "ema"))
        assert average.keys() == weights.keys()
        name = next(name for name in weights if "lora_B" in name)
        expected = decay * expected + (1 - decay) * weights[name]
        torch.testing.assert_close(average[name], expected, rtol=1e-5, atol=1e-7)


def test_validation_sees_the_average_training_does_not_and_a_run_that_continues_from_it_begins_with_its_loss(
    bench: Bench, plain: Path, tmp_path: Path
) -> None:
    bench.train(tmp_path / "averaged", train__ema_decay=0.9)
    assert losses(tmp_path / "averaged") == losses(plain)
    (before, *seen), (same, *other) = validations(tmp_path / "averaged"), validations(plain)
    assert before == same and len(seen) == 2 and not set(seen) & set(other)
    weights, average = checkpoint(tmp_path / "averaged", 4), checkpoint(tmp_path / "averaged", 4) / "ema"
    assert (weights / ADAPTER).read_bytes() == (checkpoint(plain, 4) / ADAPTER).read_bytes()
    bench.train(tmp_path / "from_average", train__max_steps=1, model__lora={"r": 4, "continue_from": str(average)})
    assert validations(tmp_path / "from_average")[0] == (0, seen[-1][1])


# All weights


def test_all_weights_are_trained_saved_for_diffusers_and_resumed_bit_for_bit(
    bench: Bench, tiny_edit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: dict[str, torch.Tensor] = {}
    state_dict = Run.state_dict
    monkeypatch.setattr(
        Run, "state_dict", lambda run: ends.update(run.trainable.transformer.state_dict()) or state_dict(run)
    )
    settings = {**FULL, "train__checkpoint_every": 3, "train__ema_decay": 0.5}
    bench.train(tmp_path / "whole", train__max_steps=6, **settings)
    folder = checkpoint(tmp_path / "whole", 6) / "transformer"
    loaded = QwenImageTransformer2DModel.from_pretrained(folder).state_dict()
    assert loaded.keys() == ends.keys()
    assert all(torch.equal(loaded[name], ends[name]) for name in ends)
    base = transformer_of(tiny_edit).state_dict()
    assert sum(not torch.equal(loaded[name], base[name]) for name in base) > 0.9 * len(base)
    same_end(bench, tmp_path / "whole", tmp_path / "resumed", 3, 6, **settings)


# Ways to save memory and time


@pytest.mark.parametrize(("quantize", "fp8_compute"), [("nf4", False), ("fp8", False), ("fp8", True)])
def test_on_a_quantised_base_the_loss_falls_and_a_run_resumes_bit_for_bit(
    bench: Bench, tmp_path: Path, quantize: str, fp8_compute: bool
) -> None:
    settings = {
        "model__quantize": quantize,
        "train__fp8_compute": fp8_compute,
        "model__lora": {"r": 8, "target_modules": ["to_q", "to_v", "to_out.0", "net.0.proj", "net.2"]},
        "train__checkpoint_every": 12,
        "validation__every": 24,
    }
    bench.train(tmp_path / "whole", train__max_steps=24, **settings)
    (_, before), (_, after) = validations(tmp_path / "whole")
    assert after < 0.85 * before
    same_end(bench, tmp_path / "whole", tmp_path / "resumed", 12, 24, **settings)


def test_what_is_computed_again_changes_no_bit(bench: Bench, plain: Path, tmp_path: Path) -> None:
    bench.train(tmp_path, train__gradient_checkpointing=2)
    assert lines(tmp_path) == lines(plain)
    assert (checkpoint(tmp_path, 4) / ADAPTER).read_bytes() == (checkpoint(plain, 4) / ADAPTER).read_bytes()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch, while it compiles
@pytest.mark.parametrize("settings", [{"train__offload_blocks": 1}, {"train__compile": True}], ids=str)
def test_offloaded_and_compiled_blocks_give_the_same_losses(
    bench: Bench, plain: Path, tmp_path: Path, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Inductor takes minutes for its graphs, autograd of them seconds: `test_blocks` has that.
    monkeypatch.setattr(trainable, "compile_blocks", partial(compile_blocks, backend="eager"))
    bench.train(tmp_path, train__max_steps=2, **settings)
    # Weights read from a file lie at any address, copies at multiples of 64: a CPU's products differ in their last bit.
    assert losses(tmp_path) == pytest.approx(losses(plain)[:2], rel=1e-5)
    assert validations(tmp_path)[0][1] == pytest.approx(validations(plain)[0][1], rel=1e-5)


def test_an_encoder_is_loaded_before_the_model_and_one_component_at_a_time(
    bench: Bench, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries change torch for the whole process while they load one."""
    told: list[int] = []
    monkeypatch.setattr(LiveSamples, "load_encoder", lambda samples: told.append(len(samples.lacking)))
    monkeypatch.setattr(run_module, "TrainableModel", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.train(tmp_path, data__source=str(photos))
    assert told == [3]
    with loading(tmp_path), ThreadPoolExecutor(1) as other:
        assert not other.submit(ONE_LOAD.acquire, blocking=False).result()


# What is told


def test_a_warmup_as_long_as_the_run_and_masks_of_equal_weights_are_told_at_the_start(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShardSet, "masked", True)
    settings = {"model__lora": {"kind": "lokr", "r": 4}, "lr_scheduler__warmup_steps": 1, "validation__rows": 0}
    result = bench.train(tmp_path, train__max_steps=1, **settings)
    told, lines = result.stderr, result.stderr.splitlines()
    names = ["model", "samples", "training", "steps", "output", "to watch"]
    assert [line[:11].rstrip() for line in lines[: len(names)]] == names, "before the warnings"
    texts = [line[11:] for line in lines]
    assert texts[1] == "9 in 4 shapes, the largest 160×128 px from 160×128"
    assert texts[2].startswith("LoKr of rank 4, ") and texts[2].endswith(" parameters, in float32 on cpu")
    assert texts[3] == "1 of 1 sample, 0.1 epochs; saved at the end"
    checkpoint = tmp_path / "checkpoint-000001"
    assert lines[-1].startswith("next: qie predict --config ") and f" --lora {checkpoint} --image" in lines[-1]
    assert told.count("warning: ") == 2
    assert "lr_scheduler.warmup_steps is 1, and the run has 1 steps" in told
    assert "rows have masks, which change nothing" in told


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"loss": {"huber_delta": 0.1}}, ["loss.huber_delta changes nothing while loss.kind is mse"]),
        ({"loss": {"beta": 9.0, "supervised_weight": 1.0}}, ["loss.beta", "loss.supervised_weight"]),
        ({"loss": {"kind": "flow_dpo", "huber_delta": 0.1}}, ["loss.huber_delta"]),
        ({"loss": {"timestep_sampling": "uniform", "logit_mean": 0.5}}, ["while loss.timestep_sampling is uniform"]),
        ({"lr_scheduler": {"power": 2.0}}, ["lr_scheduler.power"]),
    ],
)
def test_fields_of_another_kind_are_told_and_so_are_rejected_targets_that_nobody_asks_for(settings, told) -> None:
    config = Config.model_validate({"model": {"pretrained_model_name_or_path": "m"}} | settings)
    of_pairs = "rows have rejected targets, which change nothing unless loss.kind is flow_dpo"
    expected = told if config.loss.of_pairs else [*told, of_pairs]
    found = list(unheeded(config, 1000, masked=False, paired=True))
    assert len(found) == len(expected) and all(words in line for words, line in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {"lr_scheduler": {"warmup_steps": 0}, "loss": {"kind": "flow_dpo", "beta": 9.0, "mask_background_weight": 0.5}},
        {"lr_scheduler": {"warmup_steps": 59}, "loss": {"mask_background_weight": 0.5}},
        {"lr_scheduler": {"scheduler_type": "constant"}, "loss": {"mask_foreground_weight": 2}},
    ],
)
def test_what_takes_effect_is_not_told(settings: dict[str, Any]) -> None:
    config = Config.model_validate({"model": {"pretrained_model_name_or_path": "m"}} | settings)
    assert not list(unheeded(config, 60, masked=True))


# Checkpoints


def test_of_a_run_s_checkpoints_the_last_and_every_nth_stay_and_run_json_names_them(
    bench: Bench, tmp_path: Path
) -> None:
    settings = {"train__checkpoint_every": 1, "train__keep_last": 2, "train__keep_every": 3}
    bench.train(tmp_path, train__max_steps=7, **settings)
    kept = [f"checkpoint-{step:06d}" for step in (3, 6, 7)]
    assert names(tmp_path) == kept
    assert list(read_run(tmp_path).checkpoints) == kept
    bench.train(tmp_path, "--resume", "latest", train__max_steps=8, **settings)
    assert list(read_run(tmp_path).checkpoints) == names(tmp_path) == [*kept, "checkpoint-000008"]
