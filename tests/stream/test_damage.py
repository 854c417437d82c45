"""Damage is either named or without effect: a sample that is read with verify="always" is never another one."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from qie.errors import QieError
from qie.shards.compact_index import COMPACT_NAME, write_compact
from qie.shards.reader import Shard
from qie.shards.shard_set import ShardSet, compacted
from qie.stores import open_folder
from qie.types import Sample
from tests.builders import TENSORS, make_sample, same_bits, write_shard
from tests.conftest import ROOT

SAMPLES = [
    make_sample(number, masked=number % 3 == 0, controls=((4, 6), (2, 3))[: 1 + number % 2]) for number in range(6)
]
STEMS = ("00000000-00000003", "00000003-00000006")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    write_shard(folder, SAMPLES[:3])
    write_shard(folder, SAMPLES[3:], start=3)
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """Two shards, for a test to damage."""
    return Path(shutil.copytree(sound, tmp_path / "shards"))


@pytest.fixture
def compact(folder: Path) -> Path:
    """The same with a compacted index."""
    write_compact(open_folder(folder), compacted(open_folder(folder)))
    return folder


def read_all(folder: Path) -> list[Sample]:
    """Every sample, read as a stream does: twice, first with its header."""
    samples = ShardSet.open([folder], verify="always")
    loaded = [samples.load(position) for position in range(len(samples))]
    fetched = [samples.fetch(position) for position in range(len(samples))]
    assert all(map(same, loaded, fetched))
    return loaded


def same(one: Sample, other: Sample) -> bool:
    return (
        one.key == other.key
        and one.shared_prefix == other.shared_prefix
        and len(one.control_latent) == len(other.control_latent)
        and all(map(same_bits, one.control_latent, other.control_latent))
        and all(same_bits(getattr(one, name), getattr(other, name)) for name in TENSORS)
    )


def outcome(folder: Path, file: Path) -> str:
    """`named` if reading ends with an error that names the file's shard; `right` if all samples are what they were."""
    try:
        samples = read_all(folder)
    except QieError as error:
        assert file.stem in str(error), error
        return "named"
    assert len(samples) == len(SAMPLES) and all(map(same, samples, SAMPLES))
    return "right"


def flip(file: Path, bit: int) -> None:
    with file.open("r+b", buffering=0) as damaged:
        (byte,) = os.pread(damaged.fileno(), 1, bit // 8)
        os.pwrite(damaged.fileno(), bytes([byte ^ (1 << bit % 8)]), bit // 8)


def put_back(file: Path, content: bytes, facts: os.stat_result) -> None:
    """With its time: a compacted index goes by it."""
    file.write_bytes(content)
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def flipped_one_by_one(folder: Path, file: Path, count: int, seed: int) -> list[tuple[int, str]]:
    """(byte, outcome) of flips of one bit each."""
    content, facts, dice = file.read_bytes(), file.stat(), random.Random(seed)
    found = []
    for bit in dice.sample(range(8 * len(content)), count):
        flip(file, bit)
        found.append((bit // 8, outcome(folder, file)))
        put_back(file, content, facts)
    return found


# Flipped bits


@pytest.mark.parametrize("stem", STEMS)
def test_of_a_tar_every_flipped_bit_of_a_record_is_named_and_no_other_one_matters(folder: Path, stem: str) -> None:
    members = Shard(folder / f"{stem}.json").index.files.values()

    found = flipped_one_by_one(folder, folder / f"{stem}.tar", 300, seed=1)

    for byte, outcome in found:
        in_a_record = any(member.offset <= byte < member.offset + member.size for member in members)
        assert outcome == ("named" if in_a_record else "right"), f"byte {byte}"
    assert Counter(outcome for _, outcome in found)["named"] > 90, "too few to tell anything"


def test_of_a_compacted_index_every_flipped_bit_is_named(compact: Path) -> None:
    found = flipped_one_by_one(compact, compact / COMPACT_NAME, 150, seed=3)

    assert {outcome for _, outcome in found} == {"named"}


# Cut files


@pytest.mark.parametrize("ending", ["tar", "json"])
def test_a_cut_file_is_named_when_it_is_opened(folder: Path, ending: str) -> None:
    dice = random.Random(5)
    for stem in STEMS:
        file = folder / f"{stem}.{ending}"
        content, facts = file.read_bytes(), file.stat()
        whole = len(content.rstrip(b"\n"))  # the end of an index's last line is no part of it
        for size in {0, 1, whole - 1, *dice.sample(range(whole), 40)}:
            os.truncate(file, size)
            with pytest.raises(QieError) as refused:
                ShardSet.open([folder])
            assert stem in str(refused.value)
            put_back(file, content, facts)
    assert outcome(folder, file) == "right"


@pytest.mark.parametrize("ending", ["tar", "json"])
def test_a_file_with_something_behind_it_is_named_when_it_is_opened(folder: Path, ending: str) -> None:
    with (folder / f"{STEMS[0]}.{ending}").open("ab") as file:
        file.write(b"x")

    with pytest.raises(QieError) as refused:
        ShardSet.open([folder])
    assert STEMS[0] in str(refused.value)


def test_a_compacted_index_that_is_cut_or_longer_is_named_when_it_is_opened(compact: Path) -> None:
    file, dice = compact / COMPACT_NAME, random.Random(6)
    content = file.read_bytes()
    sizes = [0, 1, 7, 8, 9, len(content) - 1, *dice.sample(range(len(content)), 34)]
    for damaged in [*(content[:size] for size in sizes), content + b"\0", content * 2, bytes(len(content))]:
        file.write_bytes(damaged)
        with pytest.raises(QieError) as refused:
            ShardSet.open([compact])
        assert COMPACT_NAME in str(refused.value)
        file.write_bytes(content)
    assert outcome(compact, file) == "right"


_CUT_LATER = """
import os, random, sys
from pathlib import Path
from qie.errors import QieError
from qie.shards.shard_set import ShardSet

folder, verify = sys.argv[1:]
tar = sorted(Path(folder).glob("*.tar"))[0]
content, dice = tar.read_bytes(), random.Random(7)
for size in [0, 1, 600, *dice.sample(range(len(content)), 27)]:
    for read_before in (False, True):
        samples = ShardSet.open([folder], verify=verify)
        for position in range(len(samples) if read_before else 0):
            samples.fetch(position)
        os.truncate(tar, size)
        for position in range(len(samples)):
            try:
                samples.fetch(position).pixel_latent.sum()
            except QieError as error:
                assert tar.name in str(error), error
            else:
                inside = samples.table.offsets[position] + samples.table.sizes[position] <= size
                assert samples.table.shards[position] == 1 or inside, (size, position)
        tar.write_bytes(content)
print("all read")
"""


@pytest.mark.parametrize("verify", ["off", "first", "always"])
def test_a_tar_that_is_cut_while_it_is_read_is_named_and_ends_no_process(folder: Path, verify: str) -> None:
    """A page of a mapped file that is no longer there would end the process with SIGBUS."""
    done = subprocess.run([sys.executable, "-c", _CUT_LATER, folder, verify], cwd=ROOT, capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (0, "all read\n"), done.stderr[-2000:]
