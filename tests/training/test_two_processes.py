"""Two real processes, linked by gloo, take the steps that one process takes on the same global batch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from qie.config import Config
from qie.data.sources import open_source
from qie.devices import resolve_device
from qie.errors import UsageError
from qie.opening import open_accelerator
from qie.precompute import precompute
from tests.conftest import AREA_PX, ROOT

LAUNCHERS = {
    "DDP": ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "qie.cli.train"),
    "FSDP2": (
        *("-m", "accelerate.commands.launch", "--config_file", str(ROOT / "configs" / "accelerate" / "fsdp2.yaml")),
        *("--num_processes", "2", "--main_process_port", "0", str(ROOT / "tests" / "training" / "sharded.py")),
    ),
}
ALONE = ("-m", "qie.cli.train")
ADAPTER = {"r": 4, "target_modules": ["to_q", "to_out.0", "add_q_proj", "to_add_out"]}
"""Those on the last block's text stream never get a gradient: DDP must not wait for them."""


def losses(folder: Path) -> list[tuple[float, ...]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) if "loss" in line else (line["validation_loss"],) for line in lines]


@pytest.fixture(scope="module")
def shards(photos: Path, encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two") / "shards"
    precompute(open_source(photos), encoder, folder, rows=(0, 9))
    return folder


def train(
    folder: Path,
    shards: Path,
    config: dict,
    batch_size: int,
    *more: str,
    launcher: tuple[str, ...] = ALONE,
    code: int = 0,
) -> str:
    """What it said on stderr."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    settings = (f"data.batch_size={batch_size}", f"train.output_dir={folder}")
    command = [sys.executable, *launcher, str(shards), "--quiet", "--config", str(folder / "config.yaml")]
    command += [*(word for one in settings for word in ("--set", one)), *more]
    # Nobody says that there is no GPU: that follows from what is there.
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    # The limit is far above what it takes: a hang is to end as a failure.
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr[-3000:]
    return done.stderr


def configured(model: Path, lora: dict | None) -> dict:
    return {
        "model": {"pretrained_model_name_or_path": str(model), "lora": lora},
        "data": {"area_px": AREA_PX, "allow_tiny": True, "caption_dropout_rate": 0.3},
        "train": {
            "max_steps": 6,
            "mixed_precision": "no",
            "gradient_accumulation_steps": 2,
            "checkpoint_every": 3,
            "ema_decay": 0.5,
        },
        "optimizer": {"init_args": {"lr": 1e-3}},
        "validation": {"rows": 3, "every": 3},
    }


@pytest.fixture(scope="module", params=[ADAPTER, None], ids=["LoRA", "all weights"])
def alone(tiny_edit: Path, shards: Path, tmp_path_factory: pytest.TempPathFactory, request) -> tuple[dict, Path]:
    """A configuration, and the run of one process."""
    config, folder = configured(tiny_edit, request.param), tmp_path_factory.mktemp("alone") / "run"
    train(folder, shards, config, 2)
    return config, folder


@pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=LAUNCHERS.keys())
def test_two_processes_train_as_one_does_and_their_checkpoints_move(
    alone: tuple[dict, Path], shards: Path, tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    config, one = alone
    train(tmp_path / "two", shards, config, 1, launcher=launcher)
    # Sums over a batch are taken in another order: the stated tolerance is 1e-5 of the values.
    expected = [pytest.approx(values, rel=1e-5) for values in losses(one)]
    assert len(expected) == 9
    assert losses(tmp_path / "two") == expected

    shutil.copytree(one, tmp_path / "one")
    for folder in ("one", "two"):
        shutil.rmtree(tmp_path / folder / "checkpoint-000006")
    train(tmp_path / "two", shards, config, 2, "--resume", "latest")
    assert losses(tmp_path / "two") == expected
    train(tmp_path / "one", shards, config, 1, "--resume", "latest", launcher=launcher)
    assert losses(tmp_path / "one") == expected


@pytest.mark.parametrize("alone", [ADAPTER], ids=["LoRA"], indirect=True, scope="module")
def test_what_is_refused_ends_all_processes_with_one_message(
    alone: tuple[dict, Path], shards: Path, tmp_path: Path
) -> None:
    """The main process holds the folder's lock, and the others wait for its word."""
    config, one = alone
    message = train(one, shards, config, 1, launcher=LAUNCHERS["DDP"], code=1)
    assert message.count("the output folder holds a run already") == 1
    assert "checkpoint-000006" in os.listdir(one) and ".lock" not in os.listdir(one)


def test_processes_that_do_not_find_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.model_validate({"model": {"pretrained_model_name_or_path": "any"}})
    assert open_accelerator(config).num_processes == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="would train apart") as caught:
        open_accelerator(config)
    assert (caught.value.where, caught.value.found) == ("WORLD_SIZE", 1)
    assert "torchrun" in str(caught.value.hint)


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
