"""Reading shards back, from wherever they lie: the right samples, on disks without copies; all damage is found."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qie.errors import RecipeMismatchError, ShardError
from qie.shards.index import Member, ShardIndex, member_name
from qie.shards.reader import Shard
from qie.shards.record import encode
from qie.shards.shard_set import ShardSet, require_disjoint
from qie.shards.writer import ShardWriter
from qie.stores import File, MissingError, StoreError, open_folder
from qie.stores.objects import ObjectFolder
from qie.types import Sample, Shape
from tests.builders import (
    RECIPE,
    assert_same,
    make_entry,
    make_recipe,
    make_sample,
    make_skipped,
    mutated_json,
    plant_shard,
    rewrite_index,
    without_own_hash,
    write_shard,
    write_variants,
)
from tests.s3 import S3

STEM = "00000000-00000003"
SAMPLES = [make_sample(0), make_sample(1, controls=((2, 3), (4, 6)), masked=True), make_sample(2)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The index of a fresh shard of SAMPLES, for tests to damage."""
    write_shard(tmp_path, SAMPLES)
    return tmp_path / f"{STEM}.json"


def flip(path: Path, offset: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def rows_of(shards: ShardSet) -> list[int]:
    return shards.columns.rows.tolist()


def shapes_of(shards: ShardSet) -> list[Shape]:
    return [shards.columns.shape_names[number] for number in shards.columns.shapes]


def member_of(shard: Shard, row: int) -> Member:
    return shard.index.files[member_name(shard.index.samples[row].key)]


# One shard


def test_a_shard_gives_back_its_samples(path: Path) -> None:
    shard = Shard(path)

    for entry, sample in zip(shard.index.samples, SAMPLES, strict=True):
        assert_same(shard.load(entry), sample)


@pytest.mark.parametrize("kind", [str, Path, File.at, "file://{}".format], ids=["path", "Path", "File", "URL"])
def test_a_shard_is_opened_by_a_path_a_file_or_a_url(path: Path, kind: Callable[[Path], Any]) -> None:
    shard = Shard(kind(path))

    assert shard.file.path == path.with_suffix(".tar")
    assert_same(shard.load(shard.index.samples[1]), SAMPLES[1])


def test_opening_a_shard_reads_no_byte_of_its_tar(path: Path) -> None:
    path.with_suffix(".tar").write_bytes(bytes(path.with_suffix(".tar").stat().st_size))

    assert len(Shard(path).index.samples) == 3


def test_loaded_latents_lie_in_the_mapped_file(path: Path) -> None:
    shard = Shard(path)
    entry = shard.index.samples[1]
    record = torch.frombuffer(shard.record(entry), dtype=torch.uint8)

    sample = shard.load(entry)

    for view in (sample.pixel_latent, *sample.control_latent, sample.prompt_embed):
        assert record.data_ptr() < view.data_ptr() < record.data_ptr() + len(record)


def test_writing_to_a_loaded_latent_does_not_reach_the_file(path: Path) -> None:
    before = path.with_suffix(".tar").read_bytes()
    shard = Shard(path)

    shard.load(shard.index.samples[0]).pixel_latent.zero_()

    assert path.with_suffix(".tar").read_bytes() == before


def test_a_sample_outlives_its_shard(path: Path) -> None:
    shard = Shard(path)
    sample = shard.load(shard.index.samples[0])
    path.with_suffix(".tar").unlink()
    del shard

    assert_same(sample, SAMPLES[0])


def test_a_shard_that_is_kept_open_outlives_its_tar(path: Path) -> None:
    shard = Shard(path)
    shard.tar.keep_open()
    write_shard(path.parent, SAMPLES[::-1])
    path.with_suffix(".tar").unlink()

    assert_same(shard.load(shard.index.samples[0]), SAMPLES[0])
    assert shard.verified_record(shard.index.samples[1]) == encode(SAMPLES[1], RECIPE.digest)


def test_a_verified_record_is_the_record(path: Path) -> None:
    shard = Shard(path)

    assert [shard.verified_record(entry) for entry in shard.index.samples] == [
        encode(sample, RECIPE.digest) for sample in SAMPLES
    ]


# Damage


def test_a_missing_tar_is_refused(path: Path) -> None:
    path.with_suffix(".tar").unlink()

    with pytest.raises(ShardError, match="the shard is missing"):
        Shard(path)


def test_a_folder_in_place_of_the_tar_is_refused(path: Path) -> None:
    path.with_suffix(".tar").unlink()
    path.with_suffix(".tar").mkdir()

    with pytest.raises(ShardError, match="the shard is missing"):
        Shard(path)


@pytest.mark.parametrize("size", [0, 1, 10240])
def test_a_truncated_tar_is_refused(path: Path, size: int) -> None:
    tar = path.with_suffix(".tar")
    full = tar.stat().st_size
    tar.write_bytes(tar.read_bytes()[:size])

    with pytest.raises(ShardError, match="the shard is cut short") as error:
        Shard(path)
    assert (error.value.expected, error.value.found) == (f"{full} bytes", f"{size} bytes")


def test_a_tar_of_another_size_is_refused(path: Path) -> None:
    with path.with_suffix(".tar").open("ab") as file:
        file.write(bytes(10240))

    with pytest.raises(ShardError, match="is not the one its index describes"):
        Shard(path)


def test_a_tar_that_was_cut_after_opening_is_refused(path: Path) -> None:
    shard = Shard(path)
    tar = path.with_suffix(".tar")
    tar.write_bytes(tar.read_bytes()[:600])

    for entry in shard.index.samples:
        with pytest.raises(ShardError):
            shard.load(entry)


def test_swapped_records_are_refused(path: Path) -> None:
    one, other = (member_name(SAMPLES[row].key) for row in (0, 2))

    def swap(values: dict[str, Any]) -> None:
        values["files"][one], values["files"][other] = values["files"][other], values["files"][one]

    rewrite_index(path, swap)
    shard = Shard(path)

    with pytest.raises(ShardError, match="the record is another sample's") as error:
        shard.load(shard.index.samples[0])
    assert (error.value.expected, error.value.found) == (SAMPLES[0].key, SAMPLES[2].key)


def test_a_record_of_other_sizes_than_its_entry_is_refused(path: Path) -> None:
    rewrite_index(path, lambda values: values["samples"][0]["shape"].update(target=[6, 4]))
    shard = Shard(path)

    with pytest.raises(ShardError, match="the record has other sizes than the index"):
        shard.load(shard.index.samples[0])


def test_a_record_that_is_none_is_refused(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, 0, 1, RECIPE) as writer:
        writer.add(make_entry(SAMPLES[0], 0), b"no record")
        writer.publish()
    shard = Shard(tmp_path / "00000000-00000001.json")

    with pytest.raises(ShardError, match="the header is longer than the record") as error:
        shard.load(shard.index.samples[0])
    assert str(error.value.where) == f"{shard.file}, {SAMPLES[0].key}"


def test_a_flipped_payload_bit_is_found_by_verified_record(path: Path) -> None:
    shard = Shard(path)
    member = member_of(shard, 1)
    flip(path.with_suffix(".tar"), member.offset + member.size // 2)

    with pytest.raises(ShardError, match="a record is damaged") as error:
        shard.verified_record(shard.index.samples[1])
    assert SAMPLES[1].key in str(error.value.where)
    assert shard.verified_record(shard.index.samples[0]) == encode(SAMPLES[0], RECIPE.digest)


@pytest.mark.parametrize("seed", range(4))
def test_any_damage_to_the_index_gives_samples_or_a_shard_error(path: Path, seed: int) -> None:
    dice = random.Random(seed)
    text = without_own_hash(path.read_text(encoding="utf-8"))

    outcomes = set()
    for _ in range(50):
        path.write_text(mutated_json(text, dice), encoding="utf-8")
        outcomes |= _outcomes(path)

    assert outcomes == {Sample, ShardError}


def _outcomes(path: Path) -> set[type]:
    try:
        shard = Shard(path)
    except ShardError:
        return {ShardError}
    found = set()
    for entry in shard.index.samples:
        try:
            found.add(type(shard.load(entry)))
        except ShardError:
            found.add(ShardError)
    return found


# Several shards


def letters_of(layout: list[str]) -> list[list[Sample | None]]:
    """The samples of rows, each spelled as its variants; "-" is a variant that is skipped."""
    known = {letter: make_sample(ord(letter)) for letter in "abcdef"}
    return [[known.get(letter) for letter in row] for row in layout]


def many(folder: Path, *shards: list[Sample | None]) -> list[Shard]:
    start, opened = 0, []
    for samples in shards:
        index: ShardIndex = write_shard(folder, samples, start=start)
        opened.append(Shard(folder / f"{start:08d}-{index.stop:08d}.json"))
        start = index.stop
    return opened


LAYOUTS = {
    "one shard": ["abc"],
    "several shards": ["a", "bc", "d"],
    "skipped rows": ["-a", "b-c", "-"],
    "a skipped shard first": ["--", "ab", "c"],
    "a skipped shard between": ["ab", "--", "c"],
    "a skipped shard last": ["ab", "c", "--"],
    "skipped shards everywhere": ["-", "--", "a", "-", "b-", "-", "c", "-"],
    "equal rows": ["aa", "ba", "a"],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_positions_lead_to_the_samples_in_the_order_of_rows(tmp_path: Path, layout: list[str]) -> None:
    letters = {letter: make_sample(ord(letter)) for letter in "abcd"}
    many(tmp_path, *([letters.get(letter) for letter in shard] for shard in layout))
    rows = "".join(layout)

    shards = ShardSet.open([tmp_path])

    expected = [letters[letter] for letter in rows if letter != "-"]
    assert len(shards) == len(expected)
    assert shards.keys == [sample.key for sample in expected]
    assert shapes_of(shards) == [sample.shape for sample in expected]
    assert bytes(shards.digests.reshape(-1)).hex() == "".join(shards.keys)
    assert [entry.row for entry in shards.entries] == [row for row, letter in enumerate(rows) if letter != "-"]
    assert [gone.row for gone in shards.skipped] == [row for row, letter in enumerate(rows) if letter == "-"]
    for position, sample in enumerate(expected):
        assert_same(shards.load(position), sample)


def test_a_position_past_the_end_is_an_index_error(tmp_path: Path) -> None:
    write_shard(tmp_path, SAMPLES)
    shards = ShardSet.open([tmp_path])

    with pytest.raises(IndexError):
        shards.load(3)


def test_shards_open_from_several_places(tmp_path: Path) -> None:
    write_shard(tmp_path / "one", SAMPLES[:2])
    write_shard(tmp_path / "two", SAMPLES[2:])

    shards = ShardSet.open([tmp_path / "two", f"{tmp_path}/one/*.tar"])

    assert shards.keys == [SAMPLES[2].key, SAMPLES[0].key, SAMPLES[1].key]


def test_shards_without_any_sample_are_refused(tmp_path: Path) -> None:
    many(tmp_path, [None, None], [None])

    with pytest.raises(ShardError, match="the shards hold no samples"):
        ShardSet.open([tmp_path])


def test_no_shards_are_refused() -> None:
    with pytest.raises(ShardError, match="the shards hold no samples"):
        ShardSet([])


def test_shards_of_one_recipe_have_it(tmp_path: Path) -> None:
    many(tmp_path, SAMPLES[:1], SAMPLES[1:])
    shards = ShardSet.open([tmp_path])

    assert shards.recipe == RECIPE
    make_recipe().require_equal(shards.recipe, tmp_path, "nothing to do")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("areas_px", (512 * 512,), "areas_px: (1048576,) here, (262144,) there"),
        ("vae", "f" * 64, "vae: aaaaaaaaaaaa… here, ffffffffffff… there"),
        ("text_area_px", None, "text_area_px: 147456 here, None there"),
        ("vae_dtype", "bfloat16", "vae_dtype: float32 here, bfloat16 there"),
    ],
)
def test_shards_of_two_recipes_are_refused_by_the_field_that_differs(
    tmp_path: Path, field: str, value: object, said: str
) -> None:
    other = make_recipe(**{field: value})
    write_shard(tmp_path, SAMPLES[:1])
    write_shard(tmp_path, [make_sample(1, recipe=other)], start=1, recipe=other)

    with pytest.raises(RecipeMismatchError) as error:
        ShardSet.open([tmp_path])

    assert error.value.what == f"shards of another recipe: {said}"
    assert (error.value.expected, error.value.found) == (f"recipe {RECIPE.digest}", f"recipe {other.digest}")
    assert str(error.value.where) == str(tmp_path / "00000001-00000002.tar")
    assert error.value.exit_code == 2


def test_two_differing_fields_are_both_named(tmp_path: Path) -> None:
    other = make_recipe(areas_px=(4096,), background="#000000")
    write_shard(tmp_path, SAMPLES)
    shards = ShardSet.open([tmp_path])

    with pytest.raises(RecipeMismatchError) as error:
        other.require_equal(shards.recipe, tmp_path, "precompute again")

    assert error.value.what == (
        "shards of another recipe: areas_px: (4096,) here, (1048576,) there; background: #000000 here, #ffffff there"
    )
    assert error.value.hint == "precompute again"


@pytest.mark.parametrize(("start", "found"), [(2, "rows [2, 3)"), (0, "rows [0, 3)"), (1, "rows [1, 3)")])
def test_overlapping_shards_are_refused(tmp_path: Path, start: int, found: str) -> None:
    write_shard(tmp_path, SAMPLES)
    plant_shard(tmp_path, [*SAMPLES, SAMPLES[0]], start=start)

    with pytest.raises(ShardError, match="two shards hold the same rows") as error:
        ShardSet.open([tmp_path])
    assert str(error.value.found).startswith(found)


def test_a_shard_within_another_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path, [make_sample(seed) for seed in range(6)])
    plant_shard(tmp_path, [make_sample(1)], start=1)
    plant_shard(tmp_path, [make_sample(4)], start=4)

    with pytest.raises(ShardError, match="two shards hold the same rows"):
        ShardSet.open([tmp_path])


def test_a_skipped_shard_over_the_rows_of_another_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path, SAMPLES)
    plant_shard(tmp_path, [None], start=2)

    with pytest.raises(ShardError, match="two shards hold the same rows"):
        ShardSet.open([tmp_path])


def test_the_same_rows_in_two_directories_are_two_sources(tmp_path: Path) -> None:
    write_shard(tmp_path / "one", SAMPLES)
    write_shard(tmp_path / "two", SAMPLES)

    assert len(ShardSet.open([tmp_path / "one", tmp_path / "two"])) == 6


def test_adjoining_shards_are_disjoint(tmp_path: Path) -> None:
    require_disjoint([(shard.file, shard.index.rows) for shard in many(tmp_path, SAMPLES[:1], SAMPLES[1:])][::-1])


def test_skipped_rows_keep_their_reasons(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, 0, 2, RECIPE) as writer:
        writer.add(make_entry(SAMPLES[0], 0), encode(SAMPLES[0], RECIPE.digest))
        writer.skip(make_skipped(1, "no control image"))
        writer.publish()

    assert ShardSet.open([tmp_path]).skipped == [make_skipped(1, "no control image")]


# Several variants of a row

VERSIONS = {
    "one each": (["a", "b", "c"], [0, 1, 2]),
    "several": (["abc", "d", "ef"], [0, 0, 0, 3, 4, 4]),
    "some skipped": (["-ab", "c-", "--", "d-e"], [0, 0, 2, 3, 3]),
    "equal variants": (["aa", "ba", "ab"], [0, 0, 2, 2, 4, 4]),
    "equal rows": (["a", "a", "a"], [0, 1, 2]),
}


@pytest.mark.parametrize(("layout", "expected"), VERSIONS.values(), ids=VERSIONS)
def test_the_variants_of_a_row_have_one_number(tmp_path: Path, layout: list[str], expected: list[int]) -> None:
    write_variants(tmp_path, letters_of(layout))

    shards = ShardSet.open([tmp_path])

    assert rows_of(shards) == expected
    spelled = [(row, variant, letter) for row, word in enumerate(layout) for variant, letter in enumerate(word)]
    assert [(entry.row, entry.variant) for entry in shards.entries] == [
        (row, variant) for row, variant, letter in spelled if letter != "-"
    ]
    assert [(gone.row, gone.variant) for gone in shards.skipped] == [
        (row, variant) for row, variant, letter in spelled if letter == "-"
    ]


def test_every_variant_of_a_row_is_loaded_by_its_position(tmp_path: Path) -> None:
    rows = letters_of(["ab", "-c", "d", "aef"])
    write_variants(tmp_path, rows[:2])
    write_variants(tmp_path, rows[2:], start=2)

    shards = ShardSet.open([tmp_path])

    expected = [sample for variants in rows for sample in variants if sample]
    assert len(shards) == 7
    for position, sample in enumerate(expected):
        assert_same(shards.load(position), sample)


def test_rows_of_several_shards_are_not_mixed_up(tmp_path: Path) -> None:
    for start, layout in [(0, ["ab", "c"]), (2, ["--", "-"]), (4, ["a", "bcd"]), (6, ["-e"])]:
        write_variants(tmp_path, letters_of(layout), start=start)

    assert rows_of(ShardSet.open([tmp_path])) == [0, 0, 2, 3, 4, 4, 4, 7]


def test_rows_of_equal_number_in_several_folders_are_not_mixed_up(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        write_variants(tmp_path / name, letters_of(["ab", "c"]), source=name)

    shards = ShardSet.open([tmp_path / name for name in ("two", "one", "three")])

    assert rows_of(shards) == [0, 0, 2, 3, 3, 5, 6, 6, 8]
    assert [entry.source for entry in shards.entries] == ["two"] * 3 + ["one"] * 3 + ["three"] * 3


# In a bucket


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """Two shards: rows 0 to 2 are SAMPLES, row 1 has a second variant, which is skipped, as is row 4."""
    write_variants(tmp_path / "local", [[SAMPLES[0]], [SAMPLES[1], None], [SAMPLES[2]]])
    write_variants(tmp_path / "local", [[make_sample(3), SAMPLES[0]], [None]], start=3)
    return tmp_path / "local"


@pytest.fixture
def remote(s3: S3, local: Path) -> str:
    """The URL of a copy of `local`."""
    folder = open_folder(f"{s3.url}/copies/shards")
    for path in local.iterdir():
        folder.upload(path.name, path)
    return folder.url


def place_of(remote: str, stem: str = STEM) -> str:
    return f"{remote}/{stem}.json"


def damage(remote: str, change: Callable[[bytearray], object], stem: str = STEM) -> None:
    folder = open_folder(remote)
    content = bytearray(folder.read(f"{stem}.tar"))
    change(content)
    folder.write(f"{stem}.tar", bytes(content))


PLACES = ["", "/", "/*.tar", "/0*.json", "/{00000000-00000003,00000003-00000005}.tar"]


@pytest.mark.parametrize("ending", PLACES, ids=["folder", "slash", "tars", "indexes", "braces"])
def test_shards_in_a_bucket_give_what_their_copies_give(local: Path, remote: str, ending: str) -> None:
    here, there = ShardSet.open([local]), ShardSet.open([f"{remote}{ending}"])

    assert (there.recipe, there.entries, there.skipped) == (here.recipe, here.entries, here.skipped)
    assert (there.keys, rows_of(there), shapes_of(there)) == (here.keys, rows_of(here), shapes_of(here))
    for position in range(len(here)):
        assert_same(there.load(position), here.load(position))


def test_records_in_a_bucket_are_their_copies_byte_by_byte(local: Path, remote: str) -> None:
    here, there = Shard(local / f"{STEM}.json"), Shard(place_of(remote))

    for entry in here.index.samples:
        assert there.record(entry) == here.record(entry)
        assert there.verified_record(entry) == here.verified_record(entry)


def test_damage_in_a_bucket_is_found_by_verified_record(remote: str) -> None:
    shard = Shard(place_of(remote))
    member = member_of(shard, 1)

    def flip_two(content: bytearray) -> None:
        content[0] ^= 1
        content[member.offset + 99] ^= 1

    damage(remote, flip_two)

    with pytest.raises(ShardError, match="a record is damaged") as error:
        shard.verified_record(shard.index.samples[1])
    assert str(error.value.where) == f"{remote}/{STEM}.tar, {SAMPLES[1].key}"


def test_loading_from_a_bucket_reads_one_record_and_nothing_else(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard(place_of(remote))
    member = member_of(shard, 2)
    asked: list[tuple[str, int, int | None]] = []
    read = ObjectFolder.read

    def counted(self: ObjectFolder, name: str, start: int = 0, stop: int | None = None) -> bytes:
        asked.append((name, start, stop))
        return read(self, name, start, stop)

    monkeypatch.setattr(ObjectFolder, "read", counted)
    assert_same(shard.load(shard.index.samples[2]), SAMPLES[2])

    assert asked == [(f"{STEM}.tar", member.offset, member.offset + member.size)]


def test_writing_to_a_latent_from_a_bucket_changes_no_other_load(remote: str) -> None:
    shards = ShardSet.open([remote])

    shards.load(0).pixel_latent.zero_()

    assert_same(shards.load(0), SAMPLES[0])


def test_a_tar_that_is_missing_from_a_bucket_is_refused(remote: str) -> None:
    open_folder(remote).delete(f"{STEM}.tar")

    with pytest.raises(ShardError, match="the shard is missing") as error:
        Shard(place_of(remote))
    assert str(error.value.where) == f"{remote}/{STEM}.tar"


def test_a_tar_in_a_bucket_that_is_cut_short_is_refused(remote: str) -> None:
    size = Shard(place_of(remote)).index.filesize
    damage(remote, lambda content: content.__delitem__(slice(-1, None)))

    with pytest.raises(ShardError, match="the shard is cut short") as error:
        Shard(place_of(remote))
    assert (error.value.expected, error.value.found) == (f"{size} bytes", f"{size - 1} bytes")


def test_a_tar_that_is_cut_after_opening_is_an_error_and_never_fewer_bytes(remote: str) -> None:
    shard = Shard(place_of(remote))
    damage(remote, lambda content: content.__delitem__(slice(member_of(shard, 2).offset + 10, None)))

    with pytest.raises(StoreError, match="a file is too short"):
        shard.load(shard.index.samples[2])
    open_folder(remote).delete(f"{STEM}.tar")
    with pytest.raises(MissingError):
        shard.load(shard.index.samples[2])


def test_an_index_that_is_missing_from_a_bucket_is_refused(remote: str) -> None:
    with pytest.raises(ShardError, match="the index cannot be read") as error:
        Shard(place_of(remote, "00000009-00000010"))
    assert str(error.value.where) == place_of(remote, "00000009-00000010")


def test_keeping_a_shard_in_a_bucket_open_asks_for_nothing(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard(place_of(remote))
    monkeypatch.delattr(ObjectFolder, "read")

    shard.tar.keep_open()


def test_the_same_rows_in_a_bucket_and_on_a_disk_are_two_sources(local: Path, remote: str) -> None:
    shards = ShardSet.open([local, remote])

    assert rows_of(shards) == [0, 1, 2, 3, 3, 5, 6, 7, 8, 8]
    assert shards.keys[:5] == shards.keys[5:]


def test_overlapping_shards_in_a_bucket_are_refused(remote: str, local: Path) -> None:
    plant_shard(local, [SAMPLES[0]], start=2)
    for path in local.glob("00000002-*"):
        open_folder(remote).upload(path.name, path)

    with pytest.raises(ShardError, match="two shards hold the same rows") as error:
        ShardSet.open([f"{remote}/*.tar", remote])
    assert str(error.value.where) == f"{remote}/00000002-00000003.tar"
