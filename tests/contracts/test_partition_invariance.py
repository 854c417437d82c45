"""Law 3: however rows are split into ranges, and in whatever order, samples and bytes are the same.

What many processes do at once is decided by locks and names of files, which no family has its own of: there, one is
enough.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from qie.data.sources import open_source
from qie.precompute import precompute
from qie.shards.discovery import published
from qie.shards.reader import Shard
from tests.lives import ROWS, SHARD_SIZE, Lives
from tests.stubs import RECIPES, StubEncoder, StubSource


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def records(folder: Path) -> list[tuple[int, str, str, bytes]]:
    shards = [Shard(index) for index in published(folder)]
    return [
        (entry.row, entry.name, entry.key, bytes(shard.record(entry)))
        for shard in shards
        for entry in shard.index.samples
    ]


def test_cut_within_a_shard_the_samples_are_the_same_byte_for_byte(
    photos: Path, family_encoder, tmp_path: Path
) -> None:
    source = open_source(photos)
    precompute(source, family_encoder, tmp_path / "whole", rows=(0, 6), shard_size=4)
    for rows in ((3, 6), (0, 3)):
        precompute(source, family_encoder, tmp_path / "split", rows=rows, shard_size=4)
    assert records(tmp_path / "split") == records(tmp_path / "whole")
    assert files(tmp_path / "split").keys() != files(tmp_path / "whole").keys()


def test_cut_on_shard_boundaries_the_files_are_the_same(photos: Path, family_encoder, tmp_path: Path) -> None:
    source = open_source(photos)
    precompute(source, family_encoder, tmp_path / "whole", rows=(0, 6), shard_size=2)
    for rows in ((4, 6), (0, 2), (2, 4)):
        precompute(source, family_encoder, tmp_path / "split", rows=rows, shard_size=2)
    assert files(tmp_path / "split") == files(tmp_path / "whole")


@pytest.mark.parametrize("seed", range(8))
def test_any_split_in_any_order_gives_the_same_samples(tmp_path: Path, family: str, seed: int) -> None:
    draw = random.Random(seed)
    source = StubSource.of(50).changed(7, target=b"broken").changed(20, target=b"missing")
    precompute(source, StubEncoder(RECIPES[family]), tmp_path / "whole", rows=(0, 50), shard_size=8)
    cuts = sorted(draw.sample(range(1, 50), 6))
    ranges = list(zip([0, *cuts], [*cuts, 50], strict=True))
    draw.shuffle(ranges)
    encoders = [StubEncoder(RECIPES[family]) for _ in ranges]
    for rows, encoder in zip(ranges, encoders, strict=True):
        precompute(source, encoder, tmp_path / "split", rows=rows, shard_size=8)
    assert records(tmp_path / "split") == records(tmp_path / "whole")
    encoded = [row for encoder in encoders for row in encoder.encoded]
    assert len(encoded) == len(set(encoded)) == 48, "a row was encoded twice, or never"


def test_eight_processes_at_once_write_what_one_writes(tmp_path: Path) -> None:
    precompute(StubSource.of(ROWS), StubEncoder(), tmp_path / "whole", rows=(0, ROWS), shard_size=SHARD_SIZE)
    draw = random.Random(0)
    with Lives() as lives:
        for grid, name in ((1, "anywhere"), (SHARD_SIZE, "on boundaries")):
            cuts = sorted(draw.sample(range(grid, ROWS, grid), 7))
            ranges = list(zip([0, *cuts], [*cuts, ROWS], strict=True))
            _, encoded = lives.live(tmp_path / name, ranges=draw.sample(ranges, 8))
            assert sorted(encoded) == list(range(ROWS))
            assert records(tmp_path / name) == records(tmp_path / "whole")
        _, encoded = lives.live(tmp_path / "all on one range", ranges=[(0, ROWS)] * 8)
    assert files(tmp_path / "on boundaries") == files(tmp_path / "whole") == files(tmp_path / "all on one range")
    assert sorted(encoded) == list(range(ROWS)), "two processes encoded the same row, or none did"


@pytest.mark.parametrize("seed", range(2))
def test_processes_at_once_on_ranges_that_overlap_and_with_other_shard_sizes_put_each_row_into_one_shard(
    tmp_path: Path, seed: int
) -> None:
    precompute(StubSource.of(ROWS), StubEncoder(), tmp_path / "whole", rows=(0, ROWS), shard_size=SHARD_SIZE)
    draw = random.Random(seed)
    ranges = [(0, ROWS), (0, ROWS), (draw.randrange(1, 60), ROWS), (0, draw.randrange(180, ROWS))]
    sizes = draw.sample(range(2, 30), 4)
    with Lives() as lives:
        died, encoded = lives.live(tmp_path / "shared", ranges=ranges, sizes=sizes)
        assert not died and sorted(encoded) == list(range(ROWS)), "a row was encoded twice, or never"
        assert records(tmp_path / "shared") == records(tmp_path / "whole")
        assert not [path for path in (tmp_path / "shared").iterdir() if path.suffix not in (".tar", ".json")]
        assert lives.live(tmp_path / "shared", ranges=ranges, sizes=sizes) == (False, [])


def test_a_row_encodes_to_the_same_bytes_whatever_was_encoded_before_it(photos: Path, family_encoder) -> None:
    from qie.shards.record import encode

    source, digest = open_source(photos), family_encoder.recipe.digest
    alone = encode(family_encoder.encode(source.read(3)), digest)
    for index in (0, 5, 3, 1):
        last = encode(family_encoder.encode(source.read(index)), digest)
        if index == 3:
            assert last == alone
