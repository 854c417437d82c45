"""The writer: exact bytes, and a shard is complete or not there, whatever happens to whom."""

from __future__ import annotations

import errno
import fcntl
import gc
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest
from safetensors.torch import load

from qie.errors import QieError, ShardError, UsageError
from qie.shards import writer
from qie.shards.index import ShardIndex, member_name, read_index
from qie.shards.reader import Shard
from qie.shards.record import encode
from qie.shards.shard_set import ShardSet
from qie.shards.storage import published
from qie.shards.verify import shard_faults
from qie.shards.writer import ShardBusyError, ShardOverlapError, ShardWriter, remove_abandoned
from qie.stores import LocalFolder, StoreError, open_folder
from qie.stores.objects import ObjectFolder
from tests.builders import (
    RECIPE,
    ROOT,
    assert_same,
    make_entry,
    make_sample,
    make_skipped,
    same_bits,
    write_shard,
    write_variants,
)
from tests.s3 import S3
from tests.stores.fake_hub import FakeHub

STEM = "00000000-00000003"
SAMPLES = [make_sample(0), make_sample(1, controls=((2, 3), (4, 6)), masked=True), make_sample(2, tokens=11)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def add(shard: ShardWriter, *rows: int) -> None:
    for row in rows:
        shard.add(make_entry(SAMPLES[row], row), encode(SAMPLES[row], RECIPE.digest))


# The published bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one shard of SAMPLES. Tests only read it."""
    folder = tmp_path_factory.mktemp("published")
    write_shard(folder, SAMPLES)
    return folder


@pytest.fixture(scope="module")
def tar(folder: Path) -> Path:
    return folder / f"{STEM}.tar"


@pytest.fixture(scope="module")
def index(folder: Path) -> ShardIndex:
    return read_index(folder / f"{STEM}.json")


def test_a_shard_is_two_files(folder: Path) -> None:
    assert names(folder) == [f"{STEM}.json", f"{STEM}.tar"]


def test_publishing_returns_the_index_that_it_wrote(tmp_path: Path) -> None:
    assert write_shard(tmp_path, SAMPLES) == read_index(tmp_path / f"{STEM}.json")


def test_tarfile_reads_the_records(tar: Path) -> None:
    with tarfile.open(tar, "r:") as opened:
        records = {member.name: opened.extractfile(member).read() for member in opened}  # type: ignore[union-attr]

    assert records == {member_name(sample.key): encode(sample, RECIPE.digest) for sample in SAMPLES}


@pytest.mark.skipif(shutil.which("tar") is None, reason="no tar program")
def test_the_tar_program_lists_the_records(tar: Path, index: ShardIndex) -> None:
    listing = subprocess.run(
        ["tar", "tvf", tar], check=True, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C", "TZ": "UTC"}
    )

    assert listing.stderr == ""
    lines = [line.split() for line in listing.stdout.splitlines()]
    assert [line[-1] for line in lines] == [member_name(sample.key) for sample in SAMPLES]
    assert {line[0] for line in lines} == {"-rw-r--r--"}
    assert all(str(index.files[line[-1]].size) in line for line in lines)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # webdataset leaves that to the collector
def test_webdataset_reads_the_records(tar: Path) -> None:
    webdataset = pytest.importorskip("webdataset")

    found = [(item["__key__"], item["safetensors"]) for item in webdataset.WebDataset(str(tar), shardshuffle=False)]

    assert found == [(sample.key, encode(sample, RECIPE.digest)) for sample in SAMPLES]


def test_safetensors_reads_a_member(tar: Path) -> None:
    with tarfile.open(tar, "r:") as opened:
        tensors = load(opened.extractfile(member_name(SAMPLES[1].key)).read())  # type: ignore[union-attr]

    assert same_bits(tensors["pixel_latent"], SAMPLES[1].pixel_latent)
    assert same_bits(tensors["loss_mask"], SAMPLES[1].loss_mask)


def test_the_headers_carry_neither_time_nor_owner(tar: Path) -> None:
    with tarfile.open(tar, "r:") as opened:
        members = opened.getmembers()
        assert opened.pax_headers == {}

    for member in members:
        assert (type(member.mtime), member.mtime) == (int, 0)
        assert (member.uid, member.gid, member.uname, member.gname, member.mode) == (0, 0, "", "", 0o644)
        assert member.pax_headers == {}


def test_every_member_is_one_ustar_block_and_its_padded_payload(tar: Path) -> None:
    content, at, found = tar.read_bytes(), 0, []
    while content[at] != 0:
        header = content[at : at + 512]
        size = int(header[124:136].rstrip(b"\0 "), 8)
        found.append(header[:100].rstrip(b"\0").decode())
        assert header[257:265] == b"ustar\x0000"
        assert header[156:157] == b"0", "a regular file, not an extended header"
        assert header[136:148] == b"00000000000\x00", "mtime"
        assert header[108:124] == b"0000000\x000000000\x00", "owner and group"
        assert header[265:329] == b"\x00" * 64, "names of owner and group"
        padded = -(-size // 512) * 512
        assert not any(content[at + 512 + size : at + 512 + padded])
        at += 512 + padded

    assert found == [member_name(sample.key) for sample in SAMPLES]
    assert not any(content[at:])
    assert len(content) - at >= 1024
    assert len(content) % 10240 == 0


def test_the_offsets_lead_to_the_payloads(tar: Path, index: ShardIndex) -> None:
    content = tar.read_bytes()

    for sample in SAMPLES:
        member = index.files[member_name(sample.key)]
        payload = content[member.offset : member.offset + member.size]
        assert payload == encode(sample, RECIPE.digest)
        assert member.sha256 == hashlib.sha256(payload).hexdigest()


def test_the_index_gives_size_and_hash_of_the_tar(tar: Path, index: ShardIndex) -> None:
    content = tar.read_bytes()

    assert index.filesize == len(content)
    assert index.sha256 == hashlib.sha256(content).hexdigest()


def test_the_index_file_is_canonical_json_and_a_newline(tar: Path) -> None:
    text = tar.with_suffix(".json").read_text(encoding="utf-8")

    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n"


def test_equal_rows_give_equal_files(folder: Path, tmp_path: Path) -> None:
    write_shard(tmp_path, SAMPLES)

    assert names(tmp_path) == names(folder)
    for name in names(folder):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_the_recipe_of_the_index_is_the_writers(index: ShardIndex) -> None:
    assert index.recipe == RECIPE


def test_rows_of_equal_content_share_one_record(tmp_path: Path) -> None:
    index = write_shard(tmp_path, [SAMPLES[0], SAMPLES[1], SAMPLES[0]])

    with tarfile.open(tmp_path / f"{STEM}.tar", "r:") as opened:
        assert opened.getnames() == [member_name(SAMPLES[0].key), member_name(SAMPLES[1].key)]
    assert [entry.row for entry in index.samples] == [0, 1, 2]
    assert index.samples[0].key == index.samples[2].key
    shard = Shard(tmp_path / f"{STEM}.json")
    assert_same(shard.load(index.samples[2]), SAMPLES[0])


def test_samples_are_listed_by_row_in_whatever_order_they_came(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, 0, 5, RECIPE) as shard:
        shard.skip(make_skipped(4))
        add(shard, 2, 0)
        shard.skip(make_skipped(3))
        add(shard, 1)
        index = shard.publish()

    assert [entry.row for entry in index.samples] == [0, 1, 2]
    assert [gone.row for gone in index.skipped] == [3, 4]
    assert list(shard_faults(Shard(tmp_path / "00000000-00000005.json"))) == []


def test_a_shard_whose_rows_are_all_skipped_is_a_shard(tmp_path: Path) -> None:
    index = write_shard(tmp_path, [None, None])

    shard = Shard(tmp_path / "00000000-00000002.json")
    assert [gone.row for gone in shard.index.skipped] == [0, 1]
    assert index.filesize == 10240
    assert list(shard_faults(shard)) == []
    with tarfile.open(tmp_path / "00000000-00000002.tar", "r:") as opened:
        assert opened.getnames() == []


def test_a_record_that_fills_its_blocks_gets_no_padding(tmp_path: Path) -> None:
    record = bytes(range(256)) * 4
    with ShardWriter(tmp_path, 0, 3, RECIPE) as shard:
        for row, sample in enumerate(SAMPLES):
            shard.add(make_entry(sample, row), record)
        index = shard.publish()

    assert [member.offset for member in index.files.values()] == [512, 2048, 3584]
    content = (tmp_path / f"{STEM}.tar").read_bytes()
    assert all(content[member.offset :][:1024] == record for member in index.files.values())


def test_the_folder_is_made_if_need_be(tmp_path: Path) -> None:
    write_shard(tmp_path / "not" / "there" / "yet", SAMPLES)

    assert names(tmp_path / "not" / "there" / "yet") == [f"{STEM}.json", f"{STEM}.tar"]


# Complete or not there


def test_nothing_is_visible_before_it_is_published(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, 0, 3, RECIPE) as shard:
        add(shard, 0, 1, 2)
        assert names(tmp_path) == [f"{STEM}.tar.partial"]
        assert published(tmp_path) == []


def test_without_publishing_nothing_is_left(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, 0, 3, RECIPE) as shard:
        add(shard, 0, 1, 2)

    assert names(tmp_path) == []


def test_after_an_exception_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the encoder broke"), ShardWriter(tmp_path, 0, 3, RECIPE) as shard:
        add(shard, 0, 1)
        raise RuntimeError("the encoder broke")

    assert names(tmp_path) == []


def test_giving_up_makes_no_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", noise.append)

    with ShardWriter(tmp_path, 0, 3, RECIPE) as shard:
        add(shard, 0, 1)
    del shard
    gc.collect()

    assert noise == []


def test_an_exception_leaves_a_published_shard_as_it_was(tmp_path: Path) -> None:
    write_shard(tmp_path, SAMPLES)
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}

    with pytest.raises(RuntimeError), ShardWriter(tmp_path, 0, 3, RECIPE) as shard:
        add(shard, 2, 1)
        raise RuntimeError("the encoder broke")

    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == before


def test_what_a_killed_writer_left_is_written_over(tmp_path: Path, folder: Path) -> None:
    (tmp_path / f"{STEM}.tar.partial").write_bytes(b"half a tar" * 10_000)
    (tmp_path / f"{STEM}.json.partial").write_bytes(b'{"half": ')

    write_shard(tmp_path, SAMPLES)

    assert names(tmp_path) == names(folder)
    assert all((tmp_path / name).read_bytes() == (folder / name).read_bytes() for name in names(folder))


def test_a_tar_that_was_renamed_but_never_indexed_is_written_over(tmp_path: Path) -> None:
    (tmp_path / f"{STEM}.tar").write_bytes(b"another tar")

    assert published(tmp_path) == []
    write_shard(tmp_path, SAMPLES)

    assert list(shard_faults(Shard(tmp_path / f"{STEM}.json"))) == []


def test_a_shard_replaces_another_of_its_rows(tmp_path: Path) -> None:
    write_shard(tmp_path, SAMPLES)
    replacement = [make_sample(7), None, make_sample(8, tokens=20)]

    index = write_shard(tmp_path, replacement)

    shard = Shard(tmp_path / f"{STEM}.json")
    assert names(tmp_path) == [f"{STEM}.json", f"{STEM}.tar"]
    assert shard.index == index
    assert list(shard_faults(shard)) == []
    assert_same(shard.load(index.samples[1]), make_sample(8, tokens=20))


def test_while_a_shard_is_replaced_no_index_vouches_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shard(tmp_path, SAMPLES)
    seen: list[tuple[str, list[str]]] = []
    rename = Path.replace

    def watched(self: Path, target: Path) -> Path:
        seen.append((self.name, names(tmp_path)))
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", watched)
    write_shard(tmp_path, SAMPLES[::-1])

    assert seen == [
        (f"{STEM}.tar.partial", [f"{STEM}.tar", f"{STEM}.tar.partial"]),
        (f"{STEM}.json.partial", [f"{STEM}.json.partial", f"{STEM}.tar"]),
    ]


def test_a_writer_that_dies_before_its_index_leaves_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(self: LocalFolder, name: str, content: bytes) -> None:
        raise KeyboardInterrupt

    write_shard(tmp_path, SAMPLES)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LocalFolder, "write", dies)
        write_shard(tmp_path, SAMPLES)

    assert names(tmp_path) == [f"{STEM}.tar"], "the new one, without the index of the old one"
    assert published(tmp_path) == []
    write_shard(tmp_path, SAMPLES)
    assert names(tmp_path) == [f"{STEM}.json", f"{STEM}.tar"]


def test_a_writer_knows_its_index_and_what_it_has_skipped(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, 0, 3, RECIPE) as shard:
        assert shard.skipped == []
        shard.skip(make_skipped(2))
        shard.skip(make_skipped(0))
        add(shard, 1)
        assert shard.index_file.path == tmp_path / f"{STEM}.json"
        assert shard.skipped == [make_skipped(2), make_skipped(0)]
        shard.publish()

    assert published(tmp_path) == [shard.index_file]


@pytest.mark.parametrize("kind", [str, Path, open_folder, "file://{}".format], ids=["path", "Path", "Folder", "URL"])
def test_a_folder_to_write_to_is_a_path_a_folder_or_a_url(
    tmp_path: Path, folder: Path, kind: Callable[[Path], Any]
) -> None:
    write_shard(kind(tmp_path), SAMPLES)

    assert all((tmp_path / name).read_bytes() == (folder / name).read_bytes() for name in names(folder))
    assert names(tmp_path) == names(folder)


def test_variants_are_listed_by_row_and_number_in_whatever_order_they_came(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, 0, 2, RECIPE) as shard:
        for row, variant in [(1, 1), (0, 2), (1, 0), (0, 0)]:
            entry = replace(make_entry(SAMPLES[row], row), variant=variant)
            shard.add(entry, encode(SAMPLES[row], RECIPE.digest))
        for row, variant in [(1, 2), (0, 3), (0, 1)]:
            shard.skip(replace(make_skipped(row), variant=variant))
        index = shard.publish()

    assert [(entry.row, entry.variant) for entry in index.samples] == [(0, 0), (0, 2), (1, 0), (1, 1)]
    assert [(gone.row, gone.variant) for gone in index.skipped] == [(0, 1), (0, 3), (1, 2)]
    assert read_index(tmp_path / "00000000-00000002.json") == index


def test_variants_of_equal_content_share_one_record(tmp_path: Path) -> None:
    index = write_variants(tmp_path, [[SAMPLES[0], SAMPLES[1], SAMPLES[0]], [SAMPLES[1]]])

    assert list(index.files) == [member_name(SAMPLES[0].key), member_name(SAMPLES[1].key)]
    assert [(entry.row, entry.variant) for entry in index.samples] == [(0, 0), (0, 1), (0, 2), (1, 0)]


# Given up


def test_a_writer_that_is_closed_leaves_nothing(tmp_path: Path) -> None:
    shard = ShardWriter(tmp_path, 0, 3, RECIPE).__enter__()
    add(shard, 0, 1)

    shard.close()
    shard.close()

    assert names(tmp_path) == []
    write_shard(tmp_path, SAMPLES)


def test_a_published_shard_stays_when_its_writer_is_closed(tmp_path: Path, folder: Path) -> None:
    shard = ShardWriter(tmp_path, 0, 3, RECIPE).__enter__()
    add(shard, 0, 1, 2)
    shard.publish()

    shard.close()
    shard.close()

    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == {
        name: (folder / name).read_bytes() for name in names(folder)
    }


def test_closing_again_takes_nothing_from_the_next_writer(tmp_path: Path) -> None:
    shard = ShardWriter(tmp_path, 0, 3, RECIPE).__enter__()
    shard.close()
    with ShardWriter(tmp_path, 0, 3, RECIPE) as successor:
        shard.close()
        add(successor, 0, 1, 2)
        successor.publish()

    assert list(shard_faults(Shard(tmp_path / f"{STEM}.json"))) == []


# A disk that is full, or refuses


class Failing:
    """A file of which one method, or no method at all, raises an OSError when it is called for the n-th time."""

    def __init__(self, file: IO[bytes], method: str, number: int, error: int) -> None:
        self._file, self._method, self._left, self._error = file, method, number, error

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            self._left -= 1
            if self._left <= 0:
                return self._fail
        return getattr(self._file, name)

    def _fail(self, *_: object) -> None:
        raise OSError(self._error, os.strerror(self._error))


@contextmanager
def failing(stage: str, error: int = errno.ENOSPC) -> Iterator[None]:
    """A disk that fails at one stage of writing a shard: the first or a later record, the end of the tar, and so on."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error))

    def opened(original: Callable[..., Any]) -> Callable[..., Any]:
        method, number = {
            "first record": ("write", 1),
            "later record": ("write", 2),
            "end of the tar": ("write", 3),
            "flush": ("flush", 1),
        }.get(stage, ("", 0))
        return lambda *arguments: Failing(original(*arguments), method, number, error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qie.shards.writer._locked", opened(writer._locked))
        patch.setattr(tempfile, "TemporaryFile", opened(tempfile.TemporaryFile))
        if stage == "sync":
            patch.setattr(os, "fsync", fail)
        if stage == "rename":
            patch.setattr(Path, "replace", fail)
        if stage == "folder":
            patch.setattr(Path, "mkdir", fail)
        if stage == "open":
            patch.setattr(os, "open", fail)
            patch.setattr(tempfile, "TemporaryFile", fail)
        yield


STAGES = ["folder", "open", "first record", "later record", "end of the tar", "flush", "sync", "rename"]
LARGE = [make_sample(seed, target=(16, 16)) for seed in range(3)]  # some 11 kB each: a block of the stream is 10 kB


@pytest.mark.parametrize("stage", STAGES)
def test_on_a_full_disk_there_is_no_shard_and_nothing_is_left(tmp_path: Path, stage: str) -> None:
    with failing(stage), pytest.raises(ShardError, match="the shard cannot be written") as error:
        write_shard(tmp_path, LARGE)

    assert names(tmp_path) == []
    assert error.value.found == "No space left on device"
    assert str(error.value.where) == str(tmp_path / f"{STEM}.tar")
    assert "make room" in str(error.value.hint)
    write_shard(tmp_path, LARGE)
    assert list(shard_faults(Shard(tmp_path / f"{STEM}.json"))) == []


@pytest.mark.parametrize("stage", STAGES)
def test_on_a_full_disk_the_other_shards_stay(tmp_path: Path, folder: Path, stage: str) -> None:
    write_shard(tmp_path, SAMPLES)

    with failing(stage), pytest.raises(ShardError, match="the shard cannot be written"):
        write_shard(tmp_path, LARGE, start=3)

    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == {
        name: (folder / name).read_bytes() for name in names(folder)
    }


@pytest.mark.parametrize("stage", STAGES[:-1])
def test_on_a_full_disk_the_shard_that_was_to_be_replaced_stays(tmp_path: Path, folder: Path, stage: str) -> None:
    write_shard(tmp_path, SAMPLES)

    with failing(stage), pytest.raises(ShardError, match="the shard cannot be written"):
        write_shard(tmp_path, LARGE)

    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == {
        name: (folder / name).read_bytes() for name in names(folder)
    }


@pytest.mark.parametrize("replacing", [False, True], ids=["new", "replacing"])
def test_without_room_for_its_index_a_shard_is_not_there(tmp_path: Path, replacing: bool) -> None:
    if replacing:
        write_shard(tmp_path, SAMPLES)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(QieError) as error:
        patch.setattr("qie.stores.disk._sync", lambda file: full())
        write_shard(tmp_path, SAMPLES[::-1])

    assert "No space left on device" in str(error.value.found)
    assert names(tmp_path) == [f"{STEM}.tar"]
    assert published(tmp_path) == []
    remove_abandoned(open_folder(tmp_path), (0, 3))
    assert names(tmp_path) == []


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("stage", STAGES)
def test_giving_up_on_a_full_disk_makes_no_noise(tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    noise: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", noise.append)

    with failing(stage), pytest.raises(ShardError):
        write_shard(tmp_path, LARGE)
    gc.collect()

    assert noise == []


@pytest.mark.parametrize("size", [0, 5_000, 15_000, 40_000])
def test_at_a_real_limit_nothing_is_left_and_no_noise_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """What a buffer still holds then does not fit when the file is closed, either."""
    noise: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", noise.append)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with pytest.raises(ShardError, match="the shard cannot be written") as error:
            write_shard(tmp_path, LARGE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    gc.collect()

    assert error.value.found == os.strerror(errno.EFBIG)
    assert (names(tmp_path), noise) == ([], [])


@pytest.mark.parametrize("stage", ["first record", "flush", "sync", "rename"])
def test_of_a_disk_that_breaks_it_is_said_what_broke(tmp_path: Path, stage: str) -> None:
    with failing(stage, errno.EIO), pytest.raises(ShardError) as error:
        write_shard(tmp_path, LARGE)

    assert (error.value.found, error.value.hint) == (os.strerror(errno.EIO), None)
    assert names(tmp_path) == []


def test_on_a_disk_that_is_full_for_this_user_room_is_asked_for(tmp_path: Path) -> None:
    with failing("later record", errno.EDQUOT), pytest.raises(ShardError) as error:
        write_shard(tmp_path, LARGE)

    assert "make room" in str(error.value.hint)


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"precious")

    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ShardError, match="the shard cannot be written"):
            write_shard(place, SAMPLES)
    assert (tmp_path / "file").read_bytes() == b"precious"


@pytest.mark.parametrize("place", ["pipe:cat", "ftp://host/x", "s3:/bucket/x"])
def test_a_place_that_is_not_written_to_is_refused(place: str) -> None:
    with pytest.raises(UsageError):
        ShardWriter(place, 0, 3, RECIPE)


# Several writers

HOLDER = """
import os, sys
from pathlib import Path
from qie.shards.writer import ShardWriter
from tests.builders import RECIPE
with ShardWriter(Path(sys.argv[1]), 0, 3, RECIPE):
    os.write(1, b"held")
    os.read(0, 1)
"""


def test_a_second_process_finds_the_shard_busy_until_the_first_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.read(4) == b"held"

        with pytest.raises(ShardBusyError, match="another process is writing this shard"):
            write_shard(tmp_path, SAMPLES)
        assert names(tmp_path) == [f"{STEM}.tar.partial"], "the first one's file is still there"
        write_shard(tmp_path, SAMPLES, start=3)
    finally:
        holder.kill()
        holder.communicate()

    write_shard(tmp_path, SAMPLES)
    assert len(published(tmp_path)) == 2
    assert list(shard_faults(Shard(tmp_path / f"{STEM}.json"))) == []


def test_two_writers_in_one_process_exclude_each_other(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, 0, 3, RECIPE) as shard:
        with pytest.raises(ShardBusyError):
            write_shard(tmp_path, SAMPLES)
        add(shard, 0, 1, 2)
        shard.publish()

    assert list(shard_faults(Shard(tmp_path / f"{STEM}.json"))) == []


def test_who_waited_for_the_lock_of_a_shard_that_was_published_finds_it_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second opens the partial file; before it has the lock, the first publishes and lets go."""
    first = ShardWriter(tmp_path, 0, 3, RECIPE)
    first.__enter__()
    add(first, 0, 1, 2)
    lock = fcntl.flock

    def late(handle: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        first.publish()
        first.__exit__(None, None, None)
        lock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(ShardBusyError, match="has just written this shard"):
        write_shard(tmp_path, SAMPLES[::-1])

    assert names(tmp_path) == [f"{STEM}.json", f"{STEM}.tar"]
    assert list(shard_faults(Shard(tmp_path / f"{STEM}.json"))) == []


def test_who_waited_for_a_lock_while_another_began_anew_finds_the_shard_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, but when the second gets its lock, a third writer already has a partial file of the same name."""
    first, third = ShardWriter(tmp_path, 0, 3, RECIPE), ShardWriter(tmp_path, 0, 3, RECIPE)
    lock = fcntl.flock

    def late(handle: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        first.__exit__(None, None, None)
        third.__enter__()
        lock(handle, operation)

    first.__enter__()
    add(first, 0, 1, 2)
    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(ShardBusyError, match="has just written this shard"):
        write_shard(tmp_path, SAMPLES[::-1])
    add(third, 0, 1, 2)
    third.publish()
    third.__exit__(None, None, None)

    assert list(shard_faults(Shard(tmp_path / f"{STEM}.json"))) == []


def test_a_writer_that_has_published_lets_its_successor_work(tmp_path: Path) -> None:
    """And takes nothing from it when it is closed once more."""
    with ShardWriter(tmp_path, 0, 3, RECIPE) as first:
        add(first, 0, 1, 2)
        first.publish()
        first.close()
        second = ShardWriter(tmp_path, 0, 3, RECIPE).__enter__()
    add(second, 2, 1, 0)
    second.publish()
    second.close()

    assert names(tmp_path) == [f"{STEM}.json", f"{STEM}.tar"]
    assert list(shard_faults(Shard(tmp_path / f"{STEM}.json"))) == []
    assert [entry.row for entry in read_index(tmp_path / f"{STEM}.json").samples] == [0, 1, 2]


def test_between_tar_and_index_a_shard_is_busy(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first one's index would vouch for the second one's tar."""
    busy: list[str] = []
    write = LocalFolder.write

    def late(self: LocalFolder, name: str, content: bytes) -> None:
        monkeypatch.setattr(LocalFolder, "write", write)
        with pytest.raises(ShardBusyError, match="another process is publishing this shard"):
            write_shard(tmp_path, SAMPLES[::-1])
        busy.extend(names(tmp_path))
        write(self, name, content)

    monkeypatch.setattr(LocalFolder, "write", late)
    write_shard(tmp_path, SAMPLES)

    assert busy == [f"{STEM}.tar"]
    assert all((tmp_path / name).read_bytes() == (folder / name).read_bytes() for name in names(folder))
    assert names(tmp_path) == names(folder)


# Rows of other shards


@pytest.mark.parametrize("rows", [(0, 2), (2, 5), (0, 9), (1, 2)], ids=str)
def test_rows_that_another_shard_holds_are_not_written_again(tmp_path: Path, rows: tuple[int, int]) -> None:
    write_shard(tmp_path, SAMPLES)
    with pytest.raises(ShardOverlapError, match="another shard holds some of these rows") as caught:
        ShardWriter(tmp_path, *rows, RECIPE).__enter__()
    assert f"{STEM}.json" in str(caught.value)
    assert names(tmp_path) == [f"{STEM}.json", f"{STEM}.tar"]
    with ShardWriter(tmp_path, 3, 9, RECIPE), ShardWriter(tmp_path, 0, 3, RECIPE):
        pass


@pytest.mark.parametrize("where", ["before the rename", "after the rename"])
def test_rows_that_another_process_is_writing_are_left_to_it_until_it_is_killed(tmp_path: Path, where: str) -> None:
    with stopped(tmp_path, where) as child:
        with pytest.raises(ShardBusyError, match="some of the same rows"):
            write_shard(tmp_path, SAMPLES)
        child.kill()
        child.wait()
        write_shard(tmp_path, SAMPLES)


def test_in_a_bucket_rows_that_another_shard_got_meanwhile_are_not_published(s3: S3) -> None:
    """There are no locks, so it is seen when the shard is done."""
    with ShardWriter(s3.url, 0, 2, RECIPE) as shard:
        add(shard, 0, 1)
        write_shard(s3.url, SAMPLES)
        with pytest.raises(ShardOverlapError):
            shard.publish()
    assert list(open_folder(s3.url).listing()) == [f"{STEM}.json", f"{STEM}.tar"]


# What killed writers left

OURS = "00000064-00000128"
ABANDONED = [f"{OURS}.tar", f"{OURS}.tar.partial", f"{OURS}.json.partial"]


def touch(folder: Path, *files: str) -> None:
    for name in files:
        (folder / name).write_bytes(b"left behind")


@pytest.mark.parametrize("name", ABANDONED)
def test_what_a_killed_writer_left_is_removed(tmp_path: Path, name: str) -> None:
    touch(tmp_path, name)

    remove_abandoned(open_folder(tmp_path), (64, 128))

    assert names(tmp_path) == []


@pytest.mark.parametrize("rows", [(64, 128), (0, 65), (127, 500), (100, 101), (0, 10**12)], ids=str)
def test_what_was_left_of_overlapping_rows_is_removed(tmp_path: Path, rows: tuple[int, int]) -> None:
    touch(tmp_path, *ABANDONED)

    remove_abandoned(open_folder(tmp_path), rows)

    assert names(tmp_path) == []


@pytest.mark.parametrize("rows", [(0, 64), (128, 192), (0, 0), (500, 10**12)], ids=str)
def test_what_was_left_of_other_rows_stays(tmp_path: Path, rows: tuple[int, int]) -> None:
    touch(tmp_path, *ABANDONED)

    remove_abandoned(open_folder(tmp_path), rows)

    assert names(tmp_path) == sorted(ABANDONED)


def test_published_shards_stay(tmp_path: Path, folder: Path) -> None:
    write_shard(tmp_path, SAMPLES)
    touch(tmp_path, f"{STEM}.tar.partial", f"{STEM}.json.partial")

    remove_abandoned(open_folder(tmp_path), (0, 3))

    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == {
        name: (folder / name).read_bytes() for name in names(folder)
    }


OTHERS = [
    "config.json.partial",
    "photo.tar",
    "photo.partial",
    "0-64.tar.partial",
    "x00000064-00000128.tar",
    "00000064-00000128-x.tar.partial",
    "00000064-00000128.json",
    "00000064-00000128.tar.gz",
    "00000064-00000128.txt",
    "00000064-00000128",
    "partial",
    ".partial",
]


@pytest.mark.parametrize("name", OTHERS)
def test_files_that_no_writer_leaves_stay(tmp_path: Path, name: str) -> None:
    touch(tmp_path, name)

    remove_abandoned(open_folder(tmp_path), (0, 10**12))

    assert names(tmp_path) == [name]


@pytest.mark.parametrize("name", ABANDONED)
def test_folders_stay_whatever_they_are_called(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    touch(tmp_path / name, *ABANDONED)

    remove_abandoned(open_folder(tmp_path), (0, 10**12))

    assert names(tmp_path) == [name]
    assert names(tmp_path / name) == sorted(ABANDONED)


def test_in_a_folder_that_is_not_there_nothing_is_left(tmp_path: Path) -> None:
    remove_abandoned(open_folder(tmp_path / "gone"), (0, 64))

    assert names(tmp_path) == []


def test_a_link_that_leads_nowhere_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / f"{OURS}.tar.partial").symlink_to(tmp_path / "gone")

    remove_abandoned(open_folder(tmp_path), (0, 128))


def test_what_a_writer_of_this_process_is_writing_stays(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, 0, 3, RECIPE) as shard:
        add(shard, 0, 1, 2)
        remove_abandoned(open_folder(tmp_path), (0, 3))
        assert names(tmp_path) == [f"{STEM}.tar.partial"]
        shard.publish()

    assert list(shard_faults(Shard(tmp_path / f"{STEM}.json"))) == []


def test_a_tar_that_gets_its_index_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tar has its name when it is looked at; before it is locked, its writer publishes and lets go."""
    shard = ShardWriter(tmp_path, 0, 3, RECIPE).__enter__()
    add(shard, 0, 1, 2)
    lock, write = fcntl.flock, LocalFolder.write

    def late(handle: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        write(folder, name, content)
        shard.close()
        lock(handle, operation)

    def stop(self: LocalFolder, *arguments: Any) -> None:
        nonlocal folder, name, content
        folder, (name, content) = self, arguments

    folder, name, content = LocalFolder(tmp_path), "", b""
    monkeypatch.setattr(LocalFolder, "write", stop)
    shard.publish()
    assert names(tmp_path) == [f"{STEM}.tar"]
    monkeypatch.setattr(fcntl, "flock", late)
    remove_abandoned(open_folder(tmp_path), (0, 3))

    assert list(shard_faults(Shard(tmp_path / f"{STEM}.json"))) == []


def test_a_partial_file_that_is_renamed_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked at under its old name; before it is locked, its writer publishes and lets go."""
    shard = ShardWriter(tmp_path, 0, 3, RECIPE).__enter__()
    add(shard, 0, 1, 2)
    lock = fcntl.flock

    def late(handle: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        shard.publish()
        shard.close()
        lock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    remove_abandoned(open_folder(tmp_path), (0, 3))

    assert list(shard_faults(Shard(tmp_path / f"{STEM}.json"))) == []


def test_the_partial_file_of_the_next_writer_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, but before the lock is there, the writer gives up and another one begins."""
    shard, successor = ShardWriter(tmp_path, 0, 3, RECIPE).__enter__(), ShardWriter(tmp_path, 0, 3, RECIPE)
    lock = fcntl.flock

    def late(handle: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        shard.close()
        successor.__enter__()
        lock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    remove_abandoned(open_folder(tmp_path), (0, 3))
    add(successor, 0, 1, 2)
    successor.publish()
    successor.close()

    assert list(shard_faults(Shard(tmp_path / f"{STEM}.json"))) == []


# Stops where it is told, holding its lock, and goes on when it is told.
WRITER = """
import os, sys
from qie.shards.record import encode
from qie.shards.writer import ShardWriter
from qie.stores import LocalFolder
from tests.builders import RECIPE, make_entry, make_sample

def stop(where):
    if sys.argv[2] == where:
        os.write(1, b"held")
        os.read(0, 1)

write = LocalFolder.write
LocalFolder.write = lambda *arguments: (stop("after the rename"), write(*arguments))
with ShardWriter(sys.argv[1], 0, 1, RECIPE) as shard:
    sample = make_sample(0)
    shard.add(make_entry(sample, 0), encode(sample, RECIPE.digest))
    stop("before the rename")
    shard.publish()
"""


@contextmanager
def stopped(folder: Path, where: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that writes the shard of row 0 and has stopped there."""
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, folder, where], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    try:
        assert child.stdout is not None
        assert child.stdout.read(4) == b"held"
        yield child
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize(
    ("where", "left"),
    [
        ("before the rename", "00000000-00000001.tar.partial"),
        ("after the rename", "00000000-00000001.tar"),
    ],
)
def test_what_another_process_holds_stays_until_it_is_killed(tmp_path: Path, where: str, left: str) -> None:
    with stopped(tmp_path, where) as child:
        remove_abandoned(open_folder(tmp_path), (0, 3))
        with pytest.raises(ShardBusyError):
            write_shard(tmp_path, SAMPLES[:1])
        assert names(tmp_path) == [left]
        child.kill()
        child.wait()
        remove_abandoned(open_folder(tmp_path), (1, 3))
        assert names(tmp_path) == [left]

        remove_abandoned(open_folder(tmp_path), (0, 3))
        assert names(tmp_path) == []


@pytest.mark.parametrize("where", ["before the rename", "after the rename"])
def test_another_process_publishes_what_was_left_to_it(tmp_path: Path, where: str) -> None:
    with stopped(tmp_path, where) as child:
        remove_abandoned(open_folder(tmp_path), (0, 3))
        child.communicate(b"!")
        assert child.returncode == 0

    remove_abandoned(open_folder(tmp_path), (0, 3))
    assert names(tmp_path) == ["00000000-00000001.json", "00000000-00000001.tar"]
    assert list(shard_faults(Shard(tmp_path / "00000000-00000001.json"))) == []


# In a bucket


def test_a_shard_in_a_bucket_is_the_shard_on_a_disk_byte_by_byte(s3: S3, folder: Path) -> None:
    remote = open_folder(f"{s3.url}/new/shards")

    index = write_shard(remote, SAMPLES)

    assert index == read_index(folder / f"{STEM}.json")
    assert list(remote.listing()) == names(folder)
    assert all(remote.read(name) == (folder / name).read_bytes() for name in names(folder))
    assert list(shard_faults(Shard(f"{remote.url}/{STEM}.json"))) == []


def test_a_bucket_shows_nothing_before_a_shard_is_published(s3: S3) -> None:
    remote = open_folder(f"{s3.url}/shards")
    with ShardWriter(remote.url, 0, 3, RECIPE) as shard:
        add(shard, 0, 1, 2)
        assert remote.listing() == {}
        assert (shard.index_file.path, str(shard.index_file)) == (None, f"{remote.url}/{STEM}.json")
        shard.publish()

    assert published(remote) == [shard.index_file]


def test_a_shard_for_a_bucket_leaves_nothing_on_the_disk(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    with ShardWriter(s3.url, 0, 3, RECIPE) as shard:
        add(shard, 0, 1, 2)
        assert names(tmp_path) == [], "nor while it is written: who kills the writer leaves nothing"
        shard.publish()
    with pytest.raises(RuntimeError), ShardWriter(s3.url, 3, 4, RECIPE) as shard:
        raise RuntimeError("the encoder broke")

    assert names(tmp_path) == []


def test_a_shard_that_is_given_up_leaves_a_bucket_as_it_was(s3: S3) -> None:
    write_shard(s3.url, SAMPLES)
    before = {name: open_folder(s3.url).read(name) for name in open_folder(s3.url).listing()}

    with pytest.raises(RuntimeError), ShardWriter(s3.url, 0, 3, RECIPE) as shard:
        add(shard, 2, 1)
        raise RuntimeError("the encoder broke")

    assert {name: open_folder(s3.url).read(name) for name in open_folder(s3.url).listing()} == before


def test_in_a_bucket_the_index_goes_first_and_comes_last(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shard(s3.url, SAMPLES)
    seen: list[tuple[str, str, list[str]]] = []

    def watched(method: str) -> None:
        original = getattr(ObjectFolder, method)

        def act(self: ObjectFolder, name: str, *arguments: Any) -> Any:
            seen.append((method, name, list(self.listing())))
            return original(self, name, *arguments)

        monkeypatch.setattr(ObjectFolder, method, act)

    for method in ("delete", "upload", "write"):
        watched(method)
    write_shard(s3.url, SAMPLES[::-1])

    assert seen == [
        ("delete", f"{STEM}.json", [f"{STEM}.json", f"{STEM}.tar"]),
        ("upload", f"{STEM}.tar", [f"{STEM}.tar"]),
        ("write", f"{STEM}.json", [f"{STEM}.tar"]),
    ]
    assert list(shard_faults(Shard(f"{s3.url}/{STEM}.json"))) == []


@pytest.mark.parametrize("method", ["delete", "upload", "write"])
def test_a_store_that_refuses_leaves_no_new_shard(s3: S3, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def refuse(self: ObjectFolder, *_: object) -> None:
        raise StoreError("a store denies access", where=self.url)

    monkeypatch.setattr(ObjectFolder, method, refuse)
    with pytest.raises(StoreError, match="a store denies access"):
        write_shard(s3.url, SAMPLES)

    assert published(s3.url) == []


@pytest.mark.parametrize("stage", ["open", "first record", "later record", "end of the tar", "flush", "sync"])
def test_a_full_disk_leaves_a_bucket_as_it_was(s3: S3, stage: str) -> None:
    with failing(stage), pytest.raises(ShardError, match="the shard cannot be written") as error:
        write_shard(s3.url, LARGE)

    assert str(error.value.where) == tempfile.gettempdir()
    assert "make room" in str(error.value.hint)
    assert open_folder(s3.url).listing() == {}


def test_in_a_bucket_nothing_is_taken_for_abandoned(s3: S3) -> None:
    """Whose tar it is cannot be seen there: there are no locks."""
    remote = open_folder(s3.url)
    for name in ABANDONED:
        remote.write(name, b"")

    remove_abandoned(remote, (0, 10**12))

    assert list(remote.listing()) == sorted(ABANDONED)


def test_over_http_nothing_is_written(s3: S3) -> None:
    with pytest.raises(StoreError, match="over http files can only be read"):
        write_shard(f"{s3.endpoint}/{s3.bucket}", SAMPLES)


def test_a_shard_on_the_hub_is_the_shard_on_a_disk_byte_by_byte(hub: FakeHub, folder: Path) -> None:
    place = f"{hub.folder_url}/new/shards"

    write_shard(place, SAMPLES)

    assert {name.rpartition("/")[2]: content for name, content in hub.files.items()} == {
        name: (folder / name).read_bytes() for name in names(folder)
    }
    shards = ShardSet.open([f"{place}/*.tar"])
    for position, sample in enumerate(SAMPLES):
        assert_same(shards.load(position), sample)
    assert list(shard_faults(Shard(f"{place}/{STEM}.json"))) == []
