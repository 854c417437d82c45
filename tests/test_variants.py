"""Variants of rows: captions, mirrored and cropped pictures. Stored side by side, and one of each row in an epoch."""

from __future__ import annotations

import io
import random
import shutil
from collections import defaultdict
from dataclasses import fields, replace
from itertools import islice, pairwise
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageOps

from qie.data.live import look_at_rows
from qie.data.opening import open_stream
from qie.data.sources import open_source
from qie.data.variants import Variants
from qie.errors import QieError, RowError
from qie.precompute import Settings, precompute
from qie.shards.index import Entry
from qie.shards.shard_set import ShardSet
from qie.types import Augment, Batch, Row
from tests.builders import assert_prepared_alike, prepared
from tests.stubs import RECIPE, StubEncoder, StubSource

ROW = Row(5, "five", b"target", (b"one", b"two"), "first", b"mask", ("second", "third"))
THREE = Variants(3)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def captioned(count: int, captions: int = 3) -> StubSource:
    return StubSource(
        tuple(
            replace(row, more_prompts=tuple(f"{row.prompt} {number}" for number in range(1, captions)))
            for row in StubSource.of(count).rows
        )
    )


def write(source, output: Path, variants: Variants, encoder=None, shard_size: int = 4) -> ShardSet:
    encoder = encoder or StubEncoder()
    settings = Settings(variants=variants)
    precompute(source, encoder, output, rows=(0, len(source)), shard_size=shard_size, settings=settings)
    return ShardSet.open([output])


# What variants there are


def test_of_one_variant_a_row_is_itself_with_its_first_caption() -> None:
    for variants in (Variants(), Variants(1, flip=True, crop=0.5)):
        (only,) = variants.of(ROW)
        assert only == replace(ROW, more_prompts=())
        assert RECIPE.key(only) == RECIPE.key(ROW)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_without_augmentation_there_are_as_many_variants_as_captions_up_to_the_count(count: int) -> None:
    found = Variants(count).of(ROW)
    assert [row.prompt for row in found] == ["first", "second", "third"][:count]
    assert [row.variant for row in found] == list(range(len(found)))
    assert {row.augment for row in found} == {None}


@pytest.mark.parametrize("variants", [Variants(7, flip=True), Variants(7, crop=0.8), Variants(7, True, 0.8)], ids=str)
def test_with_augmentation_there_are_as_many_as_asked_for_and_captions_take_turns(variants: Variants) -> None:
    found = variants.of(ROW)
    assert [row.prompt for row in found] == ["first", "second", "third", "first", "second", "third", "first"]
    assert [row.variant for row in found] == list(range(7))
    assert found[0] == replace(ROW, more_prompts=())
    assert {(row.index, row.name, row.target, row.controls, row.mask, row.more_prompts) for row in found} == {
        (5, "five", b"target", (b"one", b"two"), b"mask", ())
    }


def test_more_variants_leave_the_first_ones_as_they_are() -> None:
    for variants in (Variants(3, True, 0.7), Variants(2)):
        more = replace(variants, count=6)
        assert more.of(ROW)[: variants.count] == variants.of(ROW)


def test_variants_follow_from_content_alone() -> None:
    variants = Variants(5, flip=True, crop=0.7)
    elsewhere = replace(ROW, index=99, name="other", source="mixture")
    assert [row.augment for row in variants.of(elsewhere)] == [row.augment for row in variants.of(ROW)]
    assert [RECIPE.key(row) for row in variants.of(elsewhere)] == [RECIPE.key(row) for row in variants.of(ROW)]
    random.seed(7)
    assert variants.of(ROW) == variants.of(ROW)
    for change in ({"target": b"other"}, {"controls": (b"one",)}):
        other = variants.of(replace(ROW, **change))
        assert [row.augment for row in other[1:]] != [row.augment for row in variants.of(ROW)[1:]]


def test_the_drawn_variants_are_those_of_yesterday() -> None:
    """Written down: another draw would leave every stored variant behind."""
    row = Row(0, "", b"target", (b"control",), "p")
    assert [str(variant.augment) for variant in Variants(3, flip=True, crop=0.8).of(row)[1:]] == [
        "flip 0.054676 0.036326 0.989692 0.971342",
        "as is 0.072674 0.026692 0.965609 0.919627",
    ]


@pytest.mark.parametrize("crop", [0.05, 0.5, 0.9, 0.999999, 1.0])
def test_a_box_keeps_what_it_should_and_lies_within_the_picture(crop: float) -> None:
    for number in range(60):
        for row in Variants(3, flip=True, crop=crop).of(replace(ROW, target=str(number).encode()))[1:]:
            left, top, right, bottom = row.augment.box if row.augment else (0, 0, 1, 1)
            assert 0 <= left < right <= 1 and 0 <= top < bottom <= 1
            assert right - left == pytest.approx(bottom - top, abs=3e-6)
            assert crop - 3e-6 <= right - left <= 1 + 3e-6


def test_about_half_of_further_variants_are_mirrored_if_they_may_be_whether_or_not_they_are_cropped() -> None:
    rows = [replace(ROW, target=str(number).encode()) for number in range(400)]
    flips = [Variants(2, flip=True, crop=0.9).of(row)[1].augment.flip for row in rows]
    assert 160 < sum(flips) < 240
    assert not any(Variants(2, crop=0.9).of(row)[1].augment.flip for row in rows)
    both, one = Variants(4, True, 0.8).of(ROW), Variants(4, False, 0.8).of(ROW)
    assert [row.augment and row.augment.box for row in both] == [row.augment and row.augment.box for row in one]


def test_the_keys_of_variants_differ() -> None:
    assert len({RECIPE.key(row) for row in THREE.of(ROW)}) == 3
    assert len({RECIPE.key(row) for row in Variants(12, True, 0.8).of(ROW)}) == 12


def test_a_variant_in_which_nothing_was_done_to_the_picture_is_the_same_sample() -> None:
    """Flipping alone leaves every other variant as it is: it is not to be encoded and stored again."""
    rows = [replace(ROW, target=str(number).encode(), more_prompts=()) for number in range(50)]
    for row in rows:
        as_it_is, further = Variants(2, flip=True).of(row)
        mirrored = further.augment is not None and further.augment.flip
        assert (RECIPE.key(as_it_is) == RECIPE.key(further)) is not mirrored


# In shards


def test_a_shard_holds_all_variants_of_each_row_in_their_order(tmp_path: Path) -> None:
    source = captioned(10)
    found = write(source, tmp_path, THREE)
    assert [(entry.row, entry.variant) for entry in found.entries] == [(r, v) for r in range(10) for v in range(3)]
    assert found.keys == [RECIPE.key(variant) for row in source.rows for variant in THREE.of(row)]
    assert found.columns.rows.tolist() == [position // 3 for position in range(30)]
    assert [found.load(position).prompt for position in range(3)] == ["p0", "p0 1", "p0 2"]


def test_a_variant_that_cannot_be_encoded_is_skipped_by_itself(tmp_path: Path) -> None:
    class Picky(StubEncoder):
        def inspect(self, row: Row):
            if row.prompt == "p2 1":
                raise RowError("not this caption")
            return super().inspect(row)

    source = captioned(5).changed(4, target=b"missing")
    settings = Settings(variants=THREE)
    report = precompute(source, Picky(), tmp_path, rows=(0, 5), settings=settings)
    assert [(gone.row, gone.variant, gone.reason) for gone in report.skipped] == [
        (2, 1, "not this caption"),
        (4, 0, "no control image"),
    ]
    found = ShardSet.open([tmp_path])
    assert [(entry.row, entry.variant) for entry in found.entries if entry.row == 2] == [(2, 0), (2, 2)]
    live = look_at_rows(source, Picky(), THREE)
    assert [(gone.row, gone.variant, gone.reason) for gone in live.skipped] == [
        (gone.row, gone.variant, gone.reason) for gone in found.skipped
    ]
    assert [facts.key for facts in live.facts] == found.keys
    again = precompute(source, Picky(), tmp_path, rows=(0, 5), settings=settings)
    assert (again.shards_kept, again.encoded, len(again.skipped)) == (1, 0, 2)


@pytest.mark.parametrize("variants", [THREE, Variants(3, flip=True, crop=0.8)], ids=["captions", "augmented"])
def test_further_variants_are_added_without_encoding_the_first_again(tmp_path: Path, variants: Variants) -> None:
    source = captioned(9)
    first = {entry.row: entry.key for entry in write(source, tmp_path / "out", Variants()).entries}

    class Noting(StubEncoder):
        def encode(self, row: Row):
            assert row.variant > 0
            return super().encode(row)

    encoder = Noting()
    found = write(source, tmp_path / "out", variants, encoder)
    assert sorted(encoder.encoded) == sorted([*range(9), *range(9)])
    assert {entry.row: entry.key for entry in found.entries if entry.variant == 0} == first
    write(source, tmp_path / "fresh", variants)
    assert files(tmp_path / "out") == files(tmp_path / "fresh")

    back = StubEncoder()
    write(source, tmp_path / "out", Variants(), back)
    write(source, tmp_path / "one", Variants())
    assert back.encoded == []
    assert files(tmp_path / "out") == files(tmp_path / "one")


def test_captions_in_another_order_are_not_encoded_again_and_have_their_new_numbers(tmp_path: Path) -> None:
    source = captioned(6)
    write(source, tmp_path / "out", THREE)
    swapped = source.changed(2, prompt="p2 2", more_prompts=("p2", "p2 1"))
    encoder = StubEncoder()
    found = write(swapped, tmp_path / "out", THREE, encoder)
    assert encoder.encoded == []
    assert [found.load(6 + number).prompt for number in range(3)] == ["p2 2", "p2", "p2 1"]
    assert [entry.variant for entry in found.entries] == [0, 1, 2] * 6
    write(swapped, tmp_path / "fresh", THREE)
    assert files(tmp_path / "out") == files(tmp_path / "fresh")


# In a stream


def epochs(stream, count: int) -> list[list[Batch]]:
    iterator = stream.forever()
    return [list(islice(iterator, len(stream))) for _ in range(count)]


def real(batch: Batch) -> list[str]:
    """Keys of the samples of a batch that do not just fill it up."""
    return [key for key, weight in zip(batch.keys, batch.weight.tolist(), strict=True) if weight]


def test_each_epoch_has_one_variant_of_each_row_and_in_time_all_of_them(tmp_path: Path) -> None:
    found = write(captioned(20), tmp_path, THREE)
    entry_of: dict[str, Entry] = {entry.key: entry for entry in found.entries}
    seen: dict[int, set[int]] = defaultdict(set)
    chosen: list[dict[int, int]] = []
    for batches in epochs(open_stream(tmp_path, batch_size=2, seed=5), 30):
        entries = [entry_of[key] for batch in batches for key in real(batch)]
        assert sorted(entry.row for entry in entries) == list(range(20))
        chosen.append({entry.row: entry.variant for entry in entries})
        for entry in entries:
            seen[entry.row].add(entry.variant)
    assert all(variants == {0, 1, 2} for variants in seen.values())
    assert all(one != other for one, other in pairwise(chosen)), "epochs are alike"
    counts = [sum(list(epoch.values()).count(number) for epoch in chosen) for number in range(3)]
    assert all(150 < count < 250 for count in counts), counts


def assert_same(one: Batch, other: Batch) -> None:
    for field in fields(Batch):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        for left, right in zip(mine, theirs, strict=True) if isinstance(mine, tuple) else [(mine, theirs)]:
            if isinstance(left, torch.Tensor):
                assert left.dtype == right.dtype and torch.equal(left, right), field.name
            else:
                assert left == right, field.name


def assert_live_equals_cached(source, encoder, output: Path, variants: Variants, count: int, **settings) -> list[Batch]:
    write(source, output, variants, encoder)
    cached = open_stream(output, **settings)
    live = open_stream(source, encoder=encoder, variants=variants, **settings)
    assert live.state_dict() == cached.state_dict()
    read = []
    for one, other, _ in zip(cached.forever(), live.forever(), range(count), strict=False):
        assert_same(one, other)
        read.append(one)
    mine, theirs = cached.validation_batches(), live.validation_batches()
    assert mine == theirs
    for planned in mine:
        assert_same(cached.load(planned), live.load(planned))
    return read


@pytest.mark.parametrize("variants", [THREE, Variants(4, flip=True, crop=0.7)], ids=["captions", "augmented"])
def test_live_and_cached_batches_of_variants_are_bit_identical(tmp_path: Path, variants: Variants) -> None:
    source = captioned(14).changed(3, target=b"broken").changed(8, target=b"missing").changed(5, more_prompts=())
    read = assert_live_equals_cached(
        source, StubEncoder(), tmp_path, variants, 40, batch_size=2, seed=3, validation_rows=2
    )
    assert len(read) == 40


def test_so_they_are_with_real_encoders_mirrored_and_cropped(photos: Path, encoder, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    shutil.copytree(photos, folder)
    for name in ("training_images", "control_images"):
        kept = {path.stem for path in sorted((photos / "training_images").glob("*.png"))[:4]}
        for path in (folder / name).iterdir():
            if path.stem not in kept:
                path.unlink()
    source, variants = open_source(folder), Variants(2, flip=True, crop=0.75)
    assert len(source) == 4
    augments = [row.augment for index in range(4) for row in variants.of(source.read(index))[1:]]
    assert {augment.flip for augment in augments if augment} == {False, True}
    read = assert_live_equals_cached(source, encoder, tmp_path / "out", variants, 4, batch_size=1, validation_rows=1)
    assert len({key for batch in read for key in batch.keys}) > 2


def test_a_row_kept_for_validation_is_kept_with_all_its_variants_and_validates_as_it_is(tmp_path: Path) -> None:
    found = write(captioned(12), tmp_path, THREE)
    stream = open_stream(tmp_path, validation_rows=4)
    kept = {found.entries[position].row for position in stream.held_out}
    assert len(kept) == 4 and len(stream.held_out) == 12
    firsts = [entry.key for entry in found.entries if entry.variant == 0]
    assert [found.keys[batch.positions[0]] for batch in stream.validation_batches()] == sorted(firsts)[:4]
    for batches in epochs(stream, 6):
        assert not {found.entries[number].row for batch in batches for number in batch.indices} & kept


def test_equal_samples_are_never_on_both_sides(tmp_path: Path) -> None:
    """Two rows of one picture, whose captions are the same in another order."""
    source = captioned(12)
    rows = [
        replace(row, prompt=row.more_prompts[0], more_prompts=(row.prompt, row.more_prompts[1])) for row in source.rows
    ]
    both = StubSource(tuple(replace(row, index=index) for index, row in enumerate((*source.rows, *rows))))
    found = write(both, tmp_path, THREE)
    stream = open_stream(tmp_path, validation_rows=5)
    validated = {found.keys[number] for batch in stream.validation_batches() for number in batch.positions}
    trained = {key for batches in epochs(stream, 12) for batch in batches for key in batch.keys}
    assert not validated & trained


def test_a_caption_that_went_while_training_is_an_error(tmp_path: Path) -> None:
    source = captioned(2)
    live = open_stream(source, encoder=StubEncoder(), variants=THREE).samples
    changed = replace(live, source=source.changed(1, more_prompts=()))
    assert changed.fetch(3).prompt == "p1"
    with pytest.raises(QieError, match="a row changed"):
        changed.fetch(5)


# What is done to pictures


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def edited(row: Row, edit) -> Row:
    """A row whose pictures were edited beforehand, and saved without loss."""
    pictures = [png(edit(Image.open(io.BytesIO(content)).convert("RGB"))) for content in (row.target, *row.controls)]
    mask = None if row.mask is None else png(edit(Image.open(io.BytesIO(row.mask))))
    return replace(row, target=pictures[0], controls=tuple(pictures[1:]), mask=mask)


def with_mask(row: Row, size: tuple[int, int]) -> Row:
    mask = Image.linear_gradient("L").rotate(30).resize(size)
    return replace(row, mask=png(mask))


BOXES = [(0.0, 0.0, 0.5, 0.5), (0.25, 0.125, 0.875, 0.75), (0.0, 0.0, 1.0, 1.0)]


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("box", BOXES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_a_variant_is_the_row_whose_pictures_were_edited_beforehand(
    photos: Path, encoder, flip: bool, box: tuple, masked: bool
) -> None:
    def sized(image: Image.Image) -> Image.Image:
        return image.resize((256, 192))

    def edit(image: Image.Image) -> Image.Image:
        width, height = image.size
        image = image.crop(tuple(int(side * of) for side, of in zip(box, (width, height) * 2, strict=True)))
        return ImageOps.mirror(image) if flip else image

    row = edited(open_source(photos).read(2), sized)
    if masked:
        row = with_mask(row, (256, 192))
    mine, theirs = (prepared(encoder, one) for one in (replace(row, augment=Augment(flip, box)), edited(row, edit)))
    assert encoder.recipe.key(mine.row) != encoder.recipe.key(theirs.row)
    assert_prepared_alike(mine, theirs)
    assert (mine.loss_mask is None) is not masked


@pytest.mark.parametrize("size", [(1, 1), (2, 150), (16, 16)], ids=str)
def test_however_little_a_box_keeps_a_picture_is_left(size: tuple[int, int]) -> None:
    from qie.encode.images import augmented

    for number in range(200):
        (_, variant) = Variants(2, crop=0.01).of(replace(ROW, target=str(number).encode()))
        assert min(augmented(Image.new("RGB", size), variant.augment).size) >= 1


def test_a_mask_smaller_than_its_picture_stays_a_mask_of_it_when_both_are_cropped(photos: Path, encoder) -> None:
    row = edited(open_source(photos).read(2), lambda image: image.resize((512, 384)))
    row = with_mask(row, (32, 24))
    refused = []
    for number in range(30):
        (_, variant) = Variants(2, crop=0.8).of(replace(ROW, target=str(number).encode()))
        try:
            encoder.inspect(replace(row, augment=variant.augment))
        except RowError as error:
            refused.append((number, error.what))
    assert refused == []
