"""Files that are cut: named when they are opened or read. Flipped bits: tests/shards/test_verify.py."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from qie.errors import QieError
from qie.shards.compact_index import COMPACT_NAME
from qie.shards.shard_set import ShardSet, compact_folder
from qie.stores import open_folder
from tests.builders import make_sample, write_shard
from tests.conftest import ROOT

SAMPLES = [
    make_sample(number, masked=number % 3 == 0, controls=((4, 6), (2, 3))[: 1 + number % 2]) for number in range(6)
]
STEMS = ("00000000-00000003", "00000003-00000006")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards, for a test to damage."""
    write_shard(tmp_path, SAMPLES[:3])
    write_shard(tmp_path, SAMPLES[3:], start=3)
    return tmp_path


@pytest.mark.parametrize("name", [f"{STEMS[0]}.tar", f"{STEMS[1]}.tar", f"{STEMS[0]}.json", COMPACT_NAME])
def test_a_cut_file_or_a_longer_one_is_named_when_it_is_opened(folder: Path, name: str) -> None:
    file, dice = folder / name, random.Random(5)
    if name == COMPACT_NAME:
        compact_folder(open_folder(folder))
    content = file.read_bytes()
    whole = len(content.rstrip(b"\n"))  # the end of an index's last line is no part of it
    sizes = {0, 1, 7, 8, 9, whole - 1, *dice.sample(range(whole), 35)}
    for damaged in [*(content[:size] for size in sizes), content + b"x", content * 2]:
        file.write_bytes(damaged)
        with pytest.raises(QieError) as refused:
            ShardSet.open([folder])
        assert file.stem in str(refused.value)
    file.write_bytes(content)
    assert len(ShardSet.open([folder])) == 6


_CUT_LATER = """
import os, random, sys
from pathlib import Path
from qie.errors import QieError
from qie.shards.shard_set import ShardSet

folder = sys.argv[1]
tar = sorted(Path(folder).glob("*.tar"))[0]
content, dice = tar.read_bytes(), random.Random(7)
for verify in ("off", "first", "always"):
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
                    assert samples.table.shard_of(position) == 1 or inside, (size, position)
            tar.write_bytes(content)
print("all read")
"""


def test_a_tar_that_is_cut_while_it_is_read_is_named_and_ends_no_process(folder: Path) -> None:
    """A page of a mapped file that is no longer there would end the process with SIGBUS."""
    done = subprocess.run([sys.executable, "-c", _CUT_LATER, folder], cwd=ROOT, capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (0, "all read\n"), done.stderr[-2000:]
