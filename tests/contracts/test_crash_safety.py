"""Law 4: killed with -9 at any moment and run again, the output is what a run that was never killed writes.

Every family's records are killed at random moments. At which moments a file can be half done no family decides, so the
test of every moment takes one.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from qie.precompute import precompute
from qie.shards.discovery import published, rows_of
from qie.shards.reader import Shard
from qie.shards.verify import shard_faults
from tests.lives import ROWS, SHARD_SIZE, Lives
from tests.stubs import RECIPES, StubEncoder, StubSource

KILLS = 5  # of each family


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}


def records(folder: Path) -> list[tuple[int, str, bytes]]:
    shards = [Shard(index) for index in published(folder)]
    return [(entry.row, entry.key, shard.verified_record(entry)) for shard in shards for entry in shard.index.samples]


def test_killed_at_random_moments_the_output_is_that_of_an_undisturbed_run(tmp_path: Path, family: str) -> None:
    dice = random.Random(f"0 {family}")  # the first death of each comes late enough that something is published
    killed, everything, undisturbed = tmp_path / "killed", set(range(ROWS)), tmp_path / "undisturbed"
    precompute(StubSource.of(ROWS), StubEncoder(RECIPES[family]), undisturbed, rows=(0, ROWS), shard_size=SHARD_SIZE)
    expected = files(undisturbed)
    kills, deaths_with_progress = 0, 0
    with Lives() as lives:
        while kills < KILLS:
            missing = everything - done(killed)
            died, encoded = lives.live(killed, events=dice.randrange(160), family=family)
            assert set(encoded) <= missing, "a published row was encoded again"
            if not died:
                assert files(killed) == expected
                shutil.rmtree(killed)
                continue
            kills += 1
            assert all(expected[index.name] == index.read() for index in published(killed))

            # Started again now, a run encodes what is not published, each row once, and nothing else.
            missing = everything - done(killed)
            deaths_with_progress += 0 < len(missing) < ROWS
            shutil.copytree(killed, tmp_path / "copy")
            died, encoded = lives.live(tmp_path / "copy", family=family)
            assert not died and sorted(encoded) == sorted(missing)
            assert files(tmp_path / "copy") == expected
            shutil.rmtree(tmp_path / "copy")
    # How far a run gets in so many events depends on its threads.
    assert deaths_with_progress > KILLS / 4, "most deaths came too early or too late to tell anything"


def test_killed_at_every_moment_a_run_goes_on_with_the_same_shard_size_and_with_another(tmp_path: Path) -> None:
    rows, killed, copy = (0, 8), tmp_path / "killed", tmp_path / "copy"
    for size in (3, 5):
        precompute(StubSource.of(ROWS), StubEncoder(), tmp_path / f"by {size}", rows=rows, shard_size=size)
    expected = files(tmp_path / "by 3")
    moments = 0
    with Lives() as lives:
        while lives.live(killed, moments, [rows], [3])[0]:
            assert files(killed).items() >= {name: expected[name] for name in names(killed)}.items()
            missing = set(range(*rows)) - done(killed)
            for size in (3, 5):
                shutil.copytree(killed, copy) if killed.exists() else None
                died, encoded = lives.live(copy, ranges=[rows], sizes=[size])
                assert not died and sorted(encoded) == sorted(missing), (moments, size)
                assert records(copy) == records(tmp_path / "by 5")
                assert size == 5 or files(copy) == expected
                assert not [path for path in copy.iterdir() if path.suffix not in (".tar", ".json")]
                shutil.rmtree(copy)
            shutil.rmtree(killed, ignore_errors=True)
            moments += 1
    assert files(killed) == expected and moments > 40


def names(folder: Path) -> set[str]:
    """Files of published shards."""
    return {f"{index.stem}.{kind}" for index in published(folder) for kind in ("tar", "json")}


def done(folder: Path) -> set[int]:
    """Rows in published shards."""
    return {row for index in published(folder) for row in range(*rows_of(index))}


def test_a_shard_is_visible_only_when_it_is_complete(tmp_path: Path, family: str) -> None:
    seen = set()

    class Watching(StubEncoder):
        def encode(self, row):
            for index in published(tmp_path):
                assert list(shard_faults(Shard(index))) == []
                seen.add(index.name)
            return super().encode(row)

    precompute(StubSource.of(80), Watching(RECIPES[family]), tmp_path, rows=(0, 80), shard_size=5)
    assert len(seen) > 10
