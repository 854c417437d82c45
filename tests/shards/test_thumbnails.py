"""Small pictures are for people: stored beside records, in no key and no recipe, and never trained on.

Shards of an earlier qie hold a thumbnail of the target in each record, and its size in the recipe: they read on.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
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
from qie.from_config import open_encoder, precompute_config, recipe_there
from qie.precompute import Settings, precompute
from qie.shards.compact_index import read_compact
from qie.shards.discovery import published
from qie.shards.index import read_index
from qie.shards.pictures import SmallPictures, decode_pictures, encode_pictures
from qie.shards.reader import Shard, Tar
from qie.shards.shard_set import ShardSet, compact_folder
from qie.shards.verify import shard_faults
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
from tests.conftest import AREA_PX, ROOT
from tests.contracts.test_equivalence import assert_live_equals_cached
from tests.precompute.test_stores import contents

DEVICES = {"vae_encoder_device": "cpu", "text_encoder_device": "cpu"}
READ_SHARD = ROOT / "tools" / "read_shard.py"
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

    assert EncoderOptions.of(config()).thumbnail_px == 160
    assert EncoderOptions.of(config(thumbnail_px=None)).thumbnail_px is None
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


# Pictures beside the record

PICTURES = {
    "one control": SmallPictures(Image.new("RGB", (48, 32), "red"), (Image.new("RGB", (48, 32), "blue"),)),
    "all kinds": SmallPictures(
        Image.new("RGB", (31, 17), "red"),
        (Image.new("RGB", (9, 40), "blue"), Image.new("RGB", (40, 1), "lime")),
        Image.new("L", (31, 17), 255),
    ),
    "no control": SmallPictures(Image.new("RGB", (1, 1), "red")),
}


@pytest.mark.parametrize("pictures", PICTURES.values(), ids=PICTURES)
def test_pictures_come_back_at_their_sizes_and_none_shines_through_into_another(pictures: SmallPictures) -> None:
    jpeg = encode_pictures(pictures)
    found = decode_pictures(jpeg, "here")
    assert encode_pictures(pictures) == jpeg and len(found.controls) == len(pictures.controls)
    given = [pictures.target, *pictures.controls, pictures.mask]
    for one, due in zip([found.target, *found.controls, found.mask], given, strict=True):
        assert (one and (one.size, one.mode)) == (due and (due.size, due.mode))
        if one and due:
            assert np.abs(np.asarray(one, int) - np.asarray(due, int)).max() <= 2


def jpeg_of(comment: bytes | None, size: tuple[int, int] = (16, 8)) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", size).save(content, "JPEG", **({} if comment is None else {"comment": comment}))
    return content.getvalue()


@pytest.mark.parametrize(
    "jpeg",
    [
        b"",
        b"not a picture",
        encode_pictures(PICTURES["one control"])[:200],
        jpeg_of(None),
        jpeg_of(b"{"),
        jpeg_of(b"[" * 60_000),
        jpeg_of(b'{"qie":[]}'),
        jpeg_of(b'{"qie":[["target",0,17,8]]}'),
        jpeg_of(b'{"qie":[["target",-1,8,8]]}'),
        jpeg_of(b'{"qie":[["target",0,0,8]]}'),
        jpeg_of(b'{"qie":[["target",0,8,8],["control",8,8,8]]}'),
        jpeg_of(b'{"qie":[["target",0,8,8]]}', (5000, 5000)),
    ],
)
def test_what_is_no_jpeg_of_pictures_is_refused(jpeg: bytes) -> None:
    with pytest.raises(ShardError, match="cannot be read"):
        decode_pictures(jpeg, "here")


def test_pictures_stand_before_their_record_which_is_the_same_without_them(tmp_path: Path) -> None:
    jpeg = encode_pictures(PICTURES["one control"])
    samples = [make_sample(0), replace(make_sample(1), pictures=jpeg), replace(make_sample(1), pictures=jpeg)]
    index = write_shard(tmp_path / "with", samples)
    without = write_shard(tmp_path / "without", [replace(one, pictures=None) for one in samples])

    with tarfile.open(tmp_path / "with" / "00000000-00000003.tar") as tar:
        key, other = samples[1].key, samples[0].key
        assert tar.getnames() == [f"{other}.safetensors", f"{key}.jpg", f"{key}.safetensors"]
    assert "pictures" not in without.to_json()
    assert {name: one.sha256 for name, one in index.files.items()} == {
        name: one.sha256 for name, one in without.files.items()
    }
    shard = Shard(tmp_path / "with" / "00000000-00000003.json")
    assert [shard.pictures_jpeg(entry) for entry in shard.index.samples] == [None, jpeg, jpeg]
    assert shard.pictures(shard.index.samples[0]) is None
    assert not list(shard_faults(shard))
    tool = subprocess.run([sys.executable, READ_SHARD, shard.file.path], capture_output=True, text=True)
    assert tool.returncode == 0, tool.stderr


def test_pictures_of_another_number_of_controls_are_refused_and_so_are_those_of_no_sample(tmp_path: Path) -> None:
    write_shard(tmp_path, [replace(make_sample(0), pictures=encode_pictures(PICTURES["all kinds"]))])
    index = tmp_path / "00000000-00000001.json"
    shard = Shard(index)
    with pytest.raises(ShardError, match="another number of controls"):
        shard.pictures(shard.index.samples[0])
    rewrite_index(index, lambda values: values["pictures"].update({"a.jpg": {"offset": 0, "size": 1}}))
    with pytest.raises(ShardError, match="pictures of samples that it does not have"):
        read_index(index)


def test_a_reader_of_samples_touches_no_byte_of_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jpeg = encode_pictures(PICTURES["one control"])
    index = write_shard(tmp_path, [replace(make_sample(n), pictures=jpeg) for n in range(3)])
    read: list[range] = []
    whole = Tar.read

    def told(self: Tar, start: int, stop: int) -> memoryview:
        read.append(range(start, stop))
        return whole(self, start, stop)

    monkeypatch.setattr(Tar, "read", told)
    samples = ShardSet.open([tmp_path])
    for position in range(3):
        samples.fetch(position)
    assert len(read) >= 3
    edges = {edge for place in index.pictures.values() for edge in (place.offset, place.offset + place.size - 1)}
    assert not [edge for edge in edges for one in read if edge in one]


def test_a_thumbnail_of_an_earlier_qie_is_a_picture_of_the_target(tmp_path: Path) -> None:
    sample = make_sample(0, recipe=SMALL)
    write_shard(tmp_path, [sample], recipe=SMALL)
    shard = Shard(tmp_path / "00000000-00000001.json")
    found = shard.pictures(shard.index.samples[0])
    assert found is not None and not found.controls and sample.thumbnail is not None
    assert np.array_equal(np.asarray(found.target), sample.thumbnail.numpy())


@pytest.fixture(scope="module")
def encoder_pictures(encoder: Encoder) -> Encoder:
    """The tiny encoder, with pictures of 32 pixels."""
    cpu = torch.device("cpu")
    return Encoder(encoder.pretrained, encoder.recipe, cpu, cpu, thumbnail_px=32)


def test_the_encoder_makes_pictures_of_what_the_vae_sees_and_no_tensor_and_no_key_changes(
    encoder: Encoder, encoder_pictures: Encoder, photos: Path
) -> None:
    row = open_source(photos).read(0)
    mask = io.BytesIO()
    with Image.open(io.BytesIO(row.target)) as opened:
        half = Image.new("L", opened.size)
        half.paste(255, (0, 0, opened.width // 2, opened.height))
    half.save(mask, "PNG")
    row = replace(row, mask=mask.getvalue())
    plain, sample = encoder.encode(row), encoder_pictures.encode(row)
    assert_same(plain, sample)
    assert plain.pictures is None and sample.pictures is not None
    found = decode_pictures(sample.pictures, "here")
    height, width = replace(encoder.recipe, thumbnail_px=32).thumbnail_size(sample.shape) or (0, 0)
    assert found.target.size == (width, height) and max(found.controls[0].size) == 32
    for one, content in ((found.target, row.target), (found.controls[0], row.controls[0])):
        with Image.open(io.BytesIO(content)) as image:
            small = image.convert("RGB").resize(one.size, Image.Resampling.BOX)
        assert np.abs(np.asarray(small, dtype=int) - np.asarray(one, dtype=int)).mean() < 10
    assert found.mask is not None
    left, right = np.array_split(np.asarray(found.mask), 2, axis=1)
    assert left[:, :-3].min() > 230 and right[:, 3:].max() < 25


def test_pictures_are_no_reason_to_write_a_shard_again_and_go_with_records_that_are_reused(
    photos: Path, encoder: Encoder, encoder_pictures: Encoder, tmp_path: Path
) -> None:
    source, before = open_source(photos), tmp_path / "before"
    precompute(source, encoder, before, rows=(0, 2), shard_size=2)
    first = contents(before)
    report = precompute(source, encoder_pictures, before, rows=(0, 4), shard_size=2)
    assert (report.encoded, report.shards_kept) == (2, 1) and contents(before).items() >= first.items()
    again = Settings(reuse=(str(before),))
    moved = precompute(source, encoder_pictures, tmp_path / "moved", rows=(0, 4), shard_size=4, settings=again)
    assert moved.encoded == 0
    (shard,) = (Shard(index) for index in published(open_folder(tmp_path / "moved")))
    there = [shard.pictures_jpeg(entry) for entry in shard.index.samples]
    assert there == [None, None, *(encoder_pictures.encode(source.read(number)).pictures for number in (2, 3))]


# The encoder, as it writes into a folder of an earlier qie


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


def test_a_folder_of_an_earlier_qie_is_gone_on_with_under_its_recipe(
    photos: Path, tiny_edit: Path, tmp_path: Path
) -> None:
    output, pretrained = open_folder(tmp_path / "shards"), {"pretrained_model_name_or_path": str(tiny_edit)}
    data = {"source": str(photos), "area_px": AREA_PX, "allow_tiny": True}
    config = Config.model_validate({"model": pretrained, "data": data, "cache": DEVICES})
    source, encoder = open_source(photos), open_encoder(config)
    assert encoder.recipe.thumbnail_px is None
    earlier = replace(encoder.recipe, thumbnail_px=32)
    encoder.recipe = earlier
    precompute(source, encoder, output, rows=(0, 2), shard_size=2)
    report = precompute_config(config, source, output, rows=(0, 4), shard_size=2, settings=Settings(), progress=print)
    assert (report.encoded, report.shards_kept) == (2, 1)
    shards = [Shard(index) for index in published(output)]
    assert {shard.index.recipe for shard in shards} == {earlier}
    assert ShardSet.open([tmp_path / "shards"]).load(3).thumbnail is not None

    assert open_encoder(config, like=replace(earlier, batch_size=2)).recipe == replace(earlier, thumbnail_px=None)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "00000000-00000002.json").write_text("{")
    assert recipe_there(open_folder(damaged)) is None and recipe_there(open_folder(tmp_path / "none")) is None


def test_live_equals_cached_with_thumbnails_which_no_batch_carries_and_a_second_run_encodes_nothing(
    photos: Path, encoder_small: Encoder, tmp_path: Path
) -> None:
    batches = assert_live_equals_cached(photos, encoder_small, tmp_path, batch_size=2)

    assert not [name for name in vars(batches[0]) if "thumb" in name]
    (entry, *_) = Shard(File.at(tmp_path / "00000000-00000005.json")).index.samples
    assert entry.tensor_bytes["thumbnail"] > 0
    again = precompute(open_source(photos), encoder_small, tmp_path, rows=(0, 5), shard_size=5)
    assert (again.encoded, again.shards_kept) == (0, 1)
