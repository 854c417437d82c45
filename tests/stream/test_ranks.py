"""Several processes of one run: together they see every sample once, in as many batches each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from qie.shards.shard_set import ShardSet
from tests.conftest import ROOT
from tests.stream.checks import write

ROWS = 37
BATCH_SIZE = 2
EPOCHS = 2
# Each step waits for all others, as a training step does: who had a batch more would wait forever.
_RANK = """
import json, sys
from datetime import timedelta
import torch.distributed as dist
from qie.stream_chooser import open_stream

shards, meeting, rank, world_size = *sys.argv[1:3], *map(int, sys.argv[3:])
dist.init_process_group(
    "gloo", f"file://{meeting}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
)
seen = {}
for tail in ("pad", "drop"):
    stream = open_stream(shards, batch_size=2, seed=5, tail=tail, rank=rank, world_size=world_size)
    seen[tail] = []
    for epoch in range(2):
        seen[tail].append([])
        for batch in stream:
            weight = batch.weight.clone()
            dist.all_reduce(weight)
            together = weight.mean().item() / world_size
            seen[tail][-1].append([batch.indices, batch.weight.tolist(), together])
    dist.barrier()
print(json.dumps(seen))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("ranks") / "shards", ROWS)


@pytest.fixture(scope="module", params=[2, 3])
def seen(request: pytest.FixtureRequest, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """By rank, tail and epoch: (positions, weights, mean weight of the global batch) of each batch."""
    meeting = tmp_path_factory.mktemp("meeting") / "place"
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, shards, meeting, str(rank), str(request.param)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(request.param)
    ]
    try:
        # The limit is far above what it takes: a hang is to end as a failure.
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * request.param, outputs
    return [json.loads(output) for output, _ in outputs]


def real(seen: list[dict], tail: str, epoch: int) -> list[int]:
    """Positions that count, of all ranks."""
    return [
        position
        for rank in seen
        for positions, weights, _ in rank[tail][epoch]
        for position, weight in zip(positions, weights, strict=True)
        if weight
    ]


@pytest.mark.parametrize("epoch", range(EPOCHS))
def test_padded_every_sample_counts_once(seen: list[dict], epoch: int) -> None:
    assert sorted(real(seen, "pad", epoch)) == list(range(ROWS))


@pytest.mark.parametrize("epoch", range(EPOCHS))
def test_of_each_shape_exactly_what_fills_no_batch_is_dropped(seen: list[dict], shards: Path, epoch: int) -> None:
    table = ShardSet.open([shards]).table
    size = BATCH_SIZE * len(seen)
    there = Counter(table.shapes.tolist())

    found = real(seen, "drop", epoch)

    assert len(set(found)) == len(found)
    expected = {shape: count - count % size for shape, count in there.items() if count >= size}
    assert Counter(table.shapes[found].tolist()) == expected
    assert sum(expected.values()) < ROWS, "nothing is dropped, so this tells nothing"


@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_every_rank_has_as_many_batches(seen: list[dict], tail: str) -> None:
    counts = [[len(epoch) for epoch in rank[tail]] for rank in seen]

    assert counts == counts[:1] * len(seen)
    assert all(min(one) > 0 for one in counts)


@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_the_weights_of_a_global_batch_are_one_on_average(seen: list[dict], tail: str) -> None:
    for rank in seen:
        for _, _, together in (batch for epoch in rank[tail] for batch in epoch):
            assert together == pytest.approx(1, rel=1e-6)


def test_two_epochs_are_two_orders(seen: list[dict]) -> None:
    assert real(seen, "pad", 0) != real(seen, "pad", 1)
