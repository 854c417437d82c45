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
import torch
import xxhash
from safetensors.torch import load

from qie.errors import QieError, ShardError, UsageError
from qie.shards import writer
from qie.shards.discovery import published
from qie.shards.index import ShardIndex, member_name, read_index
from qie.shards.reader import Shard
from qie.shards.record import encode
from qie.shards.shard_set import ShardSet
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
)
from tests.s3 import S3
from tests.stores.fake_hub import FakeHub

STEM = "00000000-00000003"
TAR, INDEX, PARTIAL = f"{STEM}.tar", f"{STEM}.json", f"{STEM}.tar.partial"
SAMPLES = [
    make_sample(0),
    make_sample(1, controls=((2, 3), (4, 6)), masked=True, paired=True),
    make_sample(2, tokens=11),
]
ALL = (0, 10**12)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def add(shard: ShardWriter, *rows: int) -> None:
    for row in rows:
        shard.add(make_entry(SAMPLES[row], row), encode(SAMPLES[row], RECIPE.digest))


def entered(folder: Path) -> ShardWriter:
    """A writer that has all rows and has not published."""
    shard = ShardWriter(folder, 0, 3, RECIPE).__enter__()
    add(shard, 0, 1, 2)
    return shard


def assert_sound(place: Path | str, stem: str = STEM) -> None:
    assert list(shard_faults(Shard(f"{place}/{stem}.json"))) == []


# The published bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one shard of SAMPLES. Tests only read it."""
    folder = tmp_path_factory.mktemp("published")
    write_shard(folder, SAMPLES)
    return folder


@pytest.fixture(scope="module")
def tar(folder: Path) -> Path:
    return folder / TAR


@pytest.fixture(scope="module")
def index(folder: Path) -> ShardIndex:
    return read_index(folder / INDEX)


@pytest.mark.parametrize("kind", [str, Path, open_folder, "file://{}".format], ids=["path", "Path", "Folder", "URL"])
def test_equal_rows_give_equal_files_in_a_path_a_folder_or_a_url_that_is_made_if_need_be(
    tmp_path: Path, folder: Path, kind: Callable[[Path], Any]
) -> None:
    place = tmp_path / "not" / "there"

    assert write_shard(kind(place), SAMPLES) == read_index(place / INDEX)

    assert names(place) == [INDEX, TAR]
    assert contents(place) == contents(folder)


@pytest.mark.skipif(shutil.which("tar") is None, reason="no tar program")
def test_the_tar_program_lists_the_records(tar: Path, index: ShardIndex) -> None:
    environment = os.environ | {"LC_ALL": "C", "TZ": "UTC"}
    listing = subprocess.run(["tar", "tvf", tar], check=True, capture_output=True, text=True, env=environment)

    assert listing.stderr == ""
    for line, (name, member) in zip(listing.stdout.splitlines(), index.files.items(), strict=True):
        assert line.split() == ["-rw-r--r--", "0/0", str(member.size), "1970-01-01", "00:00", name]


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # webdataset leaves that to the collector
def test_webdataset_and_tarfile_read_the_records_and_safetensors_a_record(tar: Path) -> None:
    records = {sample.key: encode(sample, RECIPE.digest) for sample in SAMPLES}
    webdataset = pytest.importorskip("webdataset")

    found = {item["__key__"]: item["safetensors"] for item in webdataset.WebDataset(str(tar), shardshuffle=False)}
    assert list(found.items()) == list(records.items())
    with tarfile.open(tar, "r:") as opened:
        for member, (key, record) in zip(opened, records.items(), strict=True):
            assert (member.name, opened.extractfile(member).read()) == (member_name(key), record)  # type: ignore[union-attr]
            assert (type(member.mtime), member.mtime, member.pax_headers) == (int, 0, {})
        assert opened.pax_headers == {}
    for sample in SAMPLES:
        tensors = load(found[sample.key])
        shared = tensors["prompt_embed"][: sample.shared_prefix]
        assert same_bits(torch.cat([shared, tensors["empty_prompt_embed"]]), sample.empty_prompt_embed)
        for name in ("pixel_latent", "prompt_embed", "loss_mask"):
            assert same_bits(tensors.get(name), getattr(sample, name))


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


def test_the_index_is_canonical_json_of_recipe_hashes_and_offsets(tar: Path, index: ShardIndex) -> None:
    content, text = tar.read_bytes(), tar.with_suffix(".json").read_text(encoding="utf-8")

    for sample in SAMPLES:
        member = index.files[member_name(sample.key)]
        payload = content[member.offset : member.offset + member.size]
        assert payload == encode(sample, RECIPE.digest)
        assert member.sha256 == hashlib.sha256(payload).hexdigest()
        assert member.xxh3_128 == xxhash.xxh3_128(payload).hexdigest()
    assert (index.filesize, index.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert index.recipe == RECIPE
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n"


def test_rows_and_variants_are_listed_in_their_order_and_equal_ones_share_a_record(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, 0, 4, RECIPE) as shard:
        for row, variant, sample in [(1, 1, 1), (0, 2, 0), (1, 0, 0), (0, 0, 1)]:
            entry = replace(make_entry(SAMPLES[sample], row), variant=variant)
            shard.add(entry, encode(SAMPLES[sample], RECIPE.digest))
        gone = [
            replace(make_skipped(row), variant=variant) for row, variant in [(3, 0), (1, 2), (0, 3), (2, 0), (0, 1)]
        ]
        assert shard.skipped == []
        for one in gone:
            shard.skip(one)
        assert shard.skipped == gone
        index = shard.publish()

    assert [(entry.row, entry.variant) for entry in index.samples] == [(0, 0), (0, 2), (1, 0), (1, 1)]
    assert [(one.row, one.variant) for one in index.skipped] == [(0, 1), (0, 3), (1, 2), (2, 0), (3, 0)]
    with tarfile.open(tmp_path / "00000000-00000004.tar", "r:") as opened:
        assert opened.getnames() == [*index.files] == [member_name(SAMPLES[n].key) for n in (1, 0)]
    opened_shard = Shard(tmp_path / "00000000-00000004.json")
    assert opened_shard.index == index
    assert_same(opened_shard.load(index.samples[2]), SAMPLES[0])
    assert_sound(tmp_path, "00000000-00000004")


def test_a_shard_of_skipped_rows_is_a_shard_and_a_record_that_fills_its_blocks_gets_no_padding(tmp_path: Path) -> None:
    index = write_shard(tmp_path, [None, None])

    assert ([gone.row for gone in index.skipped], index.filesize) == ([0, 1], 10240)
    assert_sound(tmp_path, "00000000-00000002")
    with tarfile.open(tmp_path / "00000000-00000002.tar", "r:") as opened:
        assert opened.getnames() == []

    record = bytes(range(256)) * 4
    with ShardWriter(tmp_path, 2, 5, RECIPE) as shard:
        for row, sample in enumerate(SAMPLES, 2):
            shard.add(make_entry(sample, row), record)
        members = shard.publish().files.values()
    assert [member.offset for member in members] == [512, 2048, 3584]
    content = (tmp_path / "00000002-00000005.tar").read_bytes()
    assert all(content[member.offset :][:1024] == record for member in members)


# Complete or not there


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """What Python complains of where nobody can catch it: nothing, at the end."""
    noise: list[object] = []
    gc.collect()  # what was there before is none of this test's
    monkeypatch.setattr(sys, "unraisablehook", noise.append)
    yield noise
    gc.collect()
    assert noise == []


@pytest.mark.parametrize("there", [False, True], ids=["nothing there", "a shard there"])
@pytest.mark.parametrize("end", ["left", "raised", "closed"])
@pytest.mark.usefixtures("noise")
def test_before_it_is_published_nothing_is_visible_and_given_up_nothing_changes(
    tmp_path: Path, end: str, there: bool
) -> None:
    if there:
        write_shard(tmp_path, SAMPLES)
    before = contents(tmp_path)

    shard = ShardWriter(tmp_path, 0, 3, RECIPE)
    assert shard.index_file.path == tmp_path / INDEX
    if end == "closed":
        shard.__enter__()
        shard.close()
        shard.close()
    else:
        try:
            with shard:
                add(shard, 2, 1)
                assert {*names(tmp_path)} == {*before, PARTIAL}
                assert len(published(tmp_path)) == there
                if end == "raised":
                    raise RuntimeError("the encoder broke")
        except RuntimeError:
            assert end == "raised"

    assert contents(tmp_path) == before
    write_shard(tmp_path, SAMPLES)
    assert published(tmp_path) == [shard.index_file]


@pytest.mark.parametrize("left", [[PARTIAL, f"{STEM}.json.partial"], [TAR]], ids=["partial files", "a tar"])
def test_what_a_killed_writer_left_is_written_over(tmp_path: Path, folder: Path, left: list[str]) -> None:
    touch(tmp_path, *left)
    assert published(tmp_path) == []

    write_shard(tmp_path, SAMPLES)

    assert contents(tmp_path) == contents(folder)


def test_while_a_shard_is_replaced_no_index_vouches_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shard(tmp_path, SAMPLES)
    seen: list[tuple[str, list[str]]] = []
    rename = Path.replace

    def watched(self: Path, target: Path) -> Path:
        seen.append((self.name, names(tmp_path)))
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", watched)
    index = write_shard(tmp_path, [make_sample(7), None, make_sample(8, tokens=20)])

    assert seen == [(PARTIAL, [TAR, PARTIAL]), (f"{STEM}.json.partial", [f"{STEM}.json.partial", TAR])]
    assert names(tmp_path) == [INDEX, TAR]
    assert_same(Shard(tmp_path / INDEX).load(index.samples[1]), make_sample(8, tokens=20))
    assert_sound(tmp_path)


def test_a_writer_that_has_published_or_given_up_takes_nothing_from_its_successor(tmp_path: Path, folder: Path) -> None:
    for publish in (False, True):
        first = entered(tmp_path)
        if publish:
            first.publish()
        first.close()
        assert contents(tmp_path) == (contents(folder) if publish else {})
        second = entered(tmp_path)
        first.close()
        second.publish()
        second.close()
        assert_sound(tmp_path)


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


METHODS = {
    "first record": ("write", 1),
    "later record": ("write", 2),
    "end of the tar": ("write", 3),
    "flush": ("flush", 1),
}
CALLS = {"sync": (os, "fsync"), "rename": (Path, "replace"), "folder": (Path, "mkdir"), "open": (os, "open")}
STAGES = ["folder", "open", "first record", "later record", "end of the tar", "flush", "sync", "rename"]
LARGE = [make_sample(seed, target=(16, 16)) for seed in range(3)]  # some 11 kB each: a block of the stream is 10 kB


@contextmanager
def failing(stage: str, error: int = errno.ENOSPC) -> Iterator[None]:
    """A disk that fails at one stage of writing a shard: the first or a later record, the end of the tar, and so on."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error))

    def opened(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: Failing(original(*arguments), *METHODS.get(stage, ("", 0)), error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qie.shards.writer._locked", opened(writer._locked))
        patch.setattr(tempfile, "TemporaryFile", fail if stage == "open" else opened(tempfile.TemporaryFile))
        if stage in CALLS:
            patch.setattr(*CALLS[stage], fail)
        yield


@pytest.mark.parametrize("there", ["nothing", "another shard", "the shard"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.usefixtures("noise")
def test_on_a_full_disk_there_is_no_new_shard_and_what_was_there_stays(tmp_path: Path, stage: str, there: str) -> None:
    start = 3 if there == "another shard" else 0
    if there != "nothing":
        write_shard(tmp_path, SAMPLES)
    before = contents(tmp_path)

    with failing(stage), pytest.raises(ShardError, match="the shard cannot be written") as error:
        write_shard(tmp_path, LARGE, start=start)

    if (stage, there) == ("rename", "the shard"):
        before.pop(INDEX)  # it is removed before the tar is replaced
    assert contents(tmp_path) == before
    assert error.value.found == "No space left on device"
    assert str(error.value.where) == str(tmp_path / f"{start:08d}-{start + 3:08d}.tar")
    assert "free some space" in str(error.value.hint)
    write_shard(tmp_path, LARGE, start=start)
    assert_sound(tmp_path)


@pytest.mark.parametrize("replacing", [False, True], ids=["new", "replacing"])
@pytest.mark.parametrize("end", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()], ids=repr)
def test_a_writer_that_ends_before_its_index_leaves_no_shard(
    tmp_path: Path, replacing: bool, end: BaseException
) -> None:
    def ends(file: object) -> None:
        raise end

    if replacing:
        write_shard(tmp_path, SAMPLES)
    with pytest.MonkeyPatch.context() as patch, pytest.raises((QieError, KeyboardInterrupt)) as error:
        patch.setattr("qie.stores.disk._sync", ends)
        write_shard(tmp_path, SAMPLES[::-1])

    assert isinstance(end, KeyboardInterrupt) or "No space left on device" in str(error.value)
    assert (names(tmp_path), published(tmp_path)) == ([TAR], []), "the new one, without the index of the old one"
    remove_abandoned(open_folder(tmp_path), (0, 3))
    assert names(tmp_path) == []
    write_shard(tmp_path, SAMPLES)
    assert names(tmp_path) == [INDEX, TAR]


@pytest.mark.parametrize("size", [0, 5_000, 15_000, 40_000])
@pytest.mark.usefixtures("noise")
def test_at_a_real_limit_nothing_is_left(tmp_path: Path, size: int) -> None:
    """What a buffer still holds then does not fit when the file is closed, either."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with pytest.raises(ShardError, match="the shard cannot be written") as error:
            write_shard(tmp_path, LARGE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert error.value.found == os.strerror(errno.EFBIG)
    assert names(tmp_path) == []


def test_of_a_disk_that_refuses_it_is_said_why(tmp_path: Path) -> None:
    for stage in ("first record", "rename"):
        for number, room in ((errno.EIO, False), (errno.EDQUOT, True)):
            with failing(stage, number), pytest.raises(ShardError) as error:
                write_shard(tmp_path, LARGE)

            assert error.value.found == os.strerror(number)
            assert ("free some space" in str(error.value.hint)) == room
            assert names(tmp_path) == []


def test_a_place_that_cannot_be_written_to_is_an_error(tmp_path: Path, s3: S3) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    refused: dict[Any, tuple[type[QieError], str]] = {
        **{tmp_path / place: (ShardError, "the shard cannot be written") for place in ("file", "file/below")},
        **dict.fromkeys(("pipe:cat", "ftp://host/x", "s3:/bucket/x"), (UsageError, "URL")),
        f"{s3.endpoint}/{s3.bucket}": (StoreError, "files cannot be written over http"),
    }

    for place, (kind, what) in refused.items():
        with pytest.raises(kind, match=what):
            write_shard(place, SAMPLES)
    assert (tmp_path / "file").read_bytes() == b"precious"


# Several writers

# Publishes row 0, then row 1; it stops before each tar gets its name and before each index comes, until it is told.
WRITER = """
import os, sys
from qie.shards.record import encode
from qie.shards.writer import ShardWriter
from qie.stores import LocalFolder
from tests.builders import RECIPE, make_entry, make_sample

def stop():
    os.write(1, b"held")
    os.read(0, 1)

write = LocalFolder.write
LocalFolder.write = lambda *arguments: (stop(), write(*arguments))
for row in range(2):
    with ShardWriter(sys.argv[1], row, row + 1, RECIPE) as shard:
        sample = make_sample(row)
        shard.add(make_entry(sample, row), encode(sample, RECIPE.digest))
        stop()
        shard.publish()
"""


def test_what_another_process_holds_is_left_to_it_until_it_has_published_or_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, tmp_path]
    one, two = "00000000-00000001", "00000001-00000002"
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, bufsize=0) as child:
        assert child.stdin is not None and child.stdout is not None
        for left in (f"{one}.tar.partial", f"{one}.tar"):
            assert child.stdout.read(4) == b"held"
            with pytest.raises(ShardBusyError, match=r"another process is (writing|publishing) this shard"):
                write_shard(tmp_path, SAMPLES[:1])
            with pytest.raises(ShardBusyError, match="some of the same rows"):
                write_shard(tmp_path, SAMPLES)
            remove_abandoned(open_folder(tmp_path), (0, 3))
            assert names(tmp_path) == [left]
            child.stdin.write(b"!")
        assert child.stdout.read(4) == b"held"
        assert_sound(tmp_path, one)
        write_shard(tmp_path, SAMPLES, start=3)
        remove_abandoned(open_folder(tmp_path), ALL)
        assert f"{two}.tar.partial" in names(tmp_path)
        child.kill()
        child.wait()

    remove_abandoned(open_folder(tmp_path), (2, 3))
    assert f"{two}.tar.partial" in names(tmp_path)
    remove_abandoned(open_folder(tmp_path), (1, 3))
    assert f"{two}.tar.partial" not in names(tmp_path)
    assert len(published(tmp_path)) == 2


def test_two_writers_in_one_process_exclude_each_other(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, 0, 3, RECIPE) as shard:
        with pytest.raises(ShardBusyError):
            write_shard(tmp_path, SAMPLES)
        add(shard, 0, 1, 2)
        remove_abandoned(open_folder(tmp_path), (0, 3))
        assert names(tmp_path) == [PARTIAL]
        shard.publish()

    assert_sound(tmp_path)


@contextmanager
def before_the_lock(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> Iterator[None]:
    """Something that happens between opening a file and locking it, once."""
    lock = fcntl.flock

    def late(handle: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        act()
        lock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    yield


@pytest.mark.parametrize("who", ["a writer", "remove_abandoned"])
@pytest.mark.parametrize("end", ["published", "given up, another began"])
def test_who_waited_for_the_lock_of_a_shard_takes_nothing_from_its_writer_or_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str, end: str
) -> None:
    """The partial file is opened; before it is locked, its writer publishes or gives up, and lets go."""
    first, third = entered(tmp_path), ShardWriter(tmp_path, 0, 3, RECIPE)

    def let_go() -> None:
        if end == "published":
            first.publish()
        first.close()
        if end != "published":
            third.__enter__()

    with before_the_lock(monkeypatch, let_go):
        if who == "a writer":
            with pytest.raises(ShardBusyError, match="has just written or abandoned this shard"):
                write_shard(tmp_path, SAMPLES[::-1])
        else:
            remove_abandoned(open_folder(tmp_path), (0, 3))
    if end != "published":
        add(third, 0, 1, 2)
        third.publish()
        third.close()

    assert names(tmp_path) == [INDEX, TAR]
    assert_sound(tmp_path)


def test_a_tar_that_gets_its_index_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tar has its name when it is looked at; before it is locked, its writer publishes and lets go."""
    shard, write, written = entered(tmp_path), LocalFolder.write, list[Any]()
    monkeypatch.setattr(LocalFolder, "write", lambda *arguments: written.extend(arguments))
    shard.publish()
    assert names(tmp_path) == [TAR]

    with before_the_lock(monkeypatch, lambda: (write(*written), shard.close())):
        remove_abandoned(open_folder(tmp_path), (0, 3))

    assert_sound(tmp_path)


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

    assert busy == [TAR]
    assert contents(tmp_path) == contents(folder)


@pytest.mark.parametrize("rows", [(0, 2), (2, 5), (0, 9), (1, 2)], ids=str)
def test_rows_that_another_shard_holds_are_not_written_again(tmp_path: Path, rows: tuple[int, int]) -> None:
    write_shard(tmp_path, SAMPLES)
    with pytest.raises(ShardOverlapError, match="another shard holds some of these rows") as caught:
        ShardWriter(tmp_path, *rows, RECIPE).__enter__()
    assert INDEX in str(caught.value)
    assert names(tmp_path) == [INDEX, TAR]
    with ShardWriter(tmp_path, 3, 9, RECIPE), ShardWriter(tmp_path, 0, 3, RECIPE):
        pass


# What killed writers left

OURS = "00000064-00000128"
ABANDONED = [f"{OURS}.tar", f"{OURS}.tar.partial", f"{OURS}.json.partial"]


def touch(folder: Path, *files: str) -> None:
    for name in files:
        (folder / name).write_bytes(b"left behind" * 10_000)


@pytest.mark.parametrize("left", [ABANDONED, *([name] for name in ABANDONED)], ids=len)
def test_what_killed_writers_left_of_overlapping_rows_is_removed(tmp_path: Path, left: list[str]) -> None:
    for apart in [(0, 64), (128, 192), (0, 0), (500, 10**12)]:
        touch(tmp_path, *left)
        remove_abandoned(open_folder(tmp_path), apart)
        assert names(tmp_path) == sorted(left), apart
    for overlapping in [(64, 128), (0, 65), (127, 500), (100, 101), ALL]:
        touch(tmp_path, *left)
        remove_abandoned(open_folder(tmp_path), overlapping)
        assert names(tmp_path) == [], overlapping


OTHERS = [
    *("config.json.partial", "photo.tar", "photo.partial", "0-64.tar.partial", f"x{OURS}.tar", f"{OURS}-x.tar.partial"),
    *(f"{OURS}.json", f"{OURS}.tar.gz", f"{OURS}.txt", OURS, "partial", ".partial"),
]


def test_published_shards_folders_and_files_that_no_writer_leaves_stay(tmp_path: Path, folder: Path) -> None:
    remove_abandoned(open_folder(tmp_path / "gone"), (0, 64))
    (tmp_path / "00000400-00000500.tar.partial").symlink_to(tmp_path / "gone")
    write_shard(tmp_path, SAMPLES)
    touch(tmp_path, PARTIAL, f"{STEM}.json.partial", *OTHERS)
    below = [tmp_path / name.replace(OURS, "00000200-00000300") for name in ABANDONED]
    for path in below:
        path.mkdir()
        touch(path, *ABANDONED)

    remove_abandoned(open_folder(tmp_path), ALL)

    assert names(tmp_path) == sorted(
        [INDEX, TAR, *OTHERS, "00000400-00000500.tar.partial", *(path.name for path in below)]
    )
    assert contents(folder).items() <= contents(tmp_path).items()
    assert all(names(path) == sorted(ABANDONED) for path in below)


# In a bucket


def listed(remote: Any) -> dict[str, bytes]:
    return {name: remote.read(name) for name in remote.listing()}


def test_a_shard_in_a_bucket_is_the_shard_on_a_disk_and_shows_only_when_it_is_published(
    s3: S3, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = open_folder(f"{s3.url}/new/shards")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with ShardWriter(remote.url, 0, 3, RECIPE) as shard:
        shard.skip(make_skipped(0))
        assert remote.listing() == {}
        assert (shard.index_file.path, str(shard.index_file)) == (None, f"{remote.url}/{INDEX}")
        assert names(tmp_path) == [], "nothing is on the disk: who kills the writer leaves nothing"

    index = write_shard(remote, SAMPLES)

    assert names(tmp_path) == []
    assert index == read_index(folder / INDEX)
    assert published(remote) == [shard.index_file]
    assert listed(remote) == contents(folder)
    assert_sound(remote.url)


def test_in_a_bucket_the_index_goes_first_and_comes_last_and_given_up_nothing_changes(
    s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    with pytest.raises(RuntimeError), ShardWriter(s3.url, 0, 3, RECIPE) as shard:
        add(shard, 2, 1)
        raise RuntimeError("the encoder broke")
    assert seen == []
    write_shard(s3.url, SAMPLES[::-1])

    assert seen == [("delete", INDEX, [INDEX, TAR]), ("upload", TAR, [TAR]), ("write", INDEX, [TAR])]
    assert_sound(s3.url)


def test_in_a_bucket_rows_that_another_shard_got_meanwhile_are_not_published(s3: S3) -> None:
    """There are no locks, so it is seen when the shard is done."""
    with ShardWriter(s3.url, 0, 2, RECIPE) as shard:
        add(shard, 0, 1)
        write_shard(s3.url, SAMPLES)
        with pytest.raises(ShardOverlapError):
            shard.publish()
    assert list(open_folder(s3.url).listing()) == [INDEX, TAR]


def test_a_store_that_refuses_leaves_no_new_shard(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: ObjectFolder, *_: object) -> None:
        raise StoreError("a store denies access", where=self.url)

    for method in ("delete", "upload", "write"):
        with monkeypatch.context() as patch, pytest.raises(StoreError, match="a store denies access"):
            patch.setattr(ObjectFolder, method, refuse)
            write_shard(s3.url, SAMPLES)
        assert published(s3.url) == []


def test_a_full_disk_leaves_a_bucket_as_it_was(s3: S3) -> None:
    for stage in STAGES[1:-1]:
        with failing(stage), pytest.raises(ShardError, match="the shard cannot be written") as error:
            write_shard(s3.url, LARGE)

        assert str(error.value.where) == tempfile.gettempdir()
        assert "free some space" in str(error.value.hint)
        assert open_folder(s3.url).listing() == {}


def test_in_a_bucket_nothing_is_taken_for_abandoned(s3: S3) -> None:
    """Whose tar it is cannot be seen there: there are no locks."""
    remote = open_folder(s3.url)
    for name in ABANDONED:
        remote.write(name, b"")

    remove_abandoned(remote, ALL)

    assert list(remote.listing()) == sorted(ABANDONED)


def test_a_shard_on_the_hub_is_the_shard_on_a_disk_byte_by_byte(hub: FakeHub, folder: Path) -> None:
    place = f"{hub.folder_url}/new/shards"

    write_shard(place, SAMPLES)

    assert {name.rpartition("/")[2]: content for name, content in hub.files.items()} == contents(folder)
    shards = ShardSet.open([f"{place}/*.tar"])
    for position, sample in enumerate(SAMPLES):
        assert_same(shards.load(position), sample)
    assert_sound(place)
