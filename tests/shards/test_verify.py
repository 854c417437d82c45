"""What `qie-stats --verify` names: all that training would refuse, and all that it never looks at."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from qie.cli import stats
from qie.errors import QieError, ShardError
from qie.shards.compact_index import COMPACT_NAME, read_compact, write_compact
from qie.shards.discovery import find_indexes
from qie.shards.index import member_name
from qie.shards.reader import Shard
from qie.shards.sample_table import COLUMNS
from qie.shards.shard_set import ShardSet, compact_folder
from qie.shards.verify import compact_faults
from qie.stats import Summary, summarise
from qie.stores import LocalFolder, open_folder
from qie.stores.objects import ObjectFolder
from tests.builders import assert_same, make_sample, mutated_json, rewrite_index, without_own_hash, write_shard
from tests.s3 import S3

SMALL: dict[str, Any] = {"target": (1, 2), "controls": ((1, 1),), "tokens": 3, "empty_tokens": 3, "width": 2}
SAMPLES = [make_sample(number, shared_prefix=2, **SMALL) for number in range(4)]
FIRST, SECOND = "00000000-00000003", "00000003-00000004"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards, of rows 0 to 2 and of row 3, with a compacted index."""
    write_shard(tmp_path / "shards", [SAMPLES[0], None, SAMPLES[1]])
    write_shard(tmp_path / "shards", [SAMPLES[2]], start=3)
    compact(tmp_path / "shards")
    return tmp_path / "shards"


def compact(folder: Path) -> None:
    compact_folder(LocalFolder(folder))


def verified(place: Path | str) -> Summary:
    return summarise(find_indexes([place]), verify=True)


def flips(path: Path, count: int) -> Iterator[int]:
    """Flip one bit of one byte at a time, of bytes all over the file; the file keeps its time, as on a failing disk."""
    content, facts, dice = path.read_bytes(), path.stat(), random.Random(0)

    def put(damaged: bytes) -> None:
        path.write_bytes(damaged)
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))

    for place in sorted(dice.sample(range(len(content)), min(count, len(content)))):
        put(content[:place] + bytes([content[place] ^ 1 << dice.randrange(8)]) + content[place + 1 :])
        yield place
    put(content)


def reading_names(folder: Path, stem: str) -> bool:
    """Whether reading all samples with verify="always" ends in an error; it names `stem`. If not, all are right."""
    try:
        samples = ShardSet.open([folder], verify="always")
        for position, sample in enumerate(SAMPLES[:3]):
            for read in (samples.load, samples.fetch):
                assert_same(read(position), sample)
    except QieError as error:
        assert stem in str(error)
        return True
    return False


@pytest.mark.parametrize("name", [f"{FIRST}.json", f"{FIRST}.tar", f"{SECOND}.json", COMPACT_NAME])
def test_every_flipped_bit_is_named_and_one_that_matters_when_it_is_read(folder: Path, name: str) -> None:
    text, stem = (folder / name).read_bytes(), name.partition(".")[0]
    records = Shard(folder / f"{FIRST}.json").index.files.values() if name.endswith("tar") else []
    named = 0

    for place in flips(folder / name, 200):
        found = verified(folder)
        if not any(stem in fault for fault in found.faults):
            # The name of the index's own hash became another: nothing else did, and that there is none is told.
            field = text.index(b"this_sha256")
            assert field <= place < field + 11 and found.unhashed == 1, (place, found.faults)
        named += (reads := reading_names(folder, stem))
        if records:
            assert reads == any(one.offset <= place < one.offset + one.size for one in records), place
    assert (named > 25) == (not name.endswith("json")), "beside a compacted index no other index is read"
    assert (verified(folder).faults, verified(folder).unhashed) == ([], 0)


def test_whatever_an_index_says_the_right_sample_comes_or_a_shard_error_that_verify_names_too(folder: Path) -> None:
    """Of an index without a hash of its own: all of its values are changed."""
    index, dice = folder / f"{FIRST}.json", random.Random(1)
    text = without_own_hash(index.read_text(encoding="utf-8"))
    (folder / COMPACT_NAME).unlink()
    right = {sample.key: sample for sample in SAMPLES}

    found = Counter[str]()
    for _ in range(200):
        index.write_text(mutated_json(text, dice), encoding="utf-8")
        try:
            shard = Shard(index)
            loaded = [shard.load(entry) for entry in shard.index.samples]
            samples = ShardSet.open([folder])
            for read in (samples.fetch, samples.fetch, samples.load):
                loaded += [read(position) for position in range(len(samples))]
            for sample in loaded:
                assert_same(sample, right[sample.key])
            found["right"] += 1
        except ShardError:
            found["refused"] += 1
            assert verified(folder).faults
    assert min(found["right"], found["refused"]) > 10


def edited(folder: Path) -> None:
    index = folder / f"{FIRST}.json"
    index.write_text(index.read_text().replace("row 0", "no 0"))


def moved(values: dict) -> None:
    one, other = (member_name(SAMPLES[number].key) for number in (0, 1))
    values["files"][one] = values["files"][other]


def overlaid(folder: Path) -> None:
    """Other bytes in front of the first record: a tar that is no longer the same, and two sound records."""
    with (folder / f"{FIRST}.tar").open("r+b") as tar:
        tar.write(b"x" * 512)


DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "an index is gone": (lambda folder: (folder / f"{FIRST}.json").unlink(), f"{FIRST}.tar", "a tar has no index"),
    "a tar is gone": (lambda folder: (folder / f"{FIRST}.tar").unlink(), f"{FIRST}.tar", "the shard is missing"),
    "an index was edited": (
        edited,
        f"{FIRST}.json",
        "its SHA-256 does not match its content",
    ),
    "an index names another record": (
        lambda folder: rewrite_index(folder / f"{FIRST}.json", moved, own_hash=True),
        f"{FIRST}.tar",
        "the record is another sample's",
    ),
    **{
        f"an index has another {name}": (
            lambda folder, name=name, length=length: rewrite_index(
                folder / f"{FIRST}.json",
                lambda values: values["files"][member_name(SAMPLES[0].key)].update({name: "0" * (length - 1) + "1"}),
                own_hash=True,
            ),
            f"{SAMPLES[0].key}",
            "a record is damaged",
        )
        for name, length in (("sha256", 64), ("xxh3_128", 32))
    },
    "bytes between records": (overlaid, f"{FIRST}.tar", "the tar is not the one that its index describes"),
    "the compacted index is cut": (
        lambda folder: os.truncate(folder / COMPACT_NAME, 100),
        COMPACT_NAME,
        "the compacted index is damaged",
    ),
}


@pytest.mark.parametrize(("damage", "where", "what"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named_by_the_command_which_ends_with_1(
    folder: Path, damage: Callable[[Path], object], where: str, what: str
) -> None:
    damage(folder)

    result = CliRunner().invoke(stats.main, [str(folder), "--verify"])

    assert result.exit_code == 1
    assert any(where in line and what in line for line in result.stderr.splitlines()), result.stderr
    assert "verified" not in result.stdout


def test_of_shards_that_were_named_one_by_one_no_other_s_damage_is_told(folder: Path) -> None:
    write_shard(folder, [SAMPLES[3]], start=4)
    (folder / f"{FIRST}.json").unlink()

    assert verified(folder / f"{SECOND}.tar").faults == []
    assert len(verified(folder).faults) == 1


def test_indexes_without_a_hash_of_their_own_are_sound_and_told(folder: Path) -> None:
    for path in folder.glob("*.json"):
        rewrite_index(path, lambda values: None)

    result = CliRunner().invoke(stats.main, [str(folder), "--verify"])

    assert result.exit_code == 0, result.stderr
    assert "note: 2 indexes have no hash of their own" in result.stdout
    assert json.loads(CliRunner().invoke(stats.main, [str(folder), "--json"]).stdout)["unhashed"] == 2


@pytest.mark.parametrize("column", COLUMNS)
def test_a_compacted_index_that_says_otherwise_than_the_indexes_is_named(folder: Path, column: str) -> None:
    """Its own hash is right: whoever wrote it wrote something else."""
    made = read_compact(LocalFolder(folder))
    assert made is not None
    values = getattr(made.table, column).copy()
    values[0] = ~values[0] if values.dtype == np.bool_ else values[0] + 1
    more = {"shape_names": made.table.shape_names * 2, "source_names": (*made.table.source_names, "other")}
    if column == "shapes":
        more["shape_names"] = (made.table.shape_names[0], replace(made.table.shape_names[0], target=(1, 1)))
    table = replace(made.table, **{column: values, **more})
    write_compact(LocalFolder(folder), made.recipe, [([made.shard(number) for number in range(len(made))], table)])
    faults = verified(folder).faults
    assert len(faults) == 1 and column in faults[0] and f"{COMPACT_NAME}, {FIRST}" in faults[0]


def test_a_compacted_index_that_says_otherwise_of_a_shard_itself_is_named(folder: Path) -> None:
    made, shard = read_compact(LocalFolder(folder)), Shard(folder / f"{FIRST}.json")
    assert made is not None and list(compact_faults(made, 0, shard)) == []
    said: dict[str, Any] = {"filesize": 1, "sha256": "0" * 64, "skipped": ()}
    for name, value in said.items():
        facts = [replace(made.shard(0), **{name: value}), made.shard(1)]
        write_compact(LocalFolder(folder), made.recipe, [(facts, made.table)])
        other = read_compact(LocalFolder(folder))
        assert other is not None
        (fault,) = compact_faults(other, 0, shard)
        assert fault.found == f"other {name}"


def test_a_compacted_index_of_shards_that_were_written_again_is_no_fault(folder: Path) -> None:
    """It is not asked about them."""
    write_shard(folder, [SAMPLES[3]], start=3)
    index = folder / f"{SECOND}.json"
    os.utime(index, ns=(0, index.stat().st_mtime_ns + 10**9))

    assert verified(folder).faults == []
    assert read_compact(LocalFolder(folder)) is not None


def test_a_shard_without_samples_is_verified(tmp_path: Path) -> None:
    write_shard(tmp_path, [None])
    assert verified(tmp_path).faults == []

    tar = tmp_path / "00000000-00000001.tar"
    tar.write_bytes(b"x" + tar.read_bytes()[1:])

    assert ["the tar is not the one" in fault for fault in verified(tmp_path).faults] == [True]


def test_in_a_bucket_each_byte_of_a_tar_is_read_once_and_in_few_requests(
    s3: S3, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = open_folder(f"{s3.url}/verified")
    for path in folder.glob(f"{FIRST}.*"):
        place.upload(path.name, path)
    index = Shard(folder / f"{FIRST}.json").index
    ranges: list[tuple[int, int | None]] = []
    read = ObjectFolder.read

    def counted(self: ObjectFolder, name: str, start: int = 0, stop: int | None = None, **bounds: int) -> bytes:
        if name.endswith(".tar"):
            ranges.append((start, stop))
        return read(self, name, start, stop, **bounds)

    monkeypatch.setattr(ObjectFolder, "read", counted)
    assert verified(place.url).faults == []

    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert (len(ranges), ranges[-1][1]) == (len(index.files) + 1, index.filesize)
