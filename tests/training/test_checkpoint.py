"""Checkpoint folders: whole or not there, and what is damaged is named with what to do instead."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qie.errors import QieError, UsageError
from qie.training import checkpoint
from qie.training.checkpoint import checkpoints, find_checkpoint, publish_checkpoint, read_state, remove_old
from qie.training.lock import LOCK_FILE, locked


def written(output_dir: Path, step: int) -> Path:
    def write(folder: Path) -> dict[str, Any]:
        (folder / "ema").mkdir()
        (folder / "weights").write_bytes(b"weights of %d" % step)
        (folder / "ema" / "weights").write_bytes(b"average")
        return {"step": step, "half": 0.1}

    return publish_checkpoint(output_dir, step, write)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    folder = written(tmp_path, 7)
    assert folder == tmp_path / "checkpoint-000007"
    assert read_state(folder) == {"step": 7, "half": 0.1}
    assert sorted(path.name for path in folder.iterdir()) == ["ema", "state.json", "weights"]


def test_the_latest_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 5):
        written(tmp_path, step)
    (tmp_path / "checkpoint-2000000.partial").mkdir()
    (tmp_path / "checkpoint-x").mkdir()
    assert find_checkpoint("latest", tmp_path).name == "checkpoint-1000000"
    assert find_checkpoint(str(tmp_path / "checkpoint-000005"), tmp_path).name == "checkpoint-000005"


def test_where_there_is_none_to_resume_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint to resume"):
        find_checkpoint("latest", tmp_path)
    with pytest.raises(UsageError, match="no such checkpoint"):
        find_checkpoint(str(tmp_path / "checkpoint-000005"), tmp_path)


DAMAGES = {
    "a bit is flipped": lambda folder: (folder / "weights").write_bytes(b"weights of 9"),
    "a file is cut short": lambda folder: (folder / "weights").write_bytes(b"weights"),
    "a file is gone": lambda folder: (folder / "ema" / "weights").unlink(),
    "the state is cut short": lambda folder: (folder / "state.json").write_bytes(
        (folder / "state.json").read_bytes()[:-9]
    ),
    "a bit of the state is flipped": lambda folder: (folder / "state.json").write_bytes(
        (folder / "state.json").read_bytes().replace(b"0.1", b"0.3")
    ),
    "the state is no text": lambda folder: (folder / "state.json").write_bytes(b"\xff"),
    "the state is too deep": lambda folder: (folder / "state.json").write_text("[" * 100_000),
    "the state is a list": lambda folder: (folder / "state.json").write_text("[]"),
    "the state is another tool's": lambda folder: (folder / "state.json").write_text("{}"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_offered(tmp_path: Path, damage: Any) -> None:
    written(tmp_path, 3)
    damage(written(tmp_path, 8))
    with pytest.raises(QieError, match="damaged") as caught:
        read_state(tmp_path / "checkpoint-000008")
    assert caught.value.where == tmp_path / "checkpoint-000008"
    assert caught.value.hint == f"go on from the one before: --resume {tmp_path / 'checkpoint-000003'}"


def test_without_one_before_a_new_start_is_offered(tmp_path: Path) -> None:
    (written(tmp_path, 8) / "weights").unlink()
    with pytest.raises(QieError) as caught:
        read_state(tmp_path / "checkpoint-000008")
    assert "start again" in str(caught.value.hint)


def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_half_written(tmp_path: Path) -> None:
    written(tmp_path, 3)

    def write(folder: Path) -> dict[str, Any]:
        (folder / "weights").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(QieError, match="cannot be written") as caught:
        publish_checkpoint(tmp_path, 8, write)
    assert "No space left" in str(caught.value.found)
    assert str(tmp_path / "checkpoint-000003") in str(caught.value.hint)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000003"]
    assert read_state(tmp_path / "checkpoint-000003")["step"] == 3


def test_of_a_step_that_is_there_already_the_newer_one_stays(tmp_path: Path) -> None:
    written(tmp_path, 3)
    folder = publish_checkpoint(tmp_path, 3, lambda folder: {"step": 3, "half": 0.7})
    assert read_state(folder) == {"step": 3, "half": 0.7}
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
        written(tmp_path, number)
    remove_old(tmp_path, step, last, every)
    assert [int(folder.name[-6:]) for folder in checkpoints(tmp_path)] == kept
    assert len(list(tmp_path.iterdir())) == len(kept)


def test_a_checkpoint_whose_removal_is_cut_short_is_none_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, 1), written(tmp_path, 2)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *arguments, **named: None)
    remove_old(tmp_path, 2, 1, None)
    assert checkpoints(tmp_path) == [tmp_path / "checkpoint-000002"]


# One run at a time


HOLDING = """
import sys
from pathlib import Path
from qie.training.lock import locked

with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_of_one_run_until_that_ends_or_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDING, str(tmp_path / "runs" / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holding:
        assert holding.stdout and holding.stdout.readline() == "locked\n"
        with pytest.raises(UsageError, match="another run") as caught, locked(tmp_path / "runs" / "run"):
            pass
        assert f"process {holding.pid} on " in str(caught.value.found)
        holding.kill()
    assert [path.name for path in (tmp_path / "runs" / "run").iterdir()] == [LOCK_FILE]
    with locked(tmp_path / "runs" / "run"):
        pass
    assert list((tmp_path / "runs" / "run").iterdir()) == []


def test_a_lock_leaves_no_folder_that_was_not_used_and_follows_no_link(tmp_path: Path) -> None:
    with locked(tmp_path / "runs" / "run"):
        assert (tmp_path / "runs" / "run" / LOCK_FILE).is_file()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "precious").write_text("content")
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "precious")
    with pytest.raises(QieError, match="cannot be written"), locked(tmp_path):
        pass
    assert (tmp_path / "precious").read_text() == "content"
