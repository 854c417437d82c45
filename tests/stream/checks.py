"""What tests of streams share: a batch as a value to compare and to send, and the check that a stream restores."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from qie.data.stream import Stream
from qie.precompute import precompute
from qie.recipe import Recipe
from qie.types import Batch
from tests.stubs import RECIPE, StubEncoder, StubSource

Facts = tuple[tuple[str, ...], tuple[int, ...], tuple[float, ...], str]


def write(folder: Path, rows: int, shard_size: int = 5, recipe: Recipe = RECIPE) -> Path:
    """A folder of shards: rows of three shapes, the last third from another source."""
    source = StubSource.of(rows)
    for row in range(2 * rows // 3, rows):
        source = source.changed(row, source="more")
    precompute(source, StubEncoder(recipe), folder, rows=(0, rows), shard_size=shard_size)
    return folder


def facts(batch: Batch) -> Facts:
    """All of a batch: keys, positions, weights, and the bits of its tensors as a hash."""
    digest = hashlib.sha256()
    tensors = [batch.pixel_latent, *batch.control_latent, batch.prompt_embed, batch.empty_prompt_embed]
    for tensor in (*tensors, batch.prompt_embeds_mask, batch.empty_prompt_embeds_mask, batch.loss_mask):
        digest.update(b"none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor is not None:
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    digest.update(repr(batch.image_slots).encode())
    return batch.keys, batch.indices, tuple(batch.weight.tolist()), digest.hexdigest()


def all_facts(batches: Iterable[Batch], count: int | None = None) -> list[Facts]:
    return [facts(batch) for batch in islice(batches, count)]


def assert_restores_everywhere(
    new: Callable[[], Stream], epochs: int = 2, loop: Callable[[Stream], Iterator[Batch]] = Stream.forever
) -> list[Facts]:
    """A stream's run over some epochs, after it was gone on with from each of its positions, with the same batches.

    Args:
        new: the stream at its start, made again each time.
        loop: how it is iterated.
    """
    whole = new()
    states, run = [], []
    batches = loop(whole)
    while whole.epoch < epochs:
        states.append(json.dumps(whole.state_dict()))  # as a checkpoint keeps it
        run.append(facts(next(batches)))
    for position, state in enumerate(states):
        restored = new()
        restored.load_state_dict(json.loads(state))
        assert json.dumps(restored.state_dict()) == state
        assert all_facts(loop(restored), len(run) - position) == run[position:], f"after {position} batches"
    return run


def epoch_after_epoch(stream: Any) -> Iterator[Batch]:
    """As a `for` loop in a training script goes through a stream, or through a DataLoader of it."""
    while True:
        yield from stream


def spoil(shards: Path, damage: str) -> None:
    """Damage one of the shards in a folder, the second, or all of them; `record` is only found when it is read."""
    index = sorted(shards.glob("*-*.json"))[1]
    tar = index.with_suffix(".tar")
    if damage == "missing":
        shutil.rmtree(shards)
    elif damage == "empty":
        shutil.rmtree(shards)
        shards.mkdir()
    elif damage == "partial":
        tar.unlink()
        index.unlink()
    elif damage == "index":
        index.write_bytes(index.read_bytes()[:-20])
    elif damage == "tar":
        tar.write_bytes(tar.read_bytes()[:-512])
    elif damage == "record":
        content = bytearray(tar.read_bytes())
        content[len(content) // 2] ^= 1
        tar.write_bytes(content)
