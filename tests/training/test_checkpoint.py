"""Checkpoint folders: whole or not there, and what is damaged is named with what to do instead. One run at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qie.errors import QieError, UsageError
from qie.paths import is_at, open_locked
from qie.training import checkpoint_folders as module
from qie.training.checkpoint import OPTIMIZER_FILE, RunState, RunTensors, load, save
from qie.training.checkpoint_folders import checkpoints, find_checkpoint, find_resume, remove_old
from qie.training.run_lock import LOCK_FILE, locked
from tests.training.reports import report

STREAM = {"epoch": 1, "position": 3, "of": {"seed": 1}}


def state_of(step: int, **changes: Any) -> RunState:
    values = {"nonfinite": 0, "stream": STREAM, "optimizer": {"group 0/lr": 0.1}, "schedule": {}, "run": {}}
    return RunState(**{"step": step, "batches": 2 * step, **values, **changes})


class Model:
    """Keeps its weights in a file `weights`, and those of a group in a folder of its name."""

    def save(self, folder: Path, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for group, values in tensors.items():
            place = folder / group
            place.mkdir()
            save_file(dict(values), place / "weights")


class Full(Model):
    """Has no room for the second file."""

    def save(self, folder: Path, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        super().save(folder, tensors)
        raise OSError(errno.ENOSPC, "No space left on device")


def written(output_dir: Path, step: int, model: Any = None, **changes: Any) -> Path:
    one = torch.full((2,), float(step))
    tensors = RunTensors({"trained": {"a": one}, "ema": {"a": one / 2}}, {"a/exp_avg": one})
    return save(output_dir, state_of(step, **changes), tensors, model or Model(), report(steps=step))


def test_a_saved_state_is_loaded_again_with_its_tensors_in_files_that_everyone_may_read(tmp_path: Path) -> None:
    folder = written(tmp_path, 7, nonfinite=2)
    assert folder == tmp_path / "checkpoint-000007"
    assert load(folder) == state_of(7, nonfinite=2)
    assert load_file(folder / OPTIMIZER_FILE)["a/exp_avg"].tolist() == [7.0, 7.0]
    assert "| steps | 7 |" in (folder / "README.md").read_text()
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert files == ["README.md", "ema/weights", OPTIMIZER_FILE, "state.json", "trained/weights"]
    assert {(folder / name).stat().st_mode & 0o444 for name in files} == {(folder.stat().st_mode & 0o444)}


def test_a_state_of_earlier_versions_without_hash_identity_and_count_is_loaded(tmp_path: Path) -> None:
    folder = written(tmp_path, 7, run={"model.lora": None})
    content = json.loads((folder / "state.json").read_text())
    for name in ("sha256", "nonfinite", "run"):
        del content[name]
    (folder / "state.json").write_text(json.dumps(content))
    assert load(folder) == state_of(7)


def test_the_latest_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 5):
        written(tmp_path, step)
    (tmp_path / "checkpoint-2000000.partial").mkdir()
    (tmp_path / "checkpoint-x").mkdir()
    assert find_checkpoint("latest", tmp_path).name == "checkpoint-1000000"
    assert find_checkpoint(str(tmp_path / "checkpoint-000005"), tmp_path).name == "checkpoint-000005"


def test_where_there_is_none_to_resume_that_is_said(tmp_path: Path) -> None:
    for resume, what in (("latest", "no checkpoint to resume"), (tmp_path / "checkpoint-05", "no such checkpoint")):
        with pytest.raises(UsageError, match=what):
            find_checkpoint(str(resume), tmp_path)
    newest = written(tmp_path / "run", 7)
    with pytest.raises(UsageError, match="no such checkpoint") as caught:
        find_checkpoint(str(tmp_path / "run"), tmp_path)
    assert caught.value.hint == f"--resume {newest}"


def test_a_folder_that_holds_a_run_is_resumed_from_its_own_checkpoints_alone(tmp_path: Path) -> None:
    mine, other = written(tmp_path / "mine", 1), written(tmp_path / "other", 1)
    assert find_resume("latest", mine.parent) == mine
    for resume in (None, str(other)):
        with pytest.raises(UsageError, match="already holds a run"):
            find_resume(resume, mine.parent)
    assert find_resume(str(other), tmp_path / "new") == other
    assert find_resume(None, tmp_path / "new") is None


def rewritten(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


DAMAGES = {
    "a bit is flipped": rewritten("trained/weights", lambda content: content[:-1] + b"?"),
    "a file is cut short": rewritten(OPTIMIZER_FILE, lambda _: b"weights"),
    "a file is gone": lambda folder: (folder / "ema" / "weights").unlink(),
    "the state is cut short": rewritten("state.json", lambda content: content[:-9]),
    "a bit of the state is flipped": rewritten("state.json", lambda content: content.replace(b"0.1", b"0.3")),
    "the state is no text": rewritten("state.json", lambda _: b"\xff"),
    "the state is too deep": rewritten("state.json", lambda _: b"[" * 100_000),
    "the state is a list": rewritten("state.json", lambda _: b"[]"),
    "the state is another tool's": rewritten("state.json", lambda _: b"{}"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_checkpoint_is_named_and_a_new_start_or_the_one_before_it_offered(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    folder = written(tmp_path, 8)
    damage(folder)
    for offered in ("start again", f"continue from the one before: --resume {tmp_path / 'checkpoint-000003'}"):
        with pytest.raises(QieError, match="damaged") as caught:
            load(folder)
        assert caught.value.where == folder and str(caught.value.hint).startswith(offered)
        written(tmp_path, 3)


def test_without_hashes_only_sizes_are_compared(tmp_path: Path) -> None:
    folder = written(tmp_path, 8)
    DAMAGES["a bit is flipped"](folder)
    assert load(folder, hashes=False) == state_of(8)
    DAMAGES["a file is cut short"](folder)
    with pytest.raises(QieError, match="damaged"):
        load(folder, hashes=False)


def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_half_written(tmp_path: Path) -> None:
    written(tmp_path, 3)
    with pytest.raises(QieError, match="cannot be written") as caught:
        written(tmp_path, 8, Full())
    assert "No space left" in str(caught.value.found)
    assert str(tmp_path / "checkpoint-000003") in str(caught.value.hint)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000003"]
    assert load(tmp_path / "checkpoint-000003").step == 3


def test_of_a_step_that_is_there_already_the_newer_one_stays(tmp_path: Path) -> None:
    written(tmp_path, 3)
    folder = written(tmp_path, 3, nonfinite=1)
    assert load(folder).nonfinite == 1
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("step", "last", "every", "kept"),
    [
        (6, None, None, [1, 2, 3, 4, 5, 6]),
        (6, 2, None, [5, 6]),
        (6, 1, 3, [3, 6]),
        (6, 9, None, [1, 2, 3, 4, 5, 6]),
        (6, 2, 2, [2, 4, 5, 6]),
        # A run that was resumed from 3, since 6 is damaged: what it goes on from next is not 6.
        (4, 1, None, [4, 5, 6]),
    ],
)
def test_the_last_ones_and_every_nth_are_kept(
    tmp_path: Path, step: int, last: int | None, every: int | None, kept: list
) -> None:
    for number in range(1, 7):
        (tmp_path / f"checkpoint-{number:06d}").mkdir()
    remove_old(tmp_path, step, last, every)
    assert [int(folder.name[-6:]) for folder in checkpoints(tmp_path)] == kept
    assert len(list(tmp_path.iterdir())) == len(kept)


def test_a_checkpoint_whose_removal_is_cut_short_is_none_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step:06d}").mkdir()
    monkeypatch.setattr(module.shutil, "rmtree", lambda *arguments, **named: None)
    remove_old(tmp_path, 2, 1, None)
    assert checkpoints(tmp_path) == [tmp_path / "checkpoint-000002"]


# One run at a time


HOLDING = """
import sys
from pathlib import Path
from qie.training.run_lock import locked

with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_of_one_run_until_that_ends_or_is_killed(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    command = [sys.executable, "-c", HOLDING, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holding:
        assert holding.stdout and holding.stdout.readline() == "locked\n"
        with pytest.raises(UsageError, match="another run") as caught, locked(run):
            pass
        assert f"process {holding.pid} on " in str(caught.value.found)
        holding.kill()
    assert [path.name for path in run.iterdir()] == [LOCK_FILE]
    with locked(run):
        pass
    assert list(run.iterdir()) == []


def test_a_lock_leaves_no_folder_that_was_not_used_and_follows_no_link(tmp_path: Path) -> None:
    with locked(tmp_path / "runs" / "run"):
        assert (tmp_path / "runs" / "run" / LOCK_FILE).is_file()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "precious").write_text("content")
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "precious")
    with pytest.raises(QieError, match="cannot be written"), locked(tmp_path):
        pass
    assert (tmp_path / "precious").read_text() == "content"


def test_a_lock_of_a_file_that_its_holder_removed_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock, asked = tmp_path / LOCK_FILE, fcntl.flock, []

    def removed_meanwhile(file: Any, how: int) -> None:
        asked.append(how)
        if len(asked) == 1:
            path.unlink()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    with open_locked(path) as file:
        assert is_at(file, path) and asked == [fcntl.LOCK_EX] * 2
        with pytest.raises(BlockingIOError), open_locked(path, wait=False):
            pass
