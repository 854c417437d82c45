"""What a stream cannot be opened from: each with an error that says what is wrong, where, and what to do."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from qie.data.opening import open_stream
from qie.errors import QieError, ShardError, UsageError
from qie.shards.reader import Shard
from tests.builders import assert_same, make_sample, rewrite_index, write_shard

STEM = "00000000-00000004"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Four samples of one shape, and one of another."""
    folder = tmp_path / "shards"
    write_shard(folder, [make_sample(number) for number in range(4)])
    write_shard(folder, [make_sample(4, target=(2, 2))], start=4)
    return folder


def refused(kind: type[QieError], *arguments: Any, **settings: Any) -> QieError:
    with pytest.raises(kind) as error:
        open_stream(*arguments, **settings)
    return error.value


# Nothing there


def test_of_a_folder_without_shards_it_is_said_what_is_there(tmp_path: Path) -> None:
    for name in ("holiday.jpg", "notes.txt"):
        (tmp_path / name).touch()

    error = refused(UsageError, tmp_path)
    assert error.where == tmp_path and "00000000-00000064.tar" in str(error.expected) and "qie-precompute" in error.hint
    assert "holiday.jpg" in str(error.found)


def test_a_pattern_that_matches_nothing_is_named_though_others_match(shards: Path) -> None:
    error = refused(UsageError, [shards, f"{shards}/9*.tar"])

    assert error.where == f"{shards}/9*.tar"


# Names that climb out


@pytest.mark.parametrize("agreeing", [False, True], ids=["member", "member and key"])
@pytest.mark.parametrize("name", ["../secret", "../../etc/passwd", "/etc/passwd", "a/../../b", "..\\secret"])
def test_a_name_that_climbs_out_is_refused_even_if_the_index_agrees_with_itself(
    shards: Path, name: str, agreeing: bool
) -> None:
    def climb(values: dict[str, Any]) -> None:
        old = values["samples"][0]["key"]
        if agreeing:
            values["samples"][0]["key"] = name
        values["files"][f"{name}.safetensors"] = values["files"].pop(f"{old}.safetensors")

    rewrite_index(shards / f"{STEM}.json", climb)

    assert STEM in str(refused(ShardError, shards))


# Settings


def test_a_batch_larger_than_every_shape_is_refused_when_tails_are_dropped(shards: Path) -> None:
    error = refused(UsageError, shards, batch_size=5, tail="drop")

    assert "0 batches" in error.what
    assert "5 samples" in str(error.expected) and "data.batch_size" in error.hint
    assert "4 of 48×32 px" in str(error.found) and "1 of 16×16 px" in str(error.found)
    assert len(open_stream(shards, batch_size=5)) == 2, "padded, the same has batches"
    assert len(open_stream(shards, batch_size=4, tail="drop")) == 1
    assert "8 samples" in str(refused(UsageError, shards, batch_size=4, tail="drop", world_size=2).expected)


def test_rows_kept_out_until_none_is_left_are_refused(shards: Path) -> None:
    assert "validation.rows" in refused(UsageError, shards, validation_rows=5).what


def test_a_weight_of_a_source_that_is_not_there_is_refused_with_those_that_are(shards: Path) -> None:
    error = refused(UsageError, shards, weights={"photos": 2.0})
    assert "'photos'" in error.what and error.expected == "one of ''"
    assert len(open_stream(shards, weights={"photos": 1.0})) == 5, "a weight that changes nothing is none"


# As many as there are


def test_there_may_be_more_shards_than_files_that_a_process_may_open_and_one_that_is_kept_open_stays_so(
    tmp_path: Path,
) -> None:
    write_shard(tmp_path, [make_sample(0)])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    are_open = [int(number) for number in os.listdir("/proc/self/fd")]
    may = 2 * max(are_open) + 16
    count = may - len(are_open) + 8
    # Copies under further names, each made the index of its own row by hand: written one by one, they take long.
    for row in range(1, count):
        stem = f"{row:08d}-{row + 1:08d}"
        shutil.copyfile(tmp_path / "00000000-00000001.tar", tmp_path / f"{stem}.tar")
        shutil.copyfile(tmp_path / "00000000-00000001.json", tmp_path / f"{stem}.json")
        rewrite_index(
            tmp_path / f"{stem}.json",
            lambda values, row=row: (values.update(start=row, stop=row + 1), values["samples"][0].update(row=row)),
        )

    kept = Shard(tmp_path / "00000000-00000001.json")
    resource.setrlimit(resource.RLIMIT_NOFILE, (may, hard))
    try:
        kept.tar.keep_open()
        assert sum(len(batch) for batch in open_stream(tmp_path)) == count
        kept.file.folder.delete(kept.file.name)
        assert_same(kept.load(kept.index.samples[0]), make_sample(0))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
