"""Records by position: what is fetched for training is what is loaded; what does not fit its index is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from qie.errors import ShardError
from qie.shards.index import member_name
from qie.shards.reader import Shard
from qie.shards.record import encode
from qie.shards.shard_set import ShardSet, Verify, compacted
from qie.shards.verify import shard_faults
from qie.shards.writer import ShardWriter
from qie.stores import LocalFolder, open_folder
from qie.types import Sample
from tests.builders import (
    RECIPE,
    assert_same,
    join_record,
    make_entry,
    make_sample,
    mutated_json,
    rewrite_index,
    same_bits,
    split_record,
    without_own_hash,
    write_shard,
)
from tests.s3 import S3

STEM = "00000000-00000001"
KINDS = {
    "plain": make_sample(0),
    "several controls": make_sample(1, controls=((2, 3), (4, 6), (5, 1))),
    "controls of one size": make_sample(2, controls=((4, 6), (4, 6))),
    "a loss mask": make_sample(3, masked=True),
    "controls and a loss mask": make_sample(4, target=(3, 5), controls=((1, 1), (3, 5)), masked=True),
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


def assert_for_training(found: Sample, expected: Sample) -> None:
    """That all tensors and the key are the same, bit for bit; what training does not read may be missing."""
    for field in fields(Sample):
        mine, theirs = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(theirs, tuple):
            assert len(mine) == len(theirs) and all(map(same_bits, mine, theirs)), field.name
        elif isinstance(theirs, torch.Tensor):
            assert same_bits(mine, theirs), field.name
        elif field.name not in ("prompt", "clipped"):
            assert mine == theirs, field.name
    assert found.shape == expected.shape
    assert same_bits(found.empty_prompt_embed, expected.empty_prompt_embed)


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
def test_what_is_fetched_for_training_is_what_is_loaded_bit_for_bit(folder: Path, verify: Verify) -> None:
    shards = ShardSet.open([folder], verify=verify)

    for position, sample in enumerate(KINDS.values()):
        for _ in range(3):
            assert_for_training(shards.fetch(position), sample)
        assert_same(shards.load(position), sample)


def test_samples_are_fetched_in_any_order(folder: Path) -> None:
    shards, samples = ShardSet.open([folder]), list(KINDS.values())
    dice = random.Random(0)

    for position in dice.choices(range(len(samples)), k=60):
        assert_for_training(shards.fetch(position), samples[position])


def test_from_a_bucket_the_same_is_fetched(folder: Path, s3: S3) -> None:
    remote = open_folder(f"{s3.url}/shards")
    for path in folder.iterdir():
        remote.upload(path.name, path)
    shards = ShardSet.open([remote.url])

    for position, sample in enumerate(KINDS.values()):
        for _ in range(2):
            assert_for_training(shards.fetch(position), sample)


def test_what_a_smaller_set_has_checked_is_not_checked_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = ShardSet.open([folder]), ShardSet.open([folder])
    before.fetch(3)
    after.trust(before)
    monkeypatch.setattr("qie.shards.shard_set.hashlib", None)
    after.fetch(3)
    with pytest.raises(AttributeError, match="sha256"):
        after.fetch(2)


def test_fetched_tensors_lie_in_the_mapped_file_and_writing_to_them_does_not_reach_it(path: Path) -> None:
    before = path.read_bytes()
    shards = ShardSet.open([path.parent])

    for _ in range(2):
        shards.fetch(0).pixel_latent.zero_()

    assert path.read_bytes() == before


def test_a_fetched_sample_outlives_its_shards(path: Path) -> None:
    shards = ShardSet.open([path.parent])
    shards.fetch(0)
    sample = shards.fetch(0)
    path.unlink()
    del shards

    assert_for_training(sample, KINDS["plain"])


def test_the_only_rows_of_two_folders_are_two_rows(tmp_path: Path) -> None:
    """Both have number 0, and stand side by side."""
    for name in ("one", "two"):
        write_shard(tmp_path / name, [KINDS["plain"]])

    assert ShardSet.open([tmp_path / "one", tmp_path / "two"]).columns.rows.tolist() == [0, 1]


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


@pytest.mark.parametrize(("verify", "found"), [("off", False), ("first", True), ("always", True)])
def test_a_bit_that_was_flipped_before_is_found_unless_verify_is_off(path: Path, verify: Verify, found: bool) -> None:
    flip(path, last_byte_of_prompt(path))
    shards = ShardSet.open([path.parent], verify=verify)

    for read in (shards.fetch, shards.load, shards.fetch):
        if found:
            with pytest.raises(ShardError, match="a record is damaged"):
                read(0)
        else:
            assert not same_bits(read(0).prompt_embed, KINDS["plain"].prompt_embed)


@pytest.mark.parametrize(("verify", "found"), [("off", False), ("first", False), ("always", True)])
def test_a_bit_that_is_flipped_between_two_fetches_is_found_only_by_always(
    path: Path, verify: Verify, found: bool
) -> None:
    shards = ShardSet.open([path.parent], verify=verify)
    assert_for_training(shards.fetch(0), KINDS["plain"])
    flip(path, last_byte_of_prompt(path))

    if found:
        with pytest.raises(ShardError, match="a record is damaged"):
            shards.fetch(0)
    else:
        assert not same_bits(shards.fetch(0).prompt_embed, KINDS["plain"].prompt_embed)


@pytest.mark.parametrize(("verify", "found"), [("off", False), ("first", True), ("always", True)])
def test_loading_checks_the_hash_each_time_unless_verify_is_off(path: Path, verify: Verify, found: bool) -> None:
    shards = ShardSet.open([path.parent], verify=verify)
    shards.load(0)
    flip(path, last_byte_of_prompt(path))

    if found:
        with pytest.raises(ShardError, match="a record is damaged"):
            shards.load(0)
    else:
        shards.load(0)


@pytest.mark.parametrize("verify", VERIFY)
def test_a_damaged_header_is_found_when_first_read_in_any_case(path: Path, verify: Verify) -> None:
    shard = Shard(path.with_suffix(".json"))
    (member,) = shard.index.files.values()
    flip(path, member.offset + 8, bit=1)  # the first brace of the header
    shards = ShardSet.open([path.parent], verify=verify)

    with pytest.raises(ShardError):
        shards.fetch(0)


def test_any_flipped_bit_of_a_record_is_found(path: Path) -> None:
    shard = Shard(path.with_suffix(".json"))
    (member,) = shard.index.files.values()
    dice = random.Random(0)

    for offset in dice.sample(range(member.offset, member.offset + member.size), 60):
        bit = dice.randrange(8)
        flip(path, offset, bit)
        for verify in ("first", "always"):
            with pytest.raises(ShardError, match="a record is damaged"):
                ShardSet.open([path.parent], verify=verify).fetch(0)
        flip(path, offset, bit)
    assert_for_training(ShardSet.open([path.parent]).fetch(0), KINDS["plain"])


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
            assert_for_training(shards.fetch(0), KINDS["plain"])
            assert_for_training(shards.fetch(0), KINDS["plain"])
        except ShardError:
            refused += 1
        flip(path, member.offset + offset, bit)
    assert refused > 50


def test_a_record_that_was_refused_is_checked_again(path: Path) -> None:
    """A first read that failed was none."""
    flip(path, last_byte_of_prompt(path))
    shards = ShardSet.open([path.parent])
    for _ in range(3):
        with pytest.raises(ShardError, match="a record is damaged"):
            shards.fetch(0)

    flip(path, last_byte_of_prompt(path))

    assert_for_training(shards.fetch(0), KINDS["plain"])


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


HALVES = ("control_latent", "empty_prompt_embed", "pixel_latent", "prompt_embed")
MASKS = ("loss_mask", "empty_prompt_embeds_mask", "prompt_embeds_mask")


def test_a_record_is_written_by_type_and_name() -> None:
    for sample in KINDS.values():
        header, _, _ = split_record(encode(sample, RECIPE.digest))
        order = sorted(header, key=lambda name: (header[name]["data_offsets"], name != "empty_prompt_embed"))
        assert order == [name for name in (*HALVES, *MASKS) if name in header]


def test_the_tensors_of_a_record_are_read_in_any_order(tmp_path: Path) -> None:
    """Most of them of equal sizes, so that nothing but their place tells them apart."""
    sample = make_sample(0, target=(2, 2), controls=((2, 2),), tokens=4, empty_tokens=4, shared_prefix=0, masked=True)
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


def test_an_error_names_shard_key_and_offset(tmp_path: Path) -> None:
    samples = [make_sample(seed) for seed in range(3)]
    write_shard(tmp_path, samples)
    tar = tmp_path / "00000000-00000003.tar"
    member = Shard(tar.with_suffix(".json")).index.files[member_name(samples[1].key)]
    flip(tar, member.offset + member.size - 1)

    with pytest.raises(ShardError, match="a record is damaged") as error:
        ShardSet.open([tmp_path]).fetch(1)

    assert str(error.value.where) == f"{tar}, {samples[1].key}, at {member.offset}"
    assert error.value.expected == f"SHA-256 {member.sha256}"


@pytest.mark.parametrize("verify", VERIFY)
def test_a_tar_swapped_for_another_of_equal_size_is_named(tmp_path: Path, verify: Verify) -> None:
    one, other = tmp_path / "00000000-00000001.tar", tmp_path / "00000001-00000002.tar"
    write_shard(tmp_path, [make_sample(1)])
    write_shard(tmp_path, [make_sample(2)], start=1)
    assert one.stat().st_size == other.stat().st_size
    contents = one.read_bytes(), other.read_bytes()
    one.write_bytes(contents[1])
    other.write_bytes(contents[0])

    shards = ShardSet.open([tmp_path], verify=verify)

    for position, tar in enumerate((one, other)):
        for read in (shards.fetch, shards.load, shards.fetch):
            with pytest.raises(
                ShardError, match="another sample's" if verify == "off" else "a record is damaged"
            ) as error:
                read(position)
            assert str(error.value.where).startswith(f"{tar}, {make_sample(position + 1).key}, at ")


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
        for by in ((1, -1) if name != "loss_mask" else (1, 23))
    },
    **{
        f"no {name}": entry(lambda one, name=name: one["tensor_bytes"].pop(name))
        for name in (*HALVES, "prompt_embeds_mask", "empty_prompt_embeds_mask")
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

    for open_it in (lambda: ShardSet.open([path.parent]), lambda: compacted(LocalFolder(path.parent))):
        with pytest.raises(ShardError, match="sizes that do not fit each other") as error:
            open_it()
        assert str(error.value.where) == f"{path}, {KINDS['plain'].key}"


@pytest.mark.parametrize("digest", ["", "0" * 63, "0" * 65, "g" * 64, "A" * 64, "0x" + "0" * 62])
def test_an_index_with_something_else_than_a_hash_is_refused_when_it_is_opened(path: Path, digest: str) -> None:
    rewrite_index(path.with_suffix(".json"), member(sha256=digest))

    with pytest.raises(ShardError, match="something else than a hash") as error:
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


def test_whatever_an_index_says_the_sample_or_a_shard_error_comes(path: Path) -> None:
    dice = random.Random(0)
    index = path.with_suffix(".json")
    text = without_own_hash(index.read_text(encoding="utf-8"))

    outcomes = set()
    for _ in range(200):
        index.write_text(mutated_json(text, dice), encoding="utf-8")
        try:
            shards = ShardSet.open([path.parent])
            for read in (shards.fetch, shards.fetch, shards.load):
                assert_for_training(read(0), KINDS["plain"])
                outcomes.add("sample")
        except ShardError:
            outcomes.add("error")

    assert outcomes == {"sample", "error"}
