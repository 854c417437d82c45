"""Law 5 with real processes: a run that was killed with -9 and goes on is the run that was never stopped."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

from qie.training.checkpoint import load
from qie.training.checkpoint_folders import checkpoints
from qie.training.reporting.card import read_run
from tests.conftest import ROOT
from tests.training.runs import ADAPTER, Bench, checkpoint, lines

DYING = """
import os, signal, sys
from qie.cli.train import main
from qie.training.run import Run

training_step = Run.training_step

def last_step(run):
    if run.step == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return training_step(run)

Run.training_step = last_step
main(sys.argv[1:])
"""
SETTINGS: dict[str, object] = {
    "model__lora": {"r": 4, "lora_dropout": 0.1},
    "data__caption_dropout_rate": 0.3,
    "data__control_dropout_rate": 0.2,
    "data__batch_size": 2,
    "train__max_steps": 12,
    "train__checkpoint_every": 2,
    "train__keep_last": 2,
    "train__ema_decay": 0.9,
    "train__seed": 3,
    "lr_scheduler__warmup_steps": 4,
    "validation__every": 4,
}


def test_12_steps_are_7_steps_a_kill_and_the_rest_bit_for_bit(any_bench: Bench, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    any_bench.train(whole, **SETTINGS)
    command = [sys.executable, "-c", DYING, *any_bench.words(killed, **SETTINGS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    assert [folder.name for folder in checkpoints(killed)] == ["checkpoint-000004", "checkpoint-000006"]
    any_bench.train(killed, "--resume", "latest", **SETTINGS)
    assert lines(killed) == lines(whole)
    assert len([line for line in lines(whole) if "loss" in line]) == 12
    mine, theirs = checkpoint(killed, 12), checkpoint(whole, 12)
    for name in (ADAPTER, f"ema/{ADAPTER}", "optimizer.safetensors"):
        assert (mine / name).read_bytes() == (theirs / name).read_bytes(), name
    assert (theirs / ADAPTER).read_bytes() != (theirs / "ema" / ADAPTER).read_bytes()


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
        # A thread that reads shards writes nothing here, but while it looks, moments of the run would go unseen.
        if threading.current_thread() is not threading.main_thread():
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
    """That a run resumed from a folder, or started again where there is no checkpoint, leaves what one run leaves."""
    bench.train(folder, *(("--resume", "latest") if checkpoints(folder) else ()), **settings)
    assert listing(folder) == listing(whole)
    assert lines(folder) == lines(whole)
    assert without_times(folder) == without_times(whole)
    for name in (ADAPTER, f"ema/{ADAPTER}", "optimizer.safetensors"):
        assert (checkpoint(folder, 2) / name).read_bytes() == (checkpoint(whole, 2) / name).read_bytes()


def test_killed_at_every_operation_on_a_file_a_run_goes_on_or_starts_again(bench: Bench, tmp_path: Path) -> None:
    settings = {"train__max_steps": 2, "train__checkpoint_every": 1, "train__keep_last": 1, "train__ema_decay": 0.5}
    with Moments(tmp_path / "whole", tmp_path / "killed") as moments:
        bench.train(tmp_path / "whole", **settings)
    assert listing(tmp_path / "whole") == ("checkpoint-000002", "metrics.jsonl", "run.json", "state.json")
    kinds = set()
    for number in range(moments.count):
        folder = tmp_path / "killed" / f"{number:03d}"
        for whole in checkpoints(folder):
            assert load(whole).step == int(whole.name[-6:])
        # No run reads what state.json says, and nothing is asked.
        kind = tuple(name for name in listing(folder) if not name.startswith(("state.json", "control")))
        if kind not in kinds:
            kinds.add(kind)
            goes_on(bench, folder, tmp_path / "whole", **settings)
    assert moments.count > 30 and len(kinds) > 8, (moments.count, len(kinds))
    assert any("checkpoint-000001.partial" in kind and "checkpoint-000001" not in kind for kind in kinds)
    assert any("checkpoint-000001.removed" in kind for kind in kinds)
