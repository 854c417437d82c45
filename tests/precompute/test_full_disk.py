"""A disk that fills: a small tmpfs, where one may mount it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from qie.errors import QieError
from qie.precompute import precompute
from qie.shards.discovery import published
from qie.shards.reader import Shard
from qie.shards.verify import shard_faults
from tests.stubs import StubEncoder, StubSource


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    precompute(StubSource.of(64), StubEncoder(), folder, rows=(0, 64), shard_size=4)
    return files(folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.parametrize("ballast", [0, 40_000, 61_000, 62_000, 180_000, 230_000])
def test_a_disk_that_fills_leaves_nothing_half_visible_and_the_run_goes_on_when_there_is_room(
    small_disk: Path, whole: dict[str, bytes], ballast: int
) -> None:
    """`ballast` moves the moment: within a tar, at its end, or at its index."""
    (small_disk / "ballast").write_bytes(bytes(ballast))
    output = small_disk / "shards"
    with pytest.raises(QieError) as refused:
        precompute(StubSource.of(64), StubEncoder(), output, rows=(0, 64), shard_size=4)
    assert "No space left" in str(refused.value) and str(output) in str(refused.value)

    assert not list(output.glob("*.partial"))
    for index in published(output):
        assert list(shard_faults(Shard(index))) == []
    kept = {row for index in published(output) for row in range(*map(int, index.stem.split("-")))}

    (small_disk / "ballast").unlink()
    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    encoder = StubEncoder()
    precompute(StubSource.of(64), encoder, output, rows=(0, 64), shard_size=4)
    assert sorted(encoder.encoded) == sorted(set(range(64)) - kept)
    assert files(output) == whole
