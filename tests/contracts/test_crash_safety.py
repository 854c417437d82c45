"""Law 4: killed with -9 at any moment and run again, the output is what a run that was never killed writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qie.precompute import precompute
from qie.shards.storage import published
from tests.conftest import ROOT
from tests.stubs import StubEncoder, StubSource

# A real process that kills itself: before encoding a row, or at a call of the operating system while publishing.
CHILD = """
import os, signal, sys
from pathlib import Path
from qie.precompute import precompute
from tests.stubs import StubEncoder, StubSource

directory, moment, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
left = number

def countdown():
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)

class Encoder(StubEncoder):
    def encode(self, row):
        if moment == "encode":
            countdown()
        print(row.index, flush=True)
        return super().encode(row)

if moment != "encode":
    owner, name = {"fsync": (os, "fsync"), "replace": (Path, "replace"), "unlink": (Path, "unlink")}[moment]
    original = getattr(owner, name)
    def dying(*arguments, **named):
        countdown()
        return original(*arguments, **named)
    setattr(owner, name, dying)

precompute(StubSource.of(20), Encoder(), directory, rows=(0, 20), shard_size=8)
"""


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def run(directory: Path, moment: str, number: int) -> tuple[int, list[int]]:
    """Exit status, and the rows that were encoded."""
    arguments = [sys.executable, "-c", CHILD, directory, moment, str(number)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, -9), done.stderr
    return done.returncode, [int(line) for line in done.stdout.split()]


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("encode", 0),
        ("encode", 11),
        ("fsync", 0),
        ("fsync", 1),
        ("replace", 0),
        ("replace", 1),
        ("replace", 3),
        ("unlink", 1),
    ],
)
def test_a_killed_run_started_again_leaves_what_an_undisturbed_run_writes(
    tmp_path: Path, moment: str, number: int
) -> None:
    precompute(StubSource.of(20), StubEncoder(), tmp_path / "undisturbed", rows=(0, 20), shard_size=8)

    status, first = run(tmp_path / "killed", moment, number)
    assert status == -9, "the child was to kill itself"
    visible = published(tmp_path / "killed")
    done = {row for path in visible for row in range(*map(int, path.stem.split("-")))}
    status, second = run(tmp_path / "killed", moment="encode", number=1000)

    assert status == 0
    assert files(tmp_path / "killed") == files(tmp_path / "undisturbed")
    assert sorted(second) == sorted(set(range(20)) - done), "published rows were encoded again, or others forgotten"
    assert done <= set(first)


def test_a_shard_is_visible_only_when_it_is_complete(tmp_path: Path) -> None:
    seen = []

    class Watching(StubEncoder):
        def encode(self, row):
            seen.append([path.name for path in published(tmp_path)])
            return super().encode(row)

    precompute(StubSource.of(10), Watching(), tmp_path, rows=(0, 10), shard_size=5)
    assert seen[:5] == [[]] * 5
    assert seen[5:] == [["00000000-00000005.json"]] * 5
