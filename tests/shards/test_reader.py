"""Reading one shard back, from wherever it lies: the right samples, on disks without copies; all damage is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qie.errors import QieError, ShardError
from qie.shards.index import Member, member_name
from qie.shards.reader import Shard
from qie.shards.record import encode
from qie.shards.shard_set import ShardSet
from qie.shards.writer import ShardWriter
from qie.stores import File, Folder, LocalFolder, MissingError, StoreError, open_folder
from qie.stores.objects import ObjectFolder
from tests.builders import (
    RECIPE,
    assert_same,
    make_entry,
    make_sample,
    rewrite_index,
    write_shard,
)
from tests.s3 import S3

STEM = "00000000-00000003"
SAMPLES = [make_sample(0), make_sample(1, controls=((2, 3), (4, 6)), masked=True), make_sample(2)]
RECORDS = [encode(sample, RECIPE.digest) for sample in SAMPLES]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The index of a fresh shard of SAMPLES, for tests to damage."""
    write_shard(tmp_path, SAMPLES)
    return tmp_path / f"{STEM}.json"


@pytest.fixture(params=["disk", "bucket"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """A folder with such a shard."""
    place = tmp_path if request.param == "disk" else f"{request.getfixturevalue('s3').url}/shards"
    write_shard(place, SAMPLES)
    return open_folder(place)


def opened(folder: Folder) -> Shard:
    return Shard(File(folder, f"{STEM}.json"))


def damage(folder: Folder, change: Callable[[bytearray], object]) -> None:
    content = bytearray(folder.read(f"{STEM}.tar"))
    change(content)
    folder.write(f"{STEM}.tar", bytes(content))


def member_of(shard: Shard, row: int) -> Member:
    return shard.index.files[member_name(shard.index.samples[row].key)]


def test_a_shard_gives_back_its_samples_and_records(folder: Folder) -> None:
    shard = opened(folder)

    for entry, sample, record in zip(shard.index.samples, SAMPLES, RECORDS, strict=True):
        assert_same(shard.load(entry), sample)
        assert shard.record(entry) == shard.verified_record(entry) == record
    shard.load(shard.index.samples[0]).pixel_latent.zero_()
    if shard.file.path is None:  # a copy of its own
        assert_same(shard.load(shard.index.samples[0]), SAMPLES[0])


@pytest.mark.parametrize("kind", [str, Path, File.at, "file://{}".format], ids=["path", "Path", "File", "URL"])
def test_a_shard_is_opened_by_a_path_a_file_or_a_url_and_no_byte_of_its_tar_is_read(
    path: Path, kind: Callable[[Path], Any]
) -> None:
    tar = path.with_suffix(".tar")
    content = tar.read_bytes()
    tar.write_bytes(bytes(len(content)))
    shard = Shard(kind(path))
    tar.write_bytes(content)

    assert shard.file.path == tar
    assert_same(shard.load(shard.index.samples[1]), SAMPLES[1])


def test_loaded_tensors_lie_in_the_mapped_file_outlive_it_and_writing_to_them_does_not_reach_it(path: Path) -> None:
    before = path.with_suffix(".tar").read_bytes()
    shard = Shard(path)
    record = torch.frombuffer(shard.record(shard.index.samples[1]), dtype=torch.uint8)

    sample, other = shard.load(shard.index.samples[1]), shard.load(shard.index.samples[0])

    for view in (sample.pixel_latent, *sample.control_latent, sample.prompt_embed):
        assert record.data_ptr() < view.data_ptr() < record.data_ptr() + len(record)
    sample.pixel_latent.zero_()
    assert path.with_suffix(".tar").read_bytes() == before
    path.with_suffix(".tar").unlink()
    del shard
    assert_same(other, SAMPLES[0])


def test_a_shard_that_is_kept_open_outlives_its_tar(path: Path) -> None:
    shard = Shard(path)
    shard.tar.keep_open()
    write_shard(path.parent, SAMPLES[::-1])
    path.with_suffix(".tar").unlink()

    assert_same(shard.load(shard.index.samples[0]), SAMPLES[0])
    assert shard.verified_record(shard.index.samples[1]) == RECORDS[1]


# Damage


def test_a_missing_tar_or_index_is_refused(folder: Folder) -> None:
    tar = File(folder, f"{STEM}.tar")
    folder.delete(tar.name)
    for there in ("nothing", "a folder"):
        if there == "a folder" and tar.path is not None:
            tar.path.mkdir()
        with pytest.raises(ShardError, match="the shard is missing") as error:
            opened(folder)
        assert str(error.value.where) == str(tar)

    folder.delete(f"{STEM}.json")
    with pytest.raises(ShardError, match="the index cannot be read") as error:
        opened(folder)
    assert str(error.value.where) == str(tar.with_suffix(".json"))


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_shard_that_is_replaced_while_it_is_opened_is_the_new_one_or_none_and_not_a_damaged_one(
    path: Path, monkeypatch: pytest.MonkeyPatch, is_complete: bool
) -> None:
    """Its index is read, and then the writer is faster."""
    size = LocalFolder.size
    newer = path.with_name("newer") / path.name
    write_shard(newer.parent, [make_sample(3), None, None])

    def replaces(self: LocalFolder, name: str) -> int | None:
        if name.endswith(".tar") and newer.with_suffix(".tar").exists():
            path.unlink()
            newer.with_suffix(".tar").replace(path.with_suffix(".tar"))
            if is_complete:
                newer.replace(path)
        return size(self, name)

    monkeypatch.setattr(LocalFolder, "size", replaces)
    found = Shard.published(File.at(path))
    assert [len(shard.index.samples) for shard in [found] if shard] == ([1] if is_complete else [])


@pytest.mark.parametrize("size", [0, -1, 10**6])
def test_a_tar_of_another_size_is_refused(folder: Folder, size: int) -> None:
    full = opened(folder).index.filesize
    size = size if size >= 0 else full - 1
    damage(folder, lambda content: content.__setitem__(slice(None), (content + bytes(10**6))[:size]))

    with pytest.raises(ShardError, match="the shard is cut short or is not the one its index describes") as error:
        opened(folder)
    assert (error.value.expected, error.value.found) == (f"{full} bytes", f"{size} bytes")


def test_a_tar_that_is_cut_after_opening_is_an_error_and_never_fewer_bytes(folder: Folder) -> None:
    shard = opened(folder)
    damage(folder, lambda content: content.__delitem__(slice(600, None)))

    for entry in shard.index.samples:
        with pytest.raises(QieError) as error:
            shard.load(entry)
        assert isinstance(error.value, ShardError) or "a file is too short" in error.value.what
    if shard.file.path is None:
        folder.delete(f"{STEM}.tar")
        with pytest.raises(MissingError):
            shard.load(shard.index.samples[2])


def test_a_flipped_bit_is_found_by_verified_record(folder: Folder) -> None:
    shard = opened(folder)
    member = member_of(shard, 1)

    def flip_two(content: bytearray) -> None:
        content[0] ^= 1
        content[member.offset + member.size // 2] ^= 1

    damage(folder, flip_two)

    with pytest.raises(ShardError, match="a record is damaged") as error:
        shard.verified_record(shard.index.samples[1])
    assert str(error.value.where) == f"{shard.file}, {SAMPLES[1].key}"
    assert shard.verified_record(shard.index.samples[0]) == RECORDS[0]


def test_records_that_are_not_what_their_entries_say_are_refused(path: Path) -> None:
    one, other = (member_name(SAMPLES[row].key) for row in (0, 2))

    def swap(values: dict[str, Any]) -> None:
        values["files"][one], values["files"][other] = values["files"][other], values["files"][one]
        values["samples"][1]["shape"].update(target=[6, 4])

    rewrite_index(path, swap)
    shard = Shard(path)

    with pytest.raises(ShardError, match="the record is another sample's") as error:
        shard.load(shard.index.samples[0])
    assert (error.value.expected, error.value.found) == (SAMPLES[0].key, SAMPLES[2].key)
    with pytest.raises(ShardError, match="the record has other sizes than the index"):
        shard.load(shard.index.samples[1])
    with ShardWriter(path.parent, 3, 4, RECIPE) as writer:
        writer.add(make_entry(SAMPLES[0], 3), b"no record")
        writer.publish()
    shard = Shard(path.with_name("00000003-00000004.json"))
    with pytest.raises(ShardError, match="the header is longer than the record") as error:
        shard.load(shard.index.samples[0])
    assert str(error.value.where) == f"{shard.file}, {SAMPLES[0].key}"


# In a bucket alone


def test_loading_from_a_bucket_reads_one_record_and_nothing_else(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shard(s3.url, SAMPLES)
    shard = Shard(f"{s3.url}/{STEM}.json")
    member = member_of(shard, 2)
    asked: list[tuple[str, int, int | None]] = []
    read = ObjectFolder.read

    def counted(self: ObjectFolder, name: str, start: int = 0, stop: int | None = None, **bounds: Any) -> bytes:
        asked.append((name, start, stop))
        return read(self, name, start, stop, **bounds)

    monkeypatch.setattr(ObjectFolder, "read", counted)
    shard.tar.keep_open()
    assert asked == []
    assert_same(shard.load(shard.index.samples[2]), SAMPLES[2])

    assert asked == [(f"{STEM}.tar", member.offset, member.offset + member.size)]


def test_a_store_that_fails_is_named_and_not_called_damage(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shard(s3.url, SAMPLES)
    shards = ShardSet.open([s3.url])

    def refuse(self: ObjectFolder, *_: object, **bounds: object) -> bytes:
        raise StoreError("the store denies access", where=self.url)

    monkeypatch.setattr(ObjectFolder, "read", refuse)
    with pytest.raises(StoreError, match="denies access"):
        shards.load(0)
