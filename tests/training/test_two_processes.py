"""Two real processes, linked by gloo, take the steps that one process takes on the same global batch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import yaml

from qie.config import Config
from qie.data.sources import open_source
from qie.devices import resolve_device
from qie.errors import UsageError
from qie.precompute import precompute
from qie.training.processes import open_accelerator
from tests.conftest import ROOT, forget_accelerate
from tests.training.ranks import LIMIT_S, Ranks
from tests.training.runs import Bench, checkpoint

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "qie.cli.train")
SETTINGS: dict[str, object] = {
    "data__caption_dropout_rate": 0.3,
    "train__max_steps": 6,
    "train__gradient_accumulation_steps": 2,
    "train__checkpoint_every": 2,
    "train__ema_decay": 0.5,
    "optimizer__init_args": {"lr": 1e-3},
    "validation__rows": 3,
    "validation__every": 3,
    "validation__sample_steps": 2,
}
TRAINED: dict[str, tuple[str, dict[str, object]]] = {
    # Those on the last block's text stream never get a gradient: DDP must not wait for them.
    # Of a preserved source, processes that share a model have to ask the base together.
    "LoRA": (
        "preserving",
        {"model__lora": {"r": 4, "target_modules": ["to_q", "to_out.0", "add_q_proj", "to_add_out"]}},
    ),
    "all weights": ("bench", {"model__lora": None}),
    # Rows with no, one and two controls, two draws of each.
    "Qwen-Image-2.1": ("bench_21", {"model__lora": {"r": 4}, "data__control_dropout_rate": 0.3}),
}


def losses(folder: Path) -> list[tuple[float, ...]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) if "loss" in line else (line["validation_loss"],) for line in lines]


@pytest.fixture(scope="module")
def preserving(bench: Bench, photos: Path, encoder, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A bench whose photographs come twice: with their prompts, and with others to be preserved."""
    folder, config = tmp_path_factory.mktemp("preserving"), yaml.safe_load((bench.folder / "config.yaml").read_text())
    place = {"source": str(photos)}
    source = [place | {"name": "dog"}, place | {"name": "class", "preserve": True, "replace": {"e": "i"}}]
    precompute(open_source(source), encoder, folder / "shards", rows=(0, 24))
    config["data"]["source"] = source
    config["cache"] |= {"cache_dir": str(folder / "shards"), "trust_published": True}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return Bench(folder)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as ranks:
        yield ranks


@pytest.fixture(scope="module", params=TRAINED)
def alone(tmp_path_factory: pytest.TempPathFactory, request) -> tuple[Bench, dict[str, object], Path]:
    """A bench, settings, and their run in one process with a batch of two."""
    name, changes = TRAINED[request.param]
    bench: Bench = request.getfixturevalue(name)
    settings, folder = SETTINGS | changes, tmp_path_factory.mktemp("alone") / "run"
    bench.train(folder, data__batch_size=2, **settings)
    return bench, settings, folder


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_two_processes_train_as_one_does_and_their_checkpoints_move(
    alone: tuple[Bench, dict[str, object], Path], ranks: Ranks, tmp_path: Path, sharded: bool
) -> None:
    """Of two runs, one starts anew, and one goes on with the run of one process; then one process goes on.

    The one that starts anew is held before its first step, and saved meanwhile; where the processes share a model, they
    make the pictures together that it is asked for.
    """
    bench, settings, one = alone
    # Sums over a batch are taken in another order: the stated tolerance is 1e-5 of the values.
    expected = [pytest.approx(values, rel=1e-5) for values in losses(one)]
    assert len(expected) == 9
    begins = sharded != bool(settings["model__lora"])
    if not begins:
        shutil.copytree(one, tmp_path / "run")
        for step in (4, 6):
            shutil.rmtree(checkpoint(tmp_path / "run", step))
    control = tmp_path / "run" / "control" if begins else None
    if control:
        control.mkdir(parents=True)
        (control / "pause").touch()
    if control and sharded and settings == SETTINGS | TRAINED["LoRA"][1]:
        prompts = control / "prompts.json"
        prompts.write_text(json.dumps([{"images": [str(ROOT / "docs" / "demo.jpg")], "prompt": "make it night"}]))
    more = () if begins else ("--resume", "latest")
    keep = {"latents": "cpu", "embeds": "cpu"}
    words = bench.words(tmp_path / "run", "--quiet", *more, data__batch_size=1, cache__keep=keep, **settings)
    ranks.train(words, tmp_path / "log", sharded=sharded, control=control)
    if control and control.exists():
        assert len(list((tmp_path / "run" / "samples").glob("*.png"))) == 3
        shutil.rmtree(control)
    assert "cannot share" not in (tmp_path / "log").read_text()
    assert losses(tmp_path / "run") == expected
    shutil.rmtree(checkpoint(tmp_path / "run", 6))
    bench.train(tmp_path / "run", "--resume", "latest", data__batch_size=2, **settings)
    assert losses(tmp_path / "run") == expected


def test_what_is_refused_ends_all_processes_of_torchrun_with_one_message(bench: Bench, plain: Path) -> None:
    """The main process holds the folder's lock, and the others wait for its word."""
    # Nobody says that there is no GPU: that follows from what is there.
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *TORCHRUN, "--quiet", *bench.words(plain, data__batch_size=1)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 1 and done.stderr.count("the output folder already holds a run") == 1, done.stderr[-3000:]
    assert "checkpoint-000004" in os.listdir(plain) and ".lock" not in os.listdir(plain)


def test_processes_that_do_not_find_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.model_validate({"model": {"pretrained_model_name_or_path": "any"}})
    assert open_accelerator(config).num_processes == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="would train separately") as caught:
        open_accelerator(config)
    assert (caught.value.where, caught.value.found) == ("WORLD_SIZE", 1)
    assert "torchrun" in str(caught.value.hint)


def test_processes_wait_while_the_main_one_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[timedelta] = []
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda *_, **how: waits.append(how["timeout"]) or 1 / 0
    )
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    forget_accelerate()
    with pytest.raises(ZeroDivisionError):
        open_accelerator(Config.model_validate({"model": {"pretrained_model_name_or_path": "any"}}))
    forget_accelerate()
    slowly = 2 * 245e9 / 50e6  # bytes of all weights and AdamW's state, written and hashed at 50 MB/s
    assert [wait.total_seconds() >= slowly for wait in waits] == [True]


@pytest.mark.parametrize(
    ("local_rank", "count", "device"),
    [(None, 2, "cuda:0"), ("0", 2, "cuda:0"), ("1", 2, "cuda:1"), ("3", 2, "cuda:1"), ("3", 1, "cuda:0")],
)
def test_auto_is_the_gpu_of_each_process(
    monkeypatch: pytest.MonkeyPatch, local_rank: str | None, count: int, device: str
) -> None:
    """So encoders of several processes that encode live do not meet on the first GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert resolve_device("auto", "cache.vae_encoder_device") == torch.device(device)
    assert resolve_device("cuda:0", "cache.vae_encoder_device") == torch.device("cuda:0")
