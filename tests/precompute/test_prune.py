"""Pruning: of a source that lost rows the shards of a fresh run, of records that were there, also when it is killed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from qie.cli.precompute import main
from qie.errors import QieError, RecipeMismatchError, UsageError
from qie.paths import open_locked
from qie.precompute import Settings, precompute
from qie.precompute.engine import Engine
from qie.precompute.prune import LINKS, pruned
from qie.stores import LocalFolder
from tests.contracts.test_crash_safety import files
from tests.lives import Lives
from tests.stubs import RECIPE, StubEncoder, StubSource, without

ROWS = 30
SOURCE = StubSource.of(ROWS).changed(6, target=b"broken").changed(9, target=b"target 8", controls=(b"control 8",))


def run(source: StubSource, output: Path, *, prune: bool = True, size: int = 4, **named: object) -> list[int]:
    """The rows that were encoded."""
    encoder = StubEncoder(named.pop("recipe", RECIPE))
    rows = named.pop("rows", (0, len(source)))
    precompute(source, encoder, output, rows=rows, shard_size=size, prune=prune, **named)
    return encoder.encoded


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "shards"
    run(SOURCE, folder, prune=False)
    return folder


@pytest.fixture
def shards(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "shards"))


@pytest.mark.parametrize(
    "lost",
    [[], [29], [0], range(17), range(2, 30), [3, 8, 28], [6], range(0, 30, 2)],
    ids=[
        "none",
        "the last",
        "the first",
        "the first 17",
        "all but two",
        "three",
        "one that was skipped",
        "every other",
    ],
)
def test_the_shards_are_those_of_a_fresh_run_and_nothing_is_encoded_again(
    shards: Path, tmp_path: Path, lost: Sequence[int]
) -> None:
    left = without(SOURCE, lost)
    assert run(left, shards) == []
    run(left, tmp_path / "fresh", prune=False)
    assert files(shards) == files(tmp_path / "fresh")


def test_shards_off_the_grid_of_a_dataset_that_grew_are_made_as_a_fresh_run_makes_them(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    for rows in ((0, 10), (10, 18), (18, ROWS)):
        run(SOURCE, shards, prune=False, rows=rows)
    (shards / "excluded.txt").write_text("")
    left = without(SOURCE, [1, 12])
    assert run(left, shards) == []
    (shards / "excluded.txt").unlink()
    run(left, tmp_path / "fresh", prune=False)
    assert files(shards) == files(tmp_path / "fresh")


def test_killed_at_any_moment_and_run_again_it_is_the_same_and_no_row_is_encoded(tmp_path: Path) -> None:
    lost, rows = (0, 1, 2, 7, 11), (0, 9)
    old, killed = tmp_path / "old", tmp_path / "killed"
    source = StubSource.of(14)
    run(source, old, prune=False)
    run(without(source, lost), tmp_path / "fresh", prune=False)
    expected, moment, died = files(tmp_path / "fresh"), 0, True
    with Lives() as lives:
        while died:
            shutil.rmtree(killed, ignore_errors=True)
            shutil.copytree(old, killed)
            died, encoded = lives.live(killed, moment, [rows], lost=lost)
            assert encoded == []
            again, encoded = lives.live(killed, ranges=[rows], lost=lost)
            assert not again and encoded == [] and files(killed) == expected, moment
            moment += 17  # each of them was tried once
    assert moment > 100


def test_after_a_killed_one_only_a_run_that_prunes_goes_on(shards: Path) -> None:
    left = without(SOURCE, range(17))

    class Failing(StubSource):
        def read(self, index: int):
            raise QieError("the source is gone")

    with pytest.raises(QieError, match="gone"):
        run(Failing(left.rows), shards)
    assert (shards / LINKS).is_dir()
    with pytest.raises(UsageError, match="did not end"):
        run(left, shards, prune=False)
    with open_locked(shards / LINKS / "lock"), pytest.raises(UsageError, match="another run prunes"):
        run(left, shards)
    assert run(left, shards) == [] and not (shards / LINKS).exists()


def test_records_of_a_shard_that_was_replaced_before_the_end_are_found_by_the_next_run(shards: Path) -> None:
    rows = [*SOURCE.rows[1:29], SOURCE.rows[0]]  # the first one is the last now
    moved, encoder = StubSource(tuple(replace(row, index=n) for n, row in enumerate(rows))), StubEncoder()
    with pytest.raises(QieError), pruned(LocalFolder(shards), RECIPE, (0, 29), 4, 29) as links:
        Engine(moved, encoder, LocalFolder(shards), Settings(reuse=links)).run([(0, 4)])
        raise QieError("the machine went down")
    assert encoder.encoded == run(moved, shards) == []


def test_what_cannot_be_pruned_is_refused_and_stays_as_it_was(
    shards: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = without(SOURCE, [0])
    with pytest.raises(UsageError, match="no longer has") as caught:
        run(left, shards, prune=False)
    assert "--prune" in str(caught.value)
    with pytest.raises(UsageError, match="for all rows"):
        run(left, shards, rows=(0, 8))
    with pytest.raises(UsageError, match="--trust-published"):
        run(left, shards, settings=Settings(trust_published=True))
    with pytest.raises(RecipeMismatchError):
        run(left, shards, recipe=replace(RECIPE, vae_dtype="bfloat16"))

    class Store:
        """A folder that is none of a local disk."""

        url = "s3://bucket/shards"

    with pytest.raises(UsageError, match="in a store") as caught:
        monkeypatch.setattr("qie.precompute.local.open_folder", lambda place: Store())
        run(left, shards)
    assert "--reuse" in str(caught.value)
    monkeypatch.setattr("qie.precompute.local.open_folder", LocalFolder)

    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(UsageError, match="second names") as caught:
        run(left, shards)
    assert "--reuse" in str(caught.value)
    assert files(shards) == files(whole)


@pytest.mark.parametrize(
    "other",
    ["--start-idx 0", "--end-idx 5", "--part 1/2", "--dry-run", "--trust-published", "--engine ray"],
)
def test_options_of_a_part_of_the_work_do_not_go_with_it(tmp_path: Path, other: str) -> None:
    (tmp_path / "rows.csv").write_text("path_target,path_control,prompt\na.png,b.png,p\n")
    config = tmp_path / "c.yaml"
    config.write_text(
        f"model: {{pretrained_model_name_or_path: m, family: edit}}\ncache: {{cache_dir: {tmp_path}/out}}\n"
    )
    arguments = ["--config", str(config), "--source", str(tmp_path / "rows.csv"), "--prune", *other.split()]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and f"--prune cannot be combined with {other.split(' ')[0]}" in result.stderr
