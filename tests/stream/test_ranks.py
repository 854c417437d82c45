"""Several ranks of one run: together they see every sample once, in as many batches each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from qie.data.opening import open_stream
from qie.shards.shard_set import ShardSet
from qie.types import Batch
from tests.stream.checks import write

ROWS, BATCH_SIZE = 37, 2

Seen = list[list[list[Batch]]]
"""By rank and epoch: the batches."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("ranks") / "shards", ROWS)


def seen_by(shards: Path, world_size: int, tail: str) -> Seen:
    settings = {"batch_size": BATCH_SIZE, "seed": 5, "tail": tail, "world_size": world_size}
    streams = [open_stream(shards, rank=rank, **settings) for rank in range(world_size)]
    return [[list(stream) for _ in range(2)] for stream in streams]


def real(seen: Seen, epoch: int) -> list[int]:
    """Positions that count, of all ranks."""
    batches = [batch for rank in seen for batch in rank[epoch]]
    return [at for one in batches for at, weight in zip(one.indices, one.weight.tolist(), strict=True) if weight]


@pytest.mark.parametrize("tail", ["pad", "drop"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_has_as_many_batches_and_the_weights_of_a_global_batch_are_one_on_average(
    shards: Path, world_size: int, tail: str
) -> None:
    """Each step waits for all ranks: who had a batch more would wait forever."""
    seen = seen_by(shards, world_size, tail)

    for epoch in range(2):
        steps = list(zip(*(rank[epoch] for rank in seen), strict=True))
        assert steps
        for parts in steps:
            assert sum(part.weight.mean().item() for part in parts) / world_size == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("world_size", [2, 3])
def test_padded_every_sample_counts_once_and_two_epochs_are_two_orders(shards: Path, world_size: int) -> None:
    first, second = (real(seen, epoch) for seen in [seen_by(shards, world_size, "pad")] for epoch in range(2))

    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert first != second


@pytest.mark.parametrize("world_size", [2, 3])
def test_of_each_shape_exactly_what_fills_no_batch_is_dropped(shards: Path, world_size: int) -> None:
    table, size = ShardSet.open([shards]).table, BATCH_SIZE * world_size
    there = Counter(table.shapes.tolist())
    expected = {shape: count - count % size for shape, count in there.items() if count >= size}
    assert sum(expected.values()) < ROWS, "nothing is dropped, so this tells nothing"
    seen = seen_by(shards, world_size, "drop")

    for found in (real(seen, epoch) for epoch in range(2)):
        assert len(set(found)) == len(found)
        assert Counter(table.shapes[found].tolist()) == expected
