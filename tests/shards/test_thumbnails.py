"""Thumbnails are for people: stored with samples if the recipe says so, as the format says, and never trained on."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from qie.config import Config
from qie.data.sources import open_source
from qie.encode import Encoder, EncoderOptions
from qie.encode.images import to_thumbnail
from qie.errors import ShardError
from qie.precompute import precompute
from qie.shards.compact_index import read_compact
from qie.shards.index import read_index
from qie.shards.reader import Shard
from qie.shards.shard_set import ShardSet, compact_folder
from qie.stores import File, open_folder
from qie.types import Shape
from tests.builders import (
    RECIPE,
    assert_same,
    make_recipe,
    make_sample,
    rewrite_index,
    write_shard,
)
from tests.conftest import ROOT
from tests.contracts.test_equivalence import assert_live_equals_cached

SMALL = make_recipe(thumbnail_px=24)
DIGEST_BEFORE = "a2261c04bfd135c3"
"""Of `RECIPE`, when recipes had no thumbnail_px."""


def edited(folder: Path, **recipe: object) -> Path:
    """The index of a shard after a change to its recipe."""
    write_shard(folder, [make_sample(0)])
    path = folder / "00000000-00000001.json"
    rewrite_index(path, lambda values: values["recipe"].update(recipe))
    return path


# The recipe


def test_a_recipe_without_thumbnails_has_the_digest_and_the_json_that_it_always_had(tmp_path: Path) -> None:
    assert RECIPE.digest == DIGEST_BEFORE
    for recipe in (RECIPE, SMALL):
        index = write_shard(tmp_path / recipe.digest, [make_sample(0, recipe=recipe)], recipe=recipe)
        assert read_index(tmp_path / recipe.digest / "00000000-00000001.json") == index
        assert ("thumbnail_px" in index.to_json()) == (recipe is SMALL)


def test_other_thumbnails_are_another_recipe_and_null_has_no_place_in_its_digest(tmp_path: Path) -> None:
    assert RECIPE.explain(SMALL) == ["thumbnail_px: None here, 24 there"]
    for value, found in ((24, "the recipe's digest is"), (None, "missing or unknown: thumbnail_px")):
        with pytest.raises(ShardError) as error:
            read_index(edited(tmp_path / str(value), thumbnail_px=value))
        assert found in str(error.value.found)


@pytest.mark.parametrize("value", [0, 15, 513, -96, "small", 96.5, True])
def test_a_setting_reaches_the_recipe_s_options_or_is_out_of_bounds(value: object) -> None:
    def config(**cache: object) -> Config:
        return Config.model_validate({"model": {"pretrained_model_name_or_path": "m"}, "cache": cache})

    assert EncoderOptions.of(config()).thumbnail_px is None
    assert EncoderOptions.of(config(thumbnail_px=96)).thumbnail_px == 96
    with pytest.raises(ValueError, match="thumbnail_px"):
        config(thumbnail_px=value)


@pytest.mark.parametrize(
    ("target", "size"),
    [
        ((4, 6), (16, 24)),
        ((6, 4), (24, 16)),
        ((5, 9), (13, 24)),
        ((2, 2), (16, 16)),
        ((2, 3), (16, 24)),
        ((1, 16), (2, 24)),
        ((1, 200), (1, 24)),
        ((0, 0), (1, 1)),
    ],
)
def test_a_thumbnail_has_the_targets_proportions_and_is_never_larger(
    target: tuple[int, int], size: tuple[int, int]
) -> None:
    assert SMALL.thumbnail_size(Shape(target, ())) == size
    height, width = make_recipe(thumbnail_px=96).thumbnail_size(Shape(target, ()))
    assert height * width * 3 <= 27_648, "the configuration's page says 28 kB"
    assert RECIPE.thumbnail_size(Shape(target, ())) is None


# The record


def test_a_compacted_index_reads_them_too(tmp_path: Path) -> None:
    samples = [make_sample(n, recipe=SMALL) for n in range(2)]
    write_shard(tmp_path, samples, recipe=SMALL)
    folder = open_folder(tmp_path)
    compact_folder(folder)
    found = read_compact(folder)
    assert found is not None and found.recipe == SMALL
    assert_same(ShardSet.open([tmp_path]).load(1), samples[1])


@pytest.mark.parametrize("given", ["too many", "too few"])
def test_a_shard_that_has_thumbnails_where_its_recipe_has_none_or_the_reverse_is_refused(
    tmp_path: Path, given: str
) -> None:
    of, said = (SMALL, RECIPE) if given == "too many" else (RECIPE, SMALL)
    write_shard(tmp_path, [make_sample(0, recipe=of)], recipe=said)
    with pytest.raises(ShardError, match="sizes that do not fit each other"):
        ShardSet.open([tmp_path])


def test_the_reader_of_the_standard_library_knows_them(tmp_path: Path) -> None:
    sample = make_sample(0, target=(5, 9), recipe=SMALL)
    write_shard(tmp_path, [sample], recipe=SMALL)
    tool, tar = ROOT / "tools" / "read_shard.py", tmp_path / "00000000-00000001.tar"
    run = partial(subprocess.run, capture_output=True, text=True)

    shown = run([sys.executable, tool, tar, sample.key])
    assert shown.returncode == 0, shown.stderr
    (line,) = [line for line in shown.stdout.splitlines() if line.startswith("thumbnail")]
    assert "[13, 24, 3]" in line and "U8" in line
    index = tar.with_suffix(".json")
    index.write_text(replace(read_index(index), recipe=make_recipe(thumbnail_px=16)).to_json())  # smaller ones
    refused = run([sys.executable, tool, tar])
    assert "thumbnail" in refused.stderr and refused.returncode == 1


# The encoder


@pytest.fixture(scope="module")
def encoder_small(encoder: Encoder) -> Encoder:
    """The tiny encoder, with thumbnails."""
    recipe = replace(encoder.recipe, thumbnail_px=32)
    cpu = torch.device("cpu")
    return Encoder(encoder.pretrained, recipe, cpu, cpu)


def test_the_thumbnail_is_the_target_as_the_vae_sees_it_made_small(encoder_small: Encoder, photos: Path) -> None:
    row = open_source(photos).read(0)
    sample = encoder_small.encode(row)
    assert sample.thumbnail is not None and sample.thumbnail.dtype == torch.uint8
    assert tuple(sample.thumbnail.shape[:2]) == encoder_small.recipe.thumbnail_size(sample.shape)
    with Image.open(photos / "training_images" / f"{row.name}.png") as image:
        small = image.convert("RGB").resize(
            (sample.thumbnail.shape[1], sample.thumbnail.shape[0]), Image.Resampling.BOX
        )
    assert np.abs(np.asarray(small, dtype=int) - sample.thumbnail.numpy()).mean() < 8


def test_a_thumbnail_is_height_by_width() -> None:
    image = Image.new("RGB", (64, 32))
    image.paste((255, 0, 0), (0, 0, 32, 32))
    small = to_thumbnail(image, (8, 16))
    assert tuple(small.shape) == (8, 16, 3)
    assert small[4, 2].tolist() == [255, 0, 0] and small[4, 13].tolist() == [0, 0, 0]


def test_the_other_tensors_are_those_of_a_recipe_without(
    encoder: Encoder, encoder_small: Encoder, photos: Path
) -> None:
    row = open_source(photos).read(0)
    without, with_one = encoder.encode(row), encoder_small.encode(row)
    assert with_one.key != without.key
    assert_same(replace(with_one, key=without.key, thumbnail=None), without)


def test_live_equals_cached_with_thumbnails_which_no_batch_carries_and_a_second_run_encodes_nothing(
    photos: Path, encoder_small: Encoder, tmp_path: Path
) -> None:
    batches = assert_live_equals_cached(photos, encoder_small, tmp_path, batch_size=2)

    assert not [name for name in vars(batches[0]) if "thumb" in name]
    (entry, *_) = Shard(File.at(tmp_path / "00000000-00000005.json")).index.samples
    assert entry.tensor_bytes["thumbnail"] > 0
    again = precompute(open_source(photos), encoder_small, tmp_path, rows=(0, 5), shard_size=5)
    assert (again.encoded, again.shards_kept) == (0, 1)
