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

TWO_PROCESSES = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def losses(folder: Path) -> list[tuple[float, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


def test_two_processes_train_as_one_does_and_one_goes_on_where_two_stopped(
    tiny_edit: Path, photos: Path, encoder, tmp_path: Path
) -> None:
    precompute(open_source(photos), encoder, tmp_path / "shards", rows=(0, 9))
    config = {
        # Adapters on the last block's text stream never get a gradient: DDP must not wait for them.
        "model": {
            "pretrained_model_name_or_path": str(tiny_edit),
            "lora": {"r": 4, "target_modules": ["to_q", "to_out.0", "add_q_proj", "to_add_out"]},
        },
        "data": {"caption_dropout_rate": 0.3},
        "train": {"max_steps": 6, "mixed_precision": "no", "gradient_accumulation_steps": 2, "checkpoint_every": 3},
        "validation": {"rows": 1},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))

    def train(output: str, batch_size: int, *more: str, launcher: tuple[str, ...] = ()) -> None:
        settings = (f"data.batch_size={batch_size}", f"train.output_dir={tmp_path / output}")
        command = [sys.executable, *launcher, "-m", "qie.cli.train", tmp_path / "shards", "--quiet"]
        command += ["--config", tmp_path / "config.yaml", *(word for one in settings for word in ("--set", one)), *more]
        environment = os.environ | {"ACCELERATE_USE_CPU": "1", "GLOO_SOCKET_IFNAME": "lo"}
        # The limit is far above what it takes: a hang is to end as a failure.
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-3000:]

    train("one", 2)
    train("two", 1, launcher=TWO_PROCESSES)
    # Sums over a batch are taken in another order: the stated tolerance is 1e-5 of the values.
    expected = [pytest.approx(pair, rel=1e-5) for pair in losses(tmp_path / "one")]
    assert len(expected) == 6
    assert losses(tmp_path / "two") == expected

    shutil.rmtree(tmp_path / "two" / "checkpoint-000006")
    train("two", 2, "--resume", "latest")
    assert losses(tmp_path / "two") == expected
