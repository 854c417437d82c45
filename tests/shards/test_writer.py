"""The writer: exact bytes, and a shard is complete or not there, whatever happens to whom."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors.torch import load

from qie.shards.index import ShardIndex, member_name, read_index
from qie.shards.reader import Shard
from qie.shards.record import encode
from qie.shards.storage import published
from qie.shards.writer import ShardBusyError, ShardWriter, write_file
from tests.builders import (
    RECIPE,
    ROOT,
    assert_same,
    make_entry,
    make_sample,
    make_skipped,
    same_bits,
    write_shard,
)

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
    assert list(Shard(tmp_path / "00000000-00000005.json").verify()) == []


def test_a_shard_whose_rows_are_all_skipped_is_a_shard(tmp_path: Path) -> None:
    index = write_shard(tmp_path, [None, None])

    shard = Shard(tmp_path / "00000000-00000002.json")
    assert [gone.row for gone in shard.index.skipped] == [0, 1]
    assert index.filesize == 10240
    assert list(shard.verify()) == []
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

    assert list(Shard(tmp_path / f"{STEM}.json").verify()) == []


def test_a_shard_replaces_another_of_its_rows(tmp_path: Path) -> None:
    write_shard(tmp_path, SAMPLES)
    replacement = [make_sample(7), None, make_sample(8, tokens=20)]

    index = write_shard(tmp_path, replacement)

    shard = Shard(tmp_path / f"{STEM}.json")
    assert names(tmp_path) == [f"{STEM}.json", f"{STEM}.tar"]
    assert shard.index == index
    assert list(shard.verify()) == []
    assert_same(shard.load(index.samples[1]), make_sample(8, tokens=20))


def test_while_a_shard_is_replaced_no_index_vouches_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shard(tmp_path, SAMPLES)
    seen: list[tuple[str, list[str]]] = []
    replace = Path.replace

    def watched(self: Path, target: Path) -> Path:
        seen.append((self.name, names(tmp_path)))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", watched)
    write_shard(tmp_path, SAMPLES[::-1])

    assert seen == [
        (f"{STEM}.tar.partial", [f"{STEM}.tar", f"{STEM}.tar.partial"]),
        (f"{STEM}.json.partial", [f"{STEM}.json.partial", f"{STEM}.tar"]),
    ]


def test_a_writer_that_dies_before_its_index_leaves_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(path: Path, content: bytes) -> None:
        raise KeyboardInterrupt

    write_shard(tmp_path, SAMPLES)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("qie.shards.writer.write_file", dies)
        write_shard(tmp_path, SAMPLES)

    assert published(tmp_path) == []
    write_shard(tmp_path, SAMPLES)
    assert names(tmp_path) == [f"{STEM}.json", f"{STEM}.tar"]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "file", b"old")

    def full(handle: int) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
        patch.setattr(os, "fsync", full)
        write_file(tmp_path / "file", b"new")

    assert (tmp_path / "file").read_bytes() == b"old"


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
    assert list(Shard(tmp_path / f"{STEM}.json").verify()) == []


def test_two_writers_in_one_process_exclude_each_other(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, 0, 3, RECIPE) as shard:
        with pytest.raises(ShardBusyError):
            write_shard(tmp_path, SAMPLES)
        add(shard, 0, 1, 2)
        shard.publish()

    assert list(Shard(tmp_path / f"{STEM}.json").verify()) == []


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
    assert list(Shard(tmp_path / f"{STEM}.json").verify()) == []


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

    assert list(Shard(tmp_path / f"{STEM}.json").verify()) == []


def test_a_writer_that_has_published_lets_its_successor_work(tmp_path: Path) -> None:
    """The second begins after the first has published, but before the first has left its block."""
    second = ShardWriter(tmp_path, 0, 3, RECIPE)
    with ExitStack() as stack:
        with ShardWriter(tmp_path, 0, 3, RECIPE) as first:
            add(first, 0, 1, 2)
            first.publish()
            stack.enter_context(second)
        add(second, 2, 1, 0)
        second.publish()

    assert names(tmp_path) == [f"{STEM}.json", f"{STEM}.tar"]
    assert list(Shard(tmp_path / f"{STEM}.json").verify()) == []
