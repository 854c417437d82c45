"""Remote shards on a local disk: fetched once, whole and sound or not at all, and never more than the budget."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from qie.errors import QieError, ShardError
from qie.shards.cache import ShardCache
from qie.shards.index import ShardIndex
from qie.shards.reader import Shard, Tar
from qie.shards.shard_set import ShardSet, Verify
from qie.stores import File, MissingError, StoreError
from tests.builders import assert_same, make_sample, rewrite_index, same_bits, write_shard
from tests.conftest import ROOT
from tests.s3 import without_clouds
from tests.stores.servers import Ranged, serving

SAMPLES = [make_sample(seed) for seed in range(4)]
STEMS = [f"{row:08d}-{row + 1:08d}" for row in range(4)]
BIG = 1 << 40


@dataclass
class Web:
    """A web server of the files in a folder.

    Attributes:
        asked: the ranges of tars that were asked for, as (name, range).
        serve: changes what is sent of a tar; called for every such request.
    """

    folder: Path
    url: str = ""
    asked: list[tuple[str, str]] = field(default_factory=list)
    serve: Callable[[str, bytes], bytes] = lambda name, content: content

    def tar(self, number: int = 0) -> File:
        return File.at(f"{self.url}/{STEMS[number]}.tar")

    def index(self, number: int = 0) -> ShardIndex:
        return Shard(self.folder / f"{STEMS[number]}.json").index

    def content(self, number: int = 0) -> bytes:
        return (self.folder / f"{STEMS[number]}.tar").read_bytes()

    def open(self, cache: ShardCache | None, verify: Verify = "first", count: int = 4) -> ShardSet:
        return ShardSet.open([f"{self.url}/{stem}.tar" for stem in STEMS[:count]], verify=verify, cache=cache)

    def fetch(self, cache: ShardCache, number: int = 0) -> Path | None:
        index = self.index(number)
        return cache.fetch(self.tar(number), index.filesize, index.sha256)

    def fetches(self) -> list[str]:
        """Of each download, the name; tars are so small that one request has it whole."""
        return [name.removesuffix(".tar") for name, _ in self.asked]


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    """Four shards of one sample each, and of one size."""
    without_clouds(monkeypatch)
    web = Web(tmp_path / "web")
    for row, sample in enumerate(SAMPLES):
        write_shard(web.folder, [sample], start=row)

    class Handler(Ranged):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(web.folder))

        def do_GET(self) -> None:
            name, asked = self.path.rpartition("/")[2], self.headers.get("Range")
            if not name.endswith(".tar") or asked is None or not (web.folder / name).is_file():
                super().do_GET()
                return
            web.asked.append((name, asked))
            content = web.serve(name, (web.folder / name).read_bytes())
            first, _, last = asked.removeprefix("bytes=").partition("-")
            part = content[int(first) : int(last) + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part)

    with serving(Handler) as web.url:
        yield web


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def size_of(web: Web) -> int:
    (size,) = {(web.folder / f"{stem}.tar").stat().st_size for stem in STEMS}
    return size


def copies(root: Path) -> dict[str, int]:
    """The copies in a cache, and their sizes."""
    return {path.stem: path.stat().st_size for path in root.glob("*.tar")}


def flipped(content: bytes, offset: int = 3000) -> bytes:
    damaged = bytearray(content)
    damaged[offset] ^= 1
    return bytes(damaged)


def damage(path: Path, offset: int) -> None:
    """Flip a bit of a file in place, as a disk would."""
    path.write_bytes(flipped(path.read_bytes(), offset))


def last_of_record(web: Web, number: int = 0) -> int:
    (member,) = web.index(number).files.values()
    return member.offset + member.size - 1


# Fetched once


def test_a_copy_is_what_lies_there_under_the_name_of_its_content_fetched_when_first_read(web: Web, root: Path) -> None:
    shards = web.open(ShardCache(root, BIG))
    assert (web.asked, root.exists()) == ([], False)

    shards.load(0)

    (path,) = root.glob("*.tar")
    assert path == root / f"{hashlib.sha256(web.content()).hexdigest()}.tar"
    assert path.read_bytes() == web.content()


def test_samples_come_from_the_copy(web: Web, root: Path) -> None:
    for _ in range(2):  # as in another process
        shards = web.open(ShardCache(root, BIG))
        for _ in range(2):
            for position, sample in enumerate(SAMPLES):
                assert same_bits(shards.fetch(position).pixel_latent, sample.pixel_latent)
                assert_same(shards.load(position), sample)

    assert sorted(web.fetches()) == STEMS


def test_shards_on_a_local_disk_are_not_copied(web: Web, root: Path) -> None:
    shards = ShardSet.open([web.folder], cache=ShardCache(root, BIG))

    assert_same(shards.load(0), SAMPLES[0])
    assert not root.exists()


def test_a_large_tar_comes_in_parts_each_of_them_once(web: Web, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qie.shards.cache.PART_BYTES", 1000)
    size = size_of(web)

    path = web.fetch(ShardCache(root, BIG))

    assert path is not None and path.read_bytes() == web.content()
    expected = [f"bytes={start}-{min(start + 1000, size) - 1}" for start in range(0, size, 1000)]
    assert sorted(asked for _, asked in web.asked) == sorted(expected)


def test_many_threads_fetch_a_tar_once(web: Web, root: Path) -> None:
    caches = [ShardCache(root, BIG) for _ in range(4)]
    start = threading.Barrier(16)

    def fetch(number: int) -> Path | None:
        start.wait()
        return web.fetch(caches[number % 4], number % 2)

    with ThreadPoolExecutor(16) as pool:
        paths = list(pool.map(fetch, range(16)))

    assert sorted(web.fetches()) == STEMS[:2]
    assert len(set(paths)) == 2


CHILD = """
import sys
from pathlib import Path
import qie.shards.cache
from qie.shards.cache import ShardCache
from qie.stores import File
qie.shards.cache.PART_BYTES = 1000
root, url, size, sha256 = sys.argv[1:]
print("ready", flush=True)
print(ShardCache(Path(root), 1 << 40).fetch(File.at(url), int(size), sha256), flush=True)
"""


def child(web: Web, root: Path) -> subprocess.Popen[str]:
    """Another process, about to fetch the first tar, in parts of 1,000 bytes."""
    index = web.index()
    arguments = [root, str(web.tar()), str(index.filesize), index.sha256]
    process = subprocess.Popen([sys.executable, "-c", CHILD, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_two_processes_fetch_a_tar_once(web: Web, root: Path) -> None:
    both_run = threading.Event()
    web.serve = lambda name, content: content if both_run.wait(200) else b""

    with ThreadPoolExecutor(1) as pool:
        theirs, ours = child(web, root), pool.submit(web.fetch, ShardCache(root, BIG))
        both_run.set()
        said = theirs.communicate(timeout=200)[0].strip()

    assert said == str(ours.result()) and ours.result().read_bytes() == web.content()
    assert web.fetches() in (STEMS[:1], STEMS[:1] * -(-size_of(web) // 1000)), "by one, in its parts"


# Nothing but what the index describes


def test_a_download_that_was_damaged_is_fetched_once_more(web: Web, root: Path) -> None:
    damages = iter([True])
    web.serve = lambda name, content: flipped(content) if next(damages, False) else content

    path = web.fetch(ShardCache(root, BIG))

    assert path is not None and path.read_bytes() == web.content()
    assert len(web.asked) == 2


def test_a_download_that_is_damaged_twice_is_refused_and_not_kept_and_asked_for_again_the_next_time(
    web: Web, root: Path
) -> None:
    web.serve = lambda name, content: flipped(content)
    shards = web.open(ShardCache(root, BIG))

    with pytest.raises(ShardError, match="a shard is damaged") as error:
        shards.load(0)

    assert str(error.value.where) == str(web.tar())
    found = hashlib.sha256(flipped(web.content())).hexdigest()
    assert (error.value.expected, error.value.found) == (f"SHA-256 {web.index().sha256}", found)
    assert len(web.asked) == 2
    assert [path.name for path in root.iterdir() if path.suffix != ".lock"] == []

    web.serve = lambda name, content: content
    assert_same(shards.load(0), SAMPLES[0])


def test_a_tar_that_is_gone_or_shorter_is_an_error_and_leaves_no_copy(web: Web, root: Path) -> None:
    shards = web.open(ShardCache(root, BIG))
    (web.folder / f"{STEMS[0]}.tar").write_bytes(b"short")
    (web.folder / f"{STEMS[1]}.tar").unlink()

    for position, error in enumerate((StoreError, MissingError)):
        with pytest.raises(error):
            shards.load(position)
    assert copies(root) == {}
    assert_same(shards.load(2), SAMPLES[2])


@pytest.mark.parametrize("parts", [0, 5])
def test_a_process_that_is_killed_in_the_middle_leaves_nothing_wrong(web: Web, root: Path, parts: int) -> None:
    reached, killed = threading.Event(), threading.Event()

    def serve(name: str, content: bytes) -> bytes:
        if len(web.asked) > parts and not killed.is_set():
            reached.set()
            killed.wait(200)
        return content

    web.serve = serve
    process = child(web, root)
    assert reached.wait(200)
    process.send_signal(signal.SIGKILL)
    process.wait(200)
    if process.stdout:
        process.stdout.close()
    killed.set()
    assert copies(root) == {}

    path = web.fetch(ShardCache(root, BIG))

    assert path is not None and path.read_bytes() == web.content()
    assert {one.suffix for one in root.iterdir()} == {".lock", ".tar"}


def test_what_killed_processes_left_is_no_copy_and_does_not_fill_the_disk(web: Web, root: Path) -> None:
    """Whatever stands in a partial file, of a tar that is never asked for again, or under the name, if sizes differ."""
    root.mkdir()
    sha256 = web.index().sha256
    (root / f"{'0' * 64}.tar.partial").write_bytes(bytes(100_000))
    (root / f"{sha256}.tar.partial").write_bytes(b"x" * 99_999)
    (root / f"{sha256}.tar").write_bytes(b"half")
    cache = ShardCache(root, size_of(web))

    path = web.fetch(cache)

    assert path is not None and path.read_bytes() == web.content()
    assert len(web.asked) == 1
    assert sum(path.stat().st_size for path in root.iterdir()) <= cache.budget_bytes


# Damaged copies


@pytest.mark.parametrize("verify", ["first", "always"])
def test_a_copy_that_was_damaged_on_the_disk_is_noticed_and_fetched_once_more(
    web: Web, root: Path, verify: Verify
) -> None:
    path = web.fetch(ShardCache(root, BIG))
    assert path is not None
    damage(path, last_of_record(web))
    web.asked.clear()

    shards = web.open(ShardCache(root, BIG), verify)

    for _ in range(2):
        assert same_bits(shards.fetch(0).prompt_embeds_mask, SAMPLES[0].prompt_embeds_mask)
        assert_same(shards.load(0), SAMPLES[0])
    assert web.fetches() == STEMS[:1]
    assert path.read_bytes() == web.content()


def test_a_record_that_is_damaged_in_the_store_too_is_refused_after_one_more_fetch(web: Web, root: Path) -> None:
    """The tar's own hash holds: whoever made the index hashed a record that was not the one in the tar."""
    index = web.folder / f"{STEMS[0]}.json"
    rewrite_index(index, lambda values: next(iter(values["files"].values())).update(xxh3_128="1" * 32), own_hash=True)
    shards = web.open(ShardCache(root, BIG))

    with pytest.raises(ShardError, match="a record is damaged") as error:
        shards.fetch(0)

    assert str(error.value.where).startswith(f"{web.tar()}, {SAMPLES[0].key}, at ")
    assert web.fetches() == STEMS[:1] * 2


def test_two_threads_that_notice_the_same_damage_both_get_the_sample(
    web: Web, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have read the damaged copy before either of them drops it."""
    path = web.fetch(ShardCache(root, BIG))
    assert path is not None
    damage(path, last_of_record(web))
    both_read, both_dropped, one_at_a_time = threading.Barrier(2), threading.Barrier(2), threading.Lock()
    forget = Tar.forget_copy

    def together(self: Tar, *arguments: object) -> bool:
        both_read.wait(200)
        with one_at_a_time:
            dropped = forget(self, *arguments)
        both_dropped.wait(200)
        return dropped

    monkeypatch.setattr(Tar, "forget_copy", together)
    shards = web.open(ShardCache(root, BIG), count=1)

    with ThreadPoolExecutor(2) as pool:
        for sample in pool.map(shards.load, [0, 0]):
            assert_same(sample, SAMPLES[0])


# The budget


def test_the_budget_is_never_exceeded_and_what_was_used_longest_ago_goes_first(web: Web, root: Path) -> None:
    size = size_of(web)
    cache = ShardCache(root, 2 * size + size // 2)
    names = [web.index(number).sha256 for number in range(4)]
    moments = iter(range(1, 100))

    def use(number: int) -> None:
        path = web.fetch(cache, number)
        assert path is not None
        os.utime(path, ns=(0, next(moments)))  # a clock whose ticks never fall together
        assert sum(copies(root).values()) <= cache.budget_bytes

    for number, left in [(0, {0}), (1, {0, 1}), (0, {0, 1}), (2, {0, 2}), (3, {2, 3}), (2, {2, 3}), (1, {1, 2})]:
        use(number)
        assert copies(root).keys() == {names[one] for one in left}
    assert web.fetches() == [STEMS[number] for number in (0, 1, 2, 3, 1)]


def test_what_is_on_its_way_has_its_room(web: Web, root: Path) -> None:
    """A second tar is asked for while the first one comes: there is room for one."""
    cache = ShardCache(root, size_of(web))
    meanwhile: list[Path | None] = []

    def serve(name: str, content: bytes) -> bytes:
        meanwhile.append(web.fetch(cache, 1))
        return content

    web.serve = serve

    assert web.fetch(cache) is not None and meanwhile == [None]
    assert web.fetches() == STEMS[:1]


def test_what_is_read_is_used_even_if_it_was_opened_first(web: Web, root: Path) -> None:
    """The first shard is read all the time, the second once: it is the second that goes."""
    cache = ShardCache(root, 2 * size_of(web))
    shards = web.open(cache)
    names = [web.index(number).sha256 for number in range(4)]
    for number in (0, 1):
        shards.load(number)
        os.utime(root / f"{names[number]}.tar", ns=(0, 1 + number))

    shards.load(0)
    shards.load(2)

    assert copies(root).keys() == {names[0], names[2]}


@pytest.mark.parametrize("budget", [0, -1])
def test_a_tar_larger_than_the_budget_is_not_copied_but_read_by_ranges(web: Web, root: Path, budget: int) -> None:
    cache = ShardCache(root, size_of(web) - 1 if budget else 0)
    assert web.fetch(cache) is None
    shards = web.open(cache)

    for _ in range(2):
        assert_same(shards.load(1), SAMPLES[1])

    assert not root.exists()
    (member,) = web.index(1).files.values()
    assert web.asked == [(f"{STEMS[1]}.tar", f"bytes={member.offset}-{member.offset + member.size - 1}")] * 2


def test_what_goes_stays_readable_and_takes_no_room_on_the_disk(web: Web, root: Path) -> None:
    """A file that is deleted but mapped would still be on the disk."""
    shards = web.open(ShardCache(root, size_of(web)))

    samples = [shards.load(position) for position in (0, 1, 2, 3, 0, 1, 2, 3)]

    assert copies(root).keys() == {web.index(3).sha256}
    for found, sample in zip(samples, SAMPLES * 2, strict=True):
        assert_same(found, sample)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(root) in line]
    assert len({line.split()[4] for line in maps}) <= 2, "inodes: the budget is one tar; another may be about to go"


def test_a_copy_that_goes_before_it_is_mapped_is_fetched_again(
    web: Web, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two, another process makes room."""
    fetch = ShardCache.fetch
    evictions = iter([True])

    def evicted(self: ShardCache, *arguments: Any) -> Path | None:
        path = fetch(self, *arguments)
        if path is not None and next(evictions, False):
            path.unlink()
        return path

    monkeypatch.setattr(ShardCache, "fetch", evicted)

    assert_same(web.open(ShardCache(root, BIG)).load(0), SAMPLES[0])


def test_files_that_are_not_the_cache_s_stay_whatever_the_budget(web: Web, root: Path) -> None:
    """Someone's own shards, in the folder that they named."""
    write_shard(root, SAMPLES)
    own = {path.name: path.read_bytes() for path in root.iterdir()}
    cache = ShardCache(root, size_of(web))

    for number in range(4):
        web.fetch(cache, number)

    assert {name: (root / name).read_bytes() for name in own if (root / name).exists()} == own


def test_a_cache_that_cannot_be_written_is_an_error_that_names_it(web: Web, root: Path) -> None:
    root.write_bytes(b"a file")

    with pytest.raises((QieError, OSError)) as error:
        web.open(ShardCache(root, BIG)).load(0)

    assert str(root) in str(error.value)
