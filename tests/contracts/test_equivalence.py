"""Law 1: raw rows through the live encoder, and the same rows precomputed and read back, are the same batches."""

from __future__ import annotations

import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from qie.data import open_stream
from qie.data.sources import open_source
from qie.precompute import precompute
from qie.shards.shard_set import ShardSet
from qie.types import Batch


def assert_same(first: Batch, second: Batch) -> None:
    for field in fields(Batch):
        mine, theirs = getattr(first, field.name), getattr(second, field.name)
        pairs = zip(mine, theirs, strict=True) if isinstance(mine, tuple) else [(mine, theirs)]
        for one, other in pairs:
            if isinstance(one, torch.Tensor):
                assert one.dtype == other.dtype and torch.equal(one, other), field.name
            else:
                assert one == other, field.name


def batches(stream, count: int) -> list[Batch]:
    iterator = stream.forever()
    return [next(iterator) for _ in range(count)]


def assert_live_equals_cached(folder: Path, encoder, shards: Path, batch_size: int) -> list[Batch]:
    source = open_source(folder)
    precompute(source, encoder, shards, rows=(0, len(source)), shard_size=5)
    settings = {"batch_size": batch_size, "seed": 3, "validation_rows": 1}
    cached, live = open_stream(shards, **settings), open_stream(source, encoder=encoder, **settings)
    assert len(cached) == len(live) and cached.samples.masked == live.samples.masked
    count = len(cached) + 2  # into the second epoch
    read, encoded = batches(cached, count), batches(live, count)
    for one, other in zip(read, encoded, strict=True):
        assert_same(one, other)
    return read


def test_live_and_cached_batches_are_bit_identical(photos: Path, encoder, tmp_path: Path) -> None:
    read = assert_live_equals_cached(photos, encoder, tmp_path / "shards", batch_size=2)
    assert any(batch.prompt_embeds_mask is not None for batch in read), (
        "no batch had padding: the test shows too little"
    )
    assert min(batch.prompt_embed.float().std() for batch in read) > 0.3


def test_so_they_are_with_several_controls_a_mask_and_a_broken_row(photos: Path, encoder_plus, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    shutil.copytree(photos, folder)
    targets = sorted((folder / "training_images").glob("*.png"))[:4]
    for path in sorted((folder / "training_images").iterdir()):
        if path.with_suffix(".png") not in targets:
            path.unlink()
    control = folder / "control_images"
    shutil.copy(control / targets[1].name, control / f"{targets[0].stem}_control_1.png")
    shutil.copy(targets[0], control / f"{targets[0].stem}_mask.png")
    targets[2].write_bytes(targets[2].read_bytes()[:5000])

    read = assert_live_equals_cached(folder, encoder_plus, tmp_path / "shards", batch_size=1)

    assert ShardSet.open([tmp_path / "shards"]).masked
    assert {len(batch.control_latent) for batch in read} <= {1, 2}
    assert len({key for batch in read for key in batch.keys}) == 2, "of four rows one is broken and one is kept out"


@pytest.mark.gpu
def test_on_a_gpu_live_and_cached_batches_agree_bit_for_bit(photos: Path, tiny_edit: Path, tmp_path: Path) -> None:
    from qie.encode import Encoder, EncoderOptions
    from qie.pretrained import open_checkpoint

    gpu = torch.device("cuda:0")
    options = EncoderOptions(areas_px=(16384,))
    encoder = Encoder.open(open_checkpoint(str(tiny_edit)), vae_device=gpu, text_device=gpu, options=options)
    assert encoder.recipe.vae_dtype == "bfloat16"
    assert_live_equals_cached(photos, encoder, tmp_path / "shards", batch_size=2)
