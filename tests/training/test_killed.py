"""Law 5 with real processes: a run that was killed with -9 and goes on is the run that was never stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from qie.data.sources import open_source
from qie.precompute import precompute
from qie.training.checkpoint import load
from qie.training.output_dir import checkpoints
from qie.training.telling.card import read_run
from tests.conftest import AREA_PX, ROOT
from tests.training.runs import ADAPTER, Bench, checkpoint, lines

DYING = """
import os, signal, sys
from qie.cli.train import main
from qie.training.run import Run

training_step = Run.training_step

def last_step(run):
    if run.step == {steps}:
        os.kill(os.getpid(), signal.SIGKILL)
    return training_step(run)

Run.training_step = last_step
main(sys.argv[1:])
"""


def started(
    config: Path, output: Path, *more: str, code: str = "from qie.cli.train import main; main()"
) -> subprocess.Popen:
    command = [sys.executable, "-c", code, "--quiet", "--config", str(config)]
    return subprocess.Popen(
        [*command, "--set", f"train.output_dir={output}", *more],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen, expected: int = 0) -> None:
    _, errors = process.communicate(timeout=300)
    assert process.returncode == expected, errors[-3000:]


def steps(output: Path) -> list[dict]:
    """What is told of each step, but for how long it took."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    changing = {"samples_per_s", "step_time_s", "data_wait_s", "peak_memory_bytes", "mfu"}
    return [{name: value for name, value in line.items() if name not in changing} for line in lines]


@pytest.fixture(scope="module")
def config(tiny_edit: Path, photos: Path, encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    precompute(open_source(photos), encoder, folder / "shards", rows=(0, 9))
    settings = {
        "model": {
            "pretrained_model_name_or_path": str(tiny_edit),
            "lora": {"r": 4, "lora_dropout": 0.1},
        },
        "data": {
            "area_px": AREA_PX,
            "allow_tiny": True,
            "caption_dropout_rate": 0.3,
            "control_dropout_rate": 0.2,
            "batch_size": 2,
        },
        "cache": {"cache_dir": str(folder / "shards")},
        "train": {
            "max_steps": 40,
            "mixed_precision": "no",
            "checkpoint_every": 5,
            "keep_last": 2,
            "ema_decay": 0.9,
            "seed": 3,
        },
        "optimizer": {"init_args": {"lr": 0.01}},
        "lr_scheduler": {"warmup_steps": 4},
        "validation": {"rows": 2, "every": 10},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder / "config.yaml"


def test_40_steps_are_17_steps_a_kill_and_the_rest_bit_for_bit(config: Path, tmp_path: Path) -> None:
    whole = started(config, tmp_path / "whole")
    killed = started(config, tmp_path / "killed", code=DYING.format(steps=17))
    ended(whole)
    ended(killed, -signal.SIGKILL)
    assert [path.name for path in sorted((tmp_path / "killed").glob("checkpoint-*"))] == [
        "checkpoint-000010",
        "checkpoint-000015",
    ]
    resumed = started(config, tmp_path / "killed", "--resume", "latest")
    ended(resumed)

    assert steps(tmp_path / "killed") == steps(tmp_path / "whole")
    assert len([line for line in steps(tmp_path / "whole") if "loss" in line]) == 40
    mine, theirs = tmp_path / "killed" / "checkpoint-000040", tmp_path / "whole" / "checkpoint-000040"
    names = ["pytorch_lora_weights.safetensors", "ema/pytorch_lora_weights.safetensors", "optimizer.safetensors"]
    for name in names:
        assert (mine / name).read_bytes() == (theirs / name).read_bytes(), name
    start = load_file(theirs / "pytorch_lora_weights.safetensors")
    average = load_file(theirs / "ema" / "pytorch_lora_weights.safetensors")
    assert start.keys() == average.keys()
    assert any(not bool((start[name] == average[name]).all()) for name in start)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_after_its_step_saved_and_with_0(config: Path, tmp_path: Path, number: int) -> None:
    asking = DYING.replace("signal.SIGKILL", f"{int(number)}")
    process = started(config, tmp_path / "run", code=asking.format(steps=3))
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "stopped after 4 steps" in output
    assert os.listdir(tmp_path / "run") and (tmp_path / "run" / "checkpoint-000004" / "state.json").is_file()


# Every moment


class Moments:
    """Copies of a folder as a kill -9 would leave it, before each operation on a file; equal ones once.

    A kill keeps what a process has written, and runs none of its clean-up: a copy of the folder is what it leaves.
    """

    def __init__(self, folder: Path, copies: Path) -> None:
        self.folder, self.copies, self.count = folder, copies, 0
        self._before: list[tuple[str, int, int]] | None = None
        self._watching = False

    def __enter__(self) -> Moments:
        # A hook cannot be taken away again.
        sys.addaudithook(self._see)
        self._watching = True
        return self

    def __exit__(self, *_: object) -> None:
        self._watching = False

    def _see(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self._watching or not event.startswith(("open", "os.", "fcntl.", "shutil.")):
            return
        self._watching = False
        paths = sorted(self.folder.rglob("*"))
        now = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths if path.exists()]
        if now != self._before:
            self._before = now
            if self.folder.is_dir():
                shutil.copytree(self.folder, self.copies / f"{self.count:03d}")
                self.count += 1
        self._watching = True


def listing(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.iterdir()))


def without_times(folder: Path) -> dict[str, object]:
    report = asdict(read_run(folder))
    varying = ("config", "started", "finished", "peak_memory_bytes", "samples_per_s")
    return {name: value for name, value in report.items() if name not in varying} | {"done": bool(report["finished"])}


def goes_on(bench: Bench, folder: Path, whole: Path, **settings: object) -> None:
    """That a run resumed from a folder, or without a checkpoint started anew, leaves what one run leaves."""
    bench.train(folder, *(("--resume", "latest") if checkpoints(folder) else ()), **settings)
    assert listing(folder) == listing(whole)
    assert lines(folder) == lines(whole)
    assert without_times(folder) == without_times(whole)
    for name in (ADAPTER, f"ema/{ADAPTER}", "optimizer.safetensors"):
        assert (checkpoint(folder, 3) / name).read_bytes() == (checkpoint(whole, 3) / name).read_bytes()


def test_killed_at_every_operation_on_a_file_a_run_goes_on_or_starts_again(bench: Bench, tmp_path: Path) -> None:
    settings = {"train__max_steps": 3, "train__checkpoint_every": 1, "train__keep_last": 1, "train__ema_decay": 0.5}
    with Moments(tmp_path / "whole", tmp_path / "killed") as moments:
        bench.train(tmp_path / "whole", **settings)
    assert listing(tmp_path / "whole") == ("checkpoint-000003", "metrics.jsonl", "run.json")
    kinds = set()
    for number in range(moments.count):
        folder = tmp_path / "killed" / f"{number:03d}"
        for whole in checkpoints(folder):
            assert load(whole).step == int(whole.name[-6:])
        if listing(folder) not in kinds:
            kinds.add(listing(folder))
            goes_on(bench, folder, tmp_path / "whole", **settings)
    assert moments.count > 50 and len(kinds) > 12
    assert any("checkpoint-000001.partial" in kind and "checkpoint-000001" not in kind for kind in kinds)
    assert any("checkpoint-000001.removed" in kind for kind in kinds)
