"""Rows with a rejected target: where it comes from, and that a sample has it beside everything else."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageFilter

from qie.config import Config
from qie.data.sources import open_source
from qie.errors import RowError
from qie.precompute import precompute
from qie.precompute.engine import Settings
from qie.precompute.estimate import estimate_precompute
from qie.precompute.overview import expected_bytes
from qie.pretrained import open_pretrained
from qie.shards.pictures import decode_pictures
from qie.shards.record import decode, encode
from qie.shards.shard_set import ShardSet
from qie.shards.tensors import CHANNELS, is_text_alone
from qie.stores import LocalFolder
from qie.types import Row
from tests.contracts.test_equivalence import assert_live_equals_cached


def blurred(image: bytes, size: tuple[int, int] | None = None) -> bytes:
    """The image, worse; perhaps of another size."""
    with Image.open(io.BytesIO(image)) as opened:
        worse = opened.convert("RGB").filter(ImageFilter.GaussianBlur(4))
    content = io.BytesIO()
    (worse.resize(size) if size else worse).save(content, "PNG")
    return content.getvalue()


@pytest.fixture(scope="module")
def row(photos: Path) -> Row:
    return open_source(photos).read(0)


@pytest.fixture(scope="module")
def pairs(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The photographs, of which each has a rejected target beside it."""
    folder = tmp_path_factory.mktemp("pairs") / "edits"
    shutil.copytree(photos, folder)
    for image in sorted((folder / "training_images").glob("*.png")):
        (image.parent / f"{image.stem}_rejected.png").write_bytes(blurred(image.read_bytes()))
    return folder


def test_a_pair_s_record_grows_by_a_latent_and_a_row_without_one_stays_as_it_was(family_encoder, row: Row) -> None:
    plain = family_encoder.encode(row)
    pair = family_encoder.encode(replace(row, rejected=blurred(row.target)))
    assert plain.rejected_latent is None and plain.key != pair.key
    # The same row with the other image as its target has the same latent.
    other = family_encoder.encode(replace(row, target=blurred(row.target)))
    assert torch.equal(pair.rejected_latent, other.pixel_latent)
    assert torch.equal(pair.pixel_latent, plain.pixel_latent) and torch.equal(pair.prompt_embed, plain.prompt_embed)
    recipe = family_encoder.recipe
    without, record = (encode(sample, recipe.digest) for sample in (plain, pair))
    height, width = plain.shape.target
    assert 0 <= len(record) - len(without) - 2 * CHANNELS[is_text_alone(recipe)] * height * width < 1000
    assert b"rejected" not in without
    assert torch.equal(decode(memoryview(bytearray(record)), "here").rejected_latent, pair.rejected_latent)
    with Image.open(io.BytesIO(row.target)) as target:
        small = (target.width // 2, target.height // 2)
    assert family_encoder.encode(replace(row, rejected=blurred(row.target, small))).shape == plain.shape
    assert not family_encoder.encode(replace(row, rejected=blurred(row.target))).notes
    assert "teaches nothing" in family_encoder.encode(replace(row, rejected=row.target)).notes[-1]
    for image, words in ((blurred(row.target, (50, 200)), "proportions"), (b"none", "the rejected target")):
        with pytest.raises(RowError, match=words):
            family_encoder.encode(replace(row, rejected=image))


def test_live_and_cached_batches_of_pairs_are_bit_identical(pairs: Path, family_encoder, tmp_path: Path) -> None:
    read = assert_live_equals_cached(pairs, family_encoder, tmp_path / "shards", batch_size=2)
    assert all(batch.rejected_latent.shape == batch.pixel_latent.shape for batch in read)
    assert not any(torch.equal(batch.rejected_latent, batch.pixel_latent) for batch in read)
    assert ShardSet.open(tmp_path / "shards").paired.sum() == 12


def test_a_batch_has_rejected_targets_only_if_each_of_its_samples_has_one(
    photos: Path, encoder, tmp_path: Path
) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(photos, mixed)
    for image in sorted((mixed / "training_images").glob("*.png"))[:5]:
        (image.parent / f"{image.stem}_rejected.png").write_bytes(blurred(image.read_bytes()))
    read = assert_live_equals_cached(mixed, encoder, tmp_path / "shards", batch_size=2)
    samples = ShardSet.open(tmp_path / "shards")
    assert samples.paired.sum() == 5
    paired = [[samples.facts(position).paired for position in batch.indices] for batch in read]
    assert {all(one) for one in paired} == {True, False}
    assert all((batch.rejected_latent is not None) == all(one) for batch, one in zip(read, paired, strict=True))


def test_a_rejected_target_whose_target_is_missing_is_called_so(pairs: Path, tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    shutil.copytree(pairs, lost)
    target = sorted((lost / "training_images").glob("*_rejected.png"))[0].name.replace("_rejected", "")
    (lost / "training_images" / target).unlink()
    with pytest.raises(RowError, match="no control image; or this is a rejected target, and its target is missing"):
        open_source(lost).read(0)


def test_sources_find_rejected_targets_by_their_names_or_as_they_are_told(row: Row, tmp_path: Path) -> None:
    worse = blurred(row.target)
    files = {"target.png": row.target, "rejected.png": worse, "control.png": row.controls[0], "loser.png": worse}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    line = {"target": "target.png", "control": "control.png", "prompt": "night"}
    for column, columns in (("rejected", None), ("path_rejected", None), ("worse", {"rejected": "worse"})):
        (tmp_path / "rows.jsonl").write_text(json.dumps(line | {column: "loser.png"}) + "\n" + json.dumps(line) + "\n")
        source = open_source(tmp_path / "rows.jsonl", columns=columns)
        assert source.read(0).rejected == worse and source.read(1).rejected is None
    with tarfile.open(tmp_path / "rows.tar", "w") as tar:
        for name in ("target.png", "control.png", "rejected.png"):
            tar.add(tmp_path / name, f"000.{name}")
        (tmp_path / "prompt").write_text("night")
        tar.add(tmp_path / "prompt", "000.txt")
    assert open_source(tmp_path / "rows.tar").read(0).rejected == worse
    folders = tmp_path / "folders"
    for folder, content in (("images", row.target), ("control", row.controls[0]), ("losers", worse)):
        (folders / folder).mkdir(parents=True)
        (folders / folder / "a.png").write_bytes(content)
    (folders / "images" / "a.txt").write_text("night")
    assert open_source(folders).read(0).rejected is None
    assert open_source(folders, columns={"rejected": "losers"}).read(0).rejected == worse
    assert Row.of(target=tmp_path / "target.png", rejected=tmp_path / "loser.png", prompt="night").rejected == worse


def test_what_is_expected_of_pairs_counts_their_second_latent(
    encoder, photos: Path, pairs: Path, tiny_edit: Path, tmp_path: Path
) -> None:
    config = Config.model_validate({"model": {"pretrained_model_name_or_path": str(tiny_edit)}})
    pretrained, folder = open_pretrained(str(tiny_edit), components=("vae", "text_encoder")), LocalFolder(tmp_path)
    sizes, estimates = [], []
    for place in (photos, pairs):
        source = open_source(place)
        sizes.append(expected_bytes(config, pretrained, source, 2))
        estimates.append(estimate_precompute(source, encoder, folder, rows=(0, 2), settings=Settings()))
    assert sizes[1] - sizes[0] == 2 * 2 * 16 * 128**2  # two of 1024²
    assert [found.with_rejected for found in estimates] == [0, 2]


def test_its_small_picture_stands_behind_the_target_s(encoder, pairs: Path, tmp_path: Path) -> None:
    encoder.thumbnail_px, before = 64, encoder.thumbnail_px
    try:
        sample = encoder.encode(open_source(pairs).read(0))
    finally:
        encoder.thumbnail_px = before
    found = decode_pictures(sample.pictures, "here")
    assert found.rejected.size == found.target.size and len(found.controls) == 1 and found.mask is None
    source = open_source(pairs)
    precompute(source, encoder, tmp_path, rows=(0, 2))
    assert [entry.inputs.keys() >= {"rejected"} for entry in ShardSet.open(tmp_path).entries] == [True, True]
