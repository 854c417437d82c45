"""Records by position: what is fetched for training is what is loaded; what does not fit its index is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from qie.buffer_pool import ALIGNMENT
from qie.errors import RecipeMismatchError, ShardError
from qie.shards.reader import Shard
from qie.shards.record import encode
from qie.shards.shard_set import ShardSet, Verify, compact_folder, require_disjoint
from qie.shards.verify import shard_faults
from qie.shards.writer import ShardWriter
from qie.stores import LocalFolder, open_folder
from qie.types import Sample
from tests.builders import (
    RECIPE,
    assert_same,
    join_record,
    make_entry,
    make_recipe,
    make_sample,
    make_skipped,
    plant_shard,
    rewrite_index,
    same_bits,
    split_record,
    without_fast_hashes,
    write_shard,
    write_variants,
)
from tests.s3 import S3

STEM = "00000000-00000001"
KINDS = {
    "plain": make_sample(0),
    "several controls": make_sample(1, controls=((2, 3), (4, 6), (5, 1))),
    "controls of one size": make_sample(2, controls=((4, 6), (4, 6))),
    "a loss mask": make_sample(3, masked=True),
    "controls and a loss mask": make_sample(4, target=(3, 5), controls=((1, 1), (3, 5)), masked=True, paired=True),
    "no tail": make_sample(5, empty_tokens=5, shared_prefix=5),
    "no tail, whole prompt": make_sample(6, tokens=5, empty_tokens=5, shared_prefix=5),
    "nothing shared": make_sample(7, shared_prefix=0),
    "the whole prompt shared": make_sample(8, tokens=5, empty_tokens=8, shared_prefix=5),
    "no null prompt": make_sample(12, empty_tokens=0, shared_prefix=0),
    "one token": make_sample(9, tokens=1, empty_tokens=1, shared_prefix=0),
    "odd sizes": make_sample(10, target=(1, 1), controls=((1, 3),), tokens=3, empty_tokens=3, shared_prefix=2, width=1),
    "clipped, a long prompt": make_sample(11, clipped=7, prompt="naïve 日本 " * 99),
}
VERIFY: tuple[Verify, ...] = ("off", "first", "always")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of all kinds of samples. Not to be changed."""
    folder, samples = tmp_path_factory.mktemp("kinds") / "shards", list(KINDS.values())
    for start in range(0, len(samples), 4):
        write_shard(folder, samples[start : start + 4], start=start)
    return folder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The tar of a fresh shard of one sample, for tests to damage."""
    write_shard(tmp_path, [KINDS["plain"]])
    return tmp_path / f"{STEM}.tar"


# The same, however it is read


@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_what_is_fetched_for_training_is_what_is_loaded_bit_for_bit_in_any_order(
    folder: Path, s3: S3, place: str, verify: Verify
) -> None:
    if place == "bucket":
        for path in folder.iterdir():
            open_folder(f"{s3.url}/shards").upload(path.name, path)
    shards = ShardSet.open([folder if place == "disk" else f"{s3.url}/shards"], verify=verify)
    samples = list(KINDS.values())

    local = ShardSet.open([folder])
    assert (shards.recipe, shards.entries, shards.skipped) == (RECIPE, local.entries, local.skipped)
    for position in [*range(len(samples)), *random.Random(0).choices(range(len(samples)), k=40)]:
        assert_same(shards.fetch(position), samples[position])
        assert_same(shards.load(position), samples[position])


# When a record's hash is checked


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip a bit in place, as a disk would: what is mapped sees it."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def last_byte_of_prompt(path: Path) -> int:
    """Where the prompt's embedding ends in a tar of one sample without loss mask."""
    shard = Shard(path.with_suffix(".json"))
    (member,), sample = shard.index.files.values(), KINDS["plain"]
    return member.offset + member.size - len(sample.prompt_embeds_mask) - len(sample.empty_prompt_embeds_mask) - 1


@pytest.mark.parametrize("verify", VERIFY)
def test_verify_says_when_a_flipped_bit_is_found(path: Path, verify: Verify) -> None:
    """Flipped before: unless verify is off. After the first read: loading looks each time, fetching by `always`."""
    shards, late = (ShardSet.open([path.parent], verify=verify) for _ in range(2))
    assert_same(late.fetch(0), KINDS["plain"])
    flip(path, last_byte_of_prompt(path))

    cases = [(shards.fetch, verify != "off"), (shards.load, verify != "off"), (shards.fetch, verify != "off")]
    for read, found in [*cases, (late.fetch, verify == "always"), (late.load, verify != "off")]:
        if found:
            with pytest.raises(ShardError, match="a record is damaged"):
                read(0)
        else:
            assert not same_bits(read(0).prompt_embed, KINDS["plain"].prompt_embed)
    flip(path, last_byte_of_prompt(path))
    assert_same(shards.fetch(0), KINDS["plain"])  # a record that was refused is checked again


def test_with_verify_off_any_flipped_bit_gives_a_sample_of_the_right_sizes_or_an_error(path: Path) -> None:
    shard = Shard(path.with_suffix(".json"))
    (member,) = shard.index.files.values()
    header = int.from_bytes(shard.record(shard.index.samples[0])[:8], "little")
    dice = random.Random(0)

    refused = 0
    for offset in [*range(8), *dice.sample(range(8, 8 + header), 100)]:
        bit = dice.randrange(8)
        flip(path, member.offset + offset, bit)
        shards = ShardSet.open([path.parent], verify="off")
        try:
            for _ in range(2):
                sample = shards.fetch(0)
                assert_same(replace(sample, prompt=KINDS["plain"].prompt, clipped=0), KINDS["plain"])
        except ShardError:
            refused += 1
        flip(path, member.offset + offset, bit)
    assert refused > 50


# Records that their index does not describe


def publish(folder: Path, sample: Sample, record: bytes) -> ShardSet:
    """A set of one shard of one record, whatever that is; its hashes are right."""
    with ShardWriter(folder, 0, 1, RECIPE) as shard:
        shard.add(make_entry(sample, 0), record)
        shard.publish()
    return ShardSet.open([folder])


def reordered(record: bytes, order: tuple[str, ...]) -> bytes:
    """The same tensors in another order: as valid a record as the first."""
    header, about, body = split_record(record)
    contents = {name: body[slice(*entry["data_offsets"])] for name, entry in header.items()}
    at = 0
    for name in order:
        header[name]["data_offsets"] = [at, at + len(contents[name])]
        at += len(contents[name])
    return join_record(header, about, b"".join(contents[name] for name in order))


HALVES = ("control_latent", "empty_prompt_embed", "pixel_latent", "prompt_embed", "rejected_latent")
MASKS = ("loss_mask", "empty_prompt_embeds_mask", "prompt_embeds_mask")
SOMETIMES = ("loss_mask", "rejected_latent")


def test_a_record_is_written_by_type_and_name() -> None:
    for sample in KINDS.values():
        header, _, _ = split_record(encode(sample, RECIPE.digest))
        order = sorted(header, key=lambda name: (header[name]["data_offsets"], name != "empty_prompt_embed"))
        assert order == [name for name in (*HALVES, *MASKS) if name in header]


def test_the_tensors_of_a_record_are_read_in_any_order(tmp_path: Path) -> None:
    """Most of them of equal sizes, so that nothing but their place tells them apart."""
    sizes = {"target": (2, 2), "controls": ((2, 2),), "tokens": 4, "empty_tokens": 4, "shared_prefix": 0}
    sample = make_sample(0, **sizes, masked=True, paired=True)
    record = encode(sample, RECIPE.digest)

    for order in random.Random(0).sample([*permutations((*HALVES, *MASKS))], 20):
        shards = publish(tmp_path, sample, reordered(record, order))
        for read in (shards.load, shards.fetch, shards.fetch):
            assert_same(read(0), sample)
        assert list(shard_faults(Shard(tmp_path / f"{STEM}.json"))) == []


@pytest.mark.parametrize("same_sizes_as", ["a loss mask", "nothing shared", "no tail"])
def test_a_record_of_other_sizes_than_its_index_says_is_refused(tmp_path: Path, same_sizes_as: str) -> None:
    sample, other = KINDS["plain"], KINDS[same_sizes_as]
    _, about, _ = split_record(encode(other, RECIPE.digest))
    header, _, body = split_record(encode(other, RECIPE.digest))
    # Larger than either, so that the index alone has nothing to object to.
    record = join_record(header, about | {"key": sample.key, "prompt": "x" * 999}, body)
    shards = publish(tmp_path, sample, record)

    with pytest.raises(ShardError) as error:
        shards.fetch(0)
    assert sample.key in str(error.value.where)


@pytest.mark.parametrize("fast", [True, False], ids=["fast hash", "SHA-256 alone"])
@pytest.mark.parametrize("verify", VERIFY)
def test_a_tar_swapped_for_another_of_equal_size_is_named_with_key_and_offset(
    tmp_path: Path, verify: Verify, fast: bool
) -> None:
    tars = [tmp_path / f"{stem}.tar" for stem in ("00000000-00000001", "00000001-00000002")]
    samples = [make_sample(1), make_sample(2)]
    for row, sample in enumerate(samples):
        write_shard(tmp_path, [sample], start=row)
        if not fast:
            rewrite_index(tars[row].with_suffix(".json"), without_fast_hashes)
    contents = [tar.read_bytes() for tar in tars]
    for tar, content in zip(tars, contents[::-1], strict=True):
        tar.write_bytes(content)

    shards = ShardSet.open([tmp_path], verify=verify)

    for position, (tar, sample) in enumerate(zip(tars, samples, strict=True)):
        (member,) = Shard(tar.with_suffix(".json")).index.files.values()
        for read in (shards.fetch, shards.load, partial(shards.fetch, own=True), shards.fetch):
            with pytest.raises(ShardError) as error:
                read(position)
            assert str(error.value.where) == f"{tar}, {sample.key}, at {member.offset}"
            what, expected = error.value.what, error.value.expected
            if verify == "off":
                assert (what, expected) == ("the record is another sample's", sample.key)
            else:
                hashed = f"XXH3-128 {member.xxh3_128}" if fast else f"SHA-256 {member.sha256}"
                assert (what, expected) == ("a record is damaged", hashed)


@pytest.mark.parametrize("verify", VERIFY)
def test_samples_with_memory_of_their_own_equal_others_and_keep_it_as_long_as_a_tensor_of_them(
    tmp_path: Path, verify: Verify
) -> None:
    """Samples large enough for several pieces, and for memory that is used again."""
    samples = [make_sample(number, tokens=150, width=3584) for number in range(4)]
    write_shard(tmp_path, samples)
    shards = ShardSet.open([tmp_path], verify=verify)

    held = [shards.fetch(position, own=True) for position in range(3)]
    kept = held.pop().prompt_embed
    last = [shards.fetch(3, own=True) for _ in range(2)][-1]

    for sample, expected in zip([*held, last], [*samples[:2], samples[3]], strict=True):
        assert sample.own and not shards.fetch(0).own
        assert_same(replace(sample, own=False), expected)
    assert same_bits(kept, samples[2].prompt_embed)
    assert not held[0].control_latent[0].data_ptr() % ALIGNMENT
    held[0].prompt_embed.zero_()
    for again in (shards.fetch(0), shards.load(0), shards.fetch(0, own=True)):
        assert same_bits(again.prompt_embed, samples[0].prompt_embed), "nobody's write reaches another"


# Indexes that do not fit themselves


def entry(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    return lambda values: change(values["samples"][0])


def resized(name: str, by: int) -> Callable[[dict[str, Any]], object]:
    return entry(lambda one: one["tensor_bytes"].update({name: one["tensor_bytes"].get(name, 0) + by}))


def member(**values: object) -> Callable[[dict[str, Any]], object]:
    return lambda index: next(iter(index["files"].values())).update(values)


MISFITS = {
    **{
        f"{name} {by:+}": resized(name, by)
        for name in (*HALVES, *MASKS)
        for by in ((1, 23) if name in SOMETIMES else (1, -1))
    },
    **{
        f"no {name}": entry(lambda one, name=name: one["tensor_bytes"].pop(name))
        for name in (*HALVES, *MASKS)
        if name not in SOMETIMES
    },
    "a token more": entry(lambda one: one.update(tokens=10)),
    "no tokens": entry(lambda one: one.update(tokens=0)),
    "a token of the null prompt more": entry(lambda one: one.update(empty_tokens=8)),
    "no tokens of the null prompt": entry(lambda one: one.update(empty_tokens=0)),
    "a tail longer than the null prompt": resized("empty_prompt_embed", 6 * 16),
    "a prefix longer than the prompt": entry(
        lambda one: one.update(empty_tokens=12) or one["tensor_bytes"].update(empty_prompt_embeds_mask=12)
    ),
    "a wider target": entry(lambda one: one["shape"].update(target=[4, 7])),
    "a flat target": entry(lambda one: one["shape"].update(target=[0, 6])),
    "a larger control": entry(lambda one: one["shape"].update(controls=[[5, 6]])),
    "another control": entry(lambda one: one["shape"]["controls"].append([4, 6])),
    "no control": entry(lambda one: one["shape"].update(controls=[])),
    "tensors larger than the record": member(size=1000),
    "tensors as large as the record": lambda index: member(size=sum(index["samples"][0]["tensor_bytes"].values()) + 7)(
        index
    ),
    "no record": member(size=0),
    "tokens of no width": entry(
        lambda one: one["tensor_bytes"].update(prompt_embed=0, empty_prompt_embed=0) or one.update(empty_tokens=7)
    ),
    "huge": entry(lambda one: one.update(tokens=2**61) or one["tensor_bytes"].update(prompt_embeds_mask=2**61)),
}


@pytest.mark.parametrize("change", MISFITS.values(), ids=MISFITS)
def test_an_index_whose_sizes_do_not_fit_each_other_is_refused_when_it_is_opened(
    path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    rewrite_index(path.with_suffix(".json"), change)
    Shard(path.with_suffix(".json"))

    for open_it in (lambda: ShardSet.open([path.parent]), lambda: compact_folder(LocalFolder(path.parent))):
        with pytest.raises(ShardError, match="sizes that do not fit each other") as error:
            open_it()
        assert str(error.value.where) == f"{path}, {KINDS['plain'].key}"


@pytest.mark.parametrize(("name", "length"), [("sha256", 64), ("xxh3_128", 32)])
@pytest.mark.parametrize("change", [(0, ""), (-1, "0"), (1, "0"), (0, "g"), (0, "A"), (0, "0x0")], ids=str)
def test_an_index_with_something_else_than_a_hash_is_refused_when_it_is_opened(
    path: Path, name: str, length: int, change: tuple[int, str]
) -> None:
    more, begin = change
    digest = begin.ljust(length + more, "0") if begin else ""
    rewrite_index(path.with_suffix(".json"), member(**{name: digest}))

    with pytest.raises(ShardError, match="a malformed hash") as error:
        ShardSet.open([path.parent])
    assert str(error.value.where) == str(path)


def test_sizes_that_fit_each_other_but_not_the_record_are_refused_when_it_is_read(path: Path) -> None:
    """Another tail and prefix, or prompt and width: only the record tells."""
    for change in (
        resized("empty_prompt_embed", 16),
        entry(lambda one: one["tensor_bytes"].update(prompt_embed=72, empty_prompt_embed=16)),
    ):
        text = path.with_suffix(".json").read_text(encoding="utf-8")
        rewrite_index(path.with_suffix(".json"), change)
        shards = ShardSet.open([path.parent])
        with pytest.raises(ShardError, match="other sizes than the index"):
            shards.fetch(0)
        path.with_suffix(".json").write_text(text, encoding="utf-8")


# Several shards

LETTERS = {letter: make_sample(ord(letter)) for letter in "abcdef"}
LAYOUTS = {
    "one shard": (["a", "b", "c"],),
    "several shards": (["a"], ["b", "c"], ["d"]),
    "skipped rows": (["-", "a"], ["b", "-", "c"], ["-"]),
    "skipped shards everywhere": (["-"], ["-", "-"], ["a"], ["-"], ["b", "-"], ["-"], ["c"], ["-"]),
    "equal rows": (["a", "a"], ["b", "a"], ["a"]),
    "variants": (["abc", "d", "ef"],),
    "variants of several shards": (["ab", "c"], ["--", "-"], ["a", "bcd"], ["-e"]),
    "equal variants": (["aa", "ba", "ab"],),
}
"""Shards, each of rows, each spelled as its variants; "-" is a variant that is skipped."""


def spell(folder: Path, *shards: list[str], source: str = "") -> list[tuple[int, int, str]]:
    """Write them. Gives row, variant and letter of each."""
    start, spelled = 0, []
    for rows in shards:
        write_variants(folder, [[LETTERS.get(one) for one in row] for row in rows], start=start, source=source)
        spelled += [(start + n, variant, one) for n, row in enumerate(rows) for variant, one in enumerate(row)]
        start += len(rows)
    return spelled


def rows_of(shards: ShardSet) -> list[int]:
    return shards.columns.numbers.tolist()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_positions_lead_to_the_samples_in_the_order_of_rows_and_variants(
    tmp_path: Path, layout: tuple[list[str], ...]
) -> None:
    spelled = spell(tmp_path, *layout)

    shards = ShardSet.open([tmp_path])

    there = [one for one in spelled if one[2] != "-"]
    expected = [LETTERS[letter] for _, _, letter in there]
    assert shards.keys == [sample.key for sample in expected]
    assert [shards.columns.shape_names[number] for number in shards.columns.shapes] == [one.shape for one in expected]
    assert bytes(shards.digests.reshape(-1)).hex() == "".join(shards.keys)
    assert [(entry.row, entry.variant) for entry in shards.entries] == [one[:2] for one in there]
    gone = [replace(make_skipped(row), variant=variant) for row, variant, letter in spelled if letter == "-"]
    assert (shards.skipped, shards.recipe) == (gone, RECIPE)
    firsts: dict[int, int] = {}
    assert rows_of(shards) == [firsts.setdefault(row, len(firsts)) for row, _, _ in there], "one number a row"
    for position, sample in enumerate(expected):
        assert_same(shards.load(position), sample)
    with pytest.raises(IndexError):
        shards.load(len(expected))


def test_folders_and_buckets_are_sources_of_their_own_in_the_order_in_which_they_are_named(
    tmp_path: Path, s3: S3
) -> None:
    for name in ("one", "two"):
        spell(tmp_path / name, ["ab", "c"], source=name)
    for path in (tmp_path / "one").iterdir():
        open_folder(f"{s3.url}/copies").upload(path.name, path)

    shards = ShardSet.open([tmp_path / "two", f"{tmp_path}/one/*.tar", f"{s3.url}/copies/*.tar"])

    assert rows_of(shards) == [0, 0, 1, 2, 2, 3, 4, 4, 5]
    assert [entry.source for entry in shards.entries] == ["two"] * 3 + ["one"] * 6
    write_shard(tmp_path / "three", [LETTERS["a"]])
    write_shard(tmp_path / "four", [LETTERS["a"]])
    assert rows_of(ShardSet.open([tmp_path / "three", tmp_path / "four"])) == [0, 1], "rows of one number, side by side"


@pytest.mark.parametrize("layout", [(), (["-", "-"], ["-"])], ids=["none", "skipped rows alone"])
def test_shards_without_any_sample_are_refused(tmp_path: Path, layout: tuple[list[str], ...]) -> None:
    spell(tmp_path, *layout)

    with pytest.raises(ShardError, match="the shards hold no samples"):
        ShardSet.open([tmp_path]) if layout else ShardSet([])


RECIPES = [
    ({"areas_px": (512 * 512,)}, "areas_px: (1048576,) here, (262144,) there"),
    ({"vae": "f" * 64}, "vae: aaaaaaaaaaaa… here, ffffffffffff… there"),
    ({"text_area_px": None}, "text_area_px: 147456 here, None there"),
    (
        {"areas_px": (4096,), "background": "#000000"},
        "areas_px: (1048576,) here, (4096,) there; background: #ffffff here, #000000 there",
    ),
]


@pytest.mark.parametrize(("changes", "said"), RECIPES)
def test_shards_of_two_recipes_are_refused_by_the_fields_that_differ(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    other = make_recipe(**changes)
    write_shard(tmp_path, [LETTERS["a"]])
    write_shard(tmp_path, [make_sample(1, recipe=other)], start=1, recipe=other)

    with pytest.raises(RecipeMismatchError) as error:
        ShardSet.open([tmp_path])

    assert error.value.what == f"the shards have another recipe: {said}"
    assert (error.value.expected, error.value.found) == (f"recipe {RECIPE.digest}", f"recipe {other.digest}")
    assert str(error.value.where) == str(tmp_path / "00000001-00000002.tar")
    assert error.value.exit_code == 2 and str(tmp_path / "00000000-00000001.tar") in str(error.value.hint)


@pytest.mark.parametrize(
    ("rows", "overlaps", "found"),
    [((2, 6), True, "rows [2, 3)"), ((0, 4), True, "rows [0, 3)"), ((1, 2), True, "rows [1, 3)"), ((3, 4), False, "")],
    ids=str,
)
@pytest.mark.parametrize("samples", [True, False], ids=["samples", "skipped rows"])
def test_shards_that_hold_the_same_rows_of_one_folder_are_refused(
    tmp_path: Path, s3: S3, rows: tuple[int, int], overlaps: bool, found: str, samples: bool
) -> None:
    write_shard(tmp_path, [LETTERS["a"]] * 3)
    plant_shard(tmp_path, [LETTERS["a"] if samples else None] * (rows[1] - rows[0]), start=rows[0])
    for path in tmp_path.iterdir():
        open_folder(s3.url).upload(path.name, path)

    for place in (tmp_path, s3.url):
        if not overlaps:
            shards = [Shard(path) for path in sorted(tmp_path.glob("*.json"))]
            require_disjoint([(shard.file, shard.index.rows) for shard in shards][::-1])
            assert len(ShardSet.open([place])) == (4 if samples else 3)
            continue
        with pytest.raises(ShardError, match="two shards hold the same rows") as error:
            ShardSet.open([place])
        assert str(error.value.found).startswith(found)
