"""Two real processes, linked by gloo, take the steps that one process takes on the same global batch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from qie.data.sources import open_source
from qie.precompute import precompute
from tests.conftest import ROOT

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
    folder: Path, shards: Path, config: dict, batch_size: int, *more: str, launcher: tuple[str, ...] = ALONE
) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    settings = (f"data.batch_size={batch_size}", f"train.output_dir={folder}")
    command = [sys.executable, *launcher, str(shards), "--quiet", "--config", str(folder / "config.yaml")]
    command += [*(word for one in settings for word in ("--set", one)), *more]
    environment = os.environ | {"ACCELERATE_USE_CPU": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # The limit is far above what it takes: a hang is to end as a failure.
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def configured(model: Path, lora: dict | None) -> dict:
    return {
        "model": {"pretrained_model_name_or_path": str(model), "lora": lora},
        "data": {"caption_dropout_rate": 0.3},
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
