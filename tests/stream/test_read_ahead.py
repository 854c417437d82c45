"""Shards fetched ahead: in the order of the plan, within the budget, once a machine, and gone with the stream."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from qie.data.kept_samples import Keep, KeptSamples
from qie.data.opening import open_stream
from qie.data.read_ahead import ReadAhead
from qie.data.stream import Stream
from qie.errors import QieError
from qie.shards import cache as cache_module
from qie.shards.cache import Ahead, Announcement, ShardCache
from qie.shards.shard_set import ShardSet, open_shards
from qie.stores import File, Folder, LocalFolder, StoreError
from qie.threads import Threads
from tests.builders import make_sample, write_shard
from tests.conftest import ROOT
from tests.stores.servers import Ranged, serving
from tests.stream.checks import all_facts

SHARDS, OF_A_SHARD, BLOCK = 8, 2, 2
STEMS = [f"{row:08d}-{row + OF_A_SHARD:08d}" for row in range(0, SHARDS * OF_A_SHARD, OF_A_SHARD)]
BIG = 1 << 40
LONG_S = 100
"""Far more than anything takes: what does not come in time does not come."""


@dataclass
class Store:
    """A folder as a store far away: it counts what is asked of it.

    Attributes:
        asked: the numbers of shards of which a part was asked for, in that order.
        meet: called before a part is given, with its shard.
    """

    there: LocalFolder
    asked: list[int] = field(default_factory=list)
    meet: Callable[[int], object] = lambda shard: None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.there, name)

    def path(self, name: str) -> None:
        return None

    def read(self, name: str, *arguments: Any, **settings: Any) -> bytes:
        if name.endswith(".tar"):
            shard = STEMS.index(name.removesuffix(".tar"))
            with self.changed:
                self.asked.append(shard)
                self.changed.notify_all()
            self.meet(shard)
        return self.there.read(name, *arguments, **settings)

    def wait(self, until: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(until, LONG_S), f"asked for {self.asked}"

    def open(self, cache: ShardCache | None) -> ShardSet:
        indexes = [File(cast(Folder, self), f"{stem}.json") for stem in STEMS]
        return ShardSet(open_shards(indexes, cache))

    def stream(self, cache: ShardCache | None, order: str = "blocks", **settings: Any) -> Stream:
        """Batches of one sample, of which none is prepared before it is asked for."""
        stream = Stream.over(self.open(cache), order=order, block_size=BLOCK, prefetch=0, threads=1, **settings)
        self.asked.clear()
        return stream


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Shards of two samples each, and of one size."""
    folder = tmp_path / "store"
    for number, stem in enumerate(STEMS):
        row = number * OF_A_SHARD
        write_shard(folder, [make_sample(row + one, prompt="bluer") for one in range(OF_A_SHARD)], start=row)
        assert (folder / f"{stem}.tar").exists()
    return Store(LocalFolder(folder))


@pytest.fixture
def cache(tmp_path: Path) -> ShardCache:
    return ShardCache(tmp_path / "copies", BIG)


def size_of(store: Store) -> int:
    (size,) = {(store.there.root / f"{stem}.tar").stat().st_size for stem in STEMS}
    return size


def room(cache: ShardCache, store: Store, shards: int) -> ShardCache:
    """For so many shards, three quarters of them ahead."""
    return ShardCache(cache.root, shards * size_of(store))


def shards_of(stream: Stream, epochs: int = 1) -> list[int]:
    """The shard of each batch."""
    plans = [stream.plans.of(epoch) for epoch in range(epochs)]
    return [batch.positions[0] // OF_A_SHARD for plan in plans for batch in plan]


def name_of(store: Store, shard: int) -> str:
    return ShardSet.open(store.there.root / f"{STEMS[shard]}.tar")._tars[0].sha256


def copies(cache: ShardCache) -> set[str]:
    return {path.stem for path in cache.root.glob("*.tar")}


def fetch_ahead(cache: ShardCache, store: Store, shard: int) -> Ahead:
    (tar,) = ShardSet.open(store.there.root / f"{STEMS[shard]}.tar")._tars
    return cache.fetch_ahead(File(cast(Folder, store), tar.file.name), tar.size, tar.sha256)


@contextmanager
def another_fetches(cache: ShardCache, store: Store, shard: int) -> Iterator[None]:
    """As if another process were fetching a shard."""
    cache.root.mkdir(exist_ok=True)
    with (cache.root / f"{name_of(store, shard)}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# The order of the plan


def test_the_shards_of_the_next_block_are_asked_for_while_the_first_one_is_trained_on(
    store: Store, cache: ShardCache
) -> None:
    stream = store.stream(cache)
    with closing(iter(stream)) as batches:
        next(batches)
        store.wait(lambda: set(store.asked) == set(range(SHARDS)))
    assert sorted(store.asked) == list(range(SHARDS)), "each once"


def test_they_are_asked_for_in_the_order_in_which_the_plan_needs_them(
    store: Store, cache: ShardCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qie.data.read_ahead.PARTS_AT_ONCE", 1)
    stream = store.stream(cache)
    expected = list(dict.fromkeys(shards_of(stream)))
    with closing(iter(stream)) as batches:
        next(batches)
        store.wait(lambda: len(store.asked) == SHARDS)
    # The first one is asked for by the reader or ahead; meanwhile the second may be asked for.
    assert [shard for shard in store.asked if shard != expected[0]] == expected[1:]


def test_one_that_another_process_is_fetching_is_passed_over_and_looked_at_again(
    store: Store, cache: ShardCache
) -> None:
    stream = store.stream(cache)
    busy = shards_of(stream)[-1]
    with closing(iter(stream)) as batches:
        with another_fetches(cache, store, busy):
            assert fetch_ahead(cache, store, busy) is Ahead.BUSY
            next(batches)
            store.wait(lambda: set(store.asked) == set(range(SHARDS)) - {busy})
        next(batches)
        store.wait(lambda: busy in store.asked)


def test_those_of_the_next_epoch_are_asked_for_in_this_one(store: Store, cache: ShardCache) -> None:
    """The next one begins with the block that this one began with, of which copies have gone."""
    block, epoch = BLOCK * OF_A_SHARD, SHARDS * OF_A_SHARD
    for seed in range(100):
        stream = store.stream(room(cache, store, 6), seed=seed)
        planned = shards_of(stream, 2)
        if set(planned[:block]) == set(planned[epoch : epoch + block]):
            break
    with closing(stream.forever()) as batches:
        assert len(all_facts(batches, epoch - 1)) == epoch - 1
        store.wait(lambda: any(store.asked.count(shard) == 2 for shard in planned[:block]))
        assert stream.epoch == 0


def test_nothing_is_fetched_for_batches_behind_the_end_of_a_run(store: Store, cache: ShardCache) -> None:
    """It may ask for more nevertheless."""
    stream = store.stream(cache)
    stream.prefetch = 3
    count = BLOCK * OF_A_SHARD + 1
    planned = shards_of(stream)
    with closing(stream.forever(count)) as batches:
        assert len(all_facts(batches, count)) == count
        assert set(store.asked) == set(planned[:count])
        assert len(all_facts(batches, 3)) == 3
    assert sorted(store.asked) == sorted(set(planned[: count + 3]))


def test_a_stream_that_goes_on_in_the_middle_fetches_what_follows_alone(store: Store, cache: ShardCache) -> None:
    stream = store.stream(cache)
    stream.position = 2 * BLOCK * OF_A_SHARD
    needed = set(shards_of(stream)[stream.position :])
    assert len(all_facts(stream)) == len(stream.plan) // 2
    assert sorted(store.asked) == sorted(needed)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_fetches_what_its_slice_of_the_batches_needs(store: Store, cache: ShardCache, rank: int) -> None:
    stream = store.stream(cache, batch_size=2, rank=rank, world_size=2, order="sequence")
    assert len(all_facts(stream)) == SHARDS // 2
    assert sorted(store.asked) == list(range(rank, SHARDS, 2)), "each other shard"


# The budget


@pytest.mark.parametrize("order", ["blocks", "shuffle"])
@pytest.mark.parametrize("shards", [1, 2, 4, 5])
def test_never_more_is_ahead_than_the_budget_allows_and_progress_makes_room(
    store: Store, cache: ShardCache, shards: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = room(cache, store, shards)
    stream = store.stream(cache, order=order)
    planned, faults = shards_of(stream), list[str]()
    done, loaded = 0, ReadAhead.loaded

    def counted(self: ReadAhead) -> None:
        nonlocal done
        done += 1
        loaded(self)

    monkeypatch.setattr(ReadAhead, "loaded", counted)

    def ahead_of(batch: int) -> int:
        """Up to which batch the window goes."""
        window = set[int]()
        for number in range(batch, len(planned)):
            window.add(planned[number])
            if len(window) * size_of(store) > cache.ahead_bytes:
                return number
        return len(planned)

    def meet(shard: int) -> None:
        if shard not in planned[: max(ahead_of(done), done + 1)]:
            faults.append(f"{shard} after {done} batches")
        there = {
            path.name[:64] for path in cache.root.iterdir() if ".tar" in path.name
        }  # one is being renamed, perhaps
        if len(there) > shards:
            faults.append(f"room for {len(there)}")

    store.meet = meet
    with closing(iter(stream)) as batches:
        for _ in batches:
            store.wait(lambda: set(store.asked) >= set(planned[done : ahead_of(done)]))
    assert not faults
    if order == "blocks" and shards > BLOCK:
        assert sorted(store.asked) == list(range(SHARDS)), "each once, though there is no room for all"


def test_what_another_process_announces_takes_no_room_from_it_and_is_waited_for(
    store: Store, cache: ShardCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four places, three are for what is ahead; somebody else has two of them."""
    cache = room(cache, store, 4)
    stream = store.stream(cache, order="sequence")
    told, full = Announcement(cache), threading.Event()
    theirs = [name_of(store, shard) for shard in (6, 7)]
    told.tell(theirs)
    assert [fetch_ahead(cache, store, shard) for shard in (6, 7)] == [Ahead.THERE] * 2
    fetch = ShardCache.fetch_ahead

    def noticed(self: ShardCache, *arguments: Any) -> Ahead:
        outcome = fetch(self, *arguments)
        if outcome is Ahead.FULL:
            full.set()
        return outcome

    monkeypatch.setattr(ShardCache, "fetch_ahead", noticed)
    with closing(iter(stream)) as batches:
        next(batches)
        assert full.wait(LONG_S)
        assert copies(cache) >= set(theirs)
        told.close()
        next(batches)
        store.wait(lambda: {0, 1, 2} <= set(store.asked))


def test_what_is_needed_soon_goes_last_and_of_that_what_is_needed_last(store: Store, cache: ShardCache) -> None:
    """Whatever was used when."""
    cache = room(cache, store, 4)
    told = Announcement(cache)
    names = [name_of(store, shard) for shard in range(SHARDS)]
    told.tell([names[2], names[0], names[1]])
    assert [fetch_ahead(cache, store, shard) for shard in (0, 1, 2)] == [Ahead.THERE] * 3
    shards = store.open(cache)

    left = []
    for shard in (3, 4, 5):  # nobody has announced them
        shards.load(shard * OF_A_SHARD)
        left.append(copies(cache))
    assert left == [{*names[:3], names[shard]} for shard in (3, 4, 5)]
    told.tell([names[shard] for shard in (5, 2, 0, 1)])
    shards.load(6 * OF_A_SHARD)
    assert copies(cache) == {names[shard] for shard in (5, 2, 0, 6)}
    told.close()


def test_the_announcement_of_a_process_that_was_killed_holds_nothing(store: Store, cache: ShardCache) -> None:
    cache = room(cache, store, 2)
    cache.root.mkdir()
    names = [name_of(store, shard) for shard in range(3)]
    left = cache.root / "123-0123abcd.soon"
    left.write_text("\n".join(names))
    own = cache.root / "notes.soon"
    own.write_text("somebody's")
    for shard in range(3):
        store.open(cache).load(shard * OF_A_SHARD)
    assert copies(cache) == set(names[1:])
    assert own.exists() and not left.exists()


# One machine

CHILD = """
import sys
from pathlib import Path
from qie.data.opening import open_stream
from qie.shards.cache import ShardCache
url, root = sys.argv[1:]
cache = ShardCache(Path(root), 1 << 40)
stream = open_stream(url, cache=cache, order="blocks", block_size=2, rank=1, world_size=2)
print("ready", flush=True)
sys.stdin.readline()
print(sum(1 for batch in stream), flush=True)
"""


def test_two_processes_of_a_machine_fetch_each_shard_once(store: Store, cache: ShardCache) -> None:
    asked = list[str]()

    class Handler(Ranged):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(store.there.root))

        def do_GET(self) -> None:
            asked.append(Path(self.path).name)
            super().do_GET()

    with serving(Handler) as url:
        place, pipe = f"{url}/{{{','.join(STEMS)}}}.tar", subprocess.PIPE
        command = [sys.executable, "-c", CHILD, place, str(cache.root)]
        with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as other:
            assert other.stdout is not None and other.stdout.readline() == "ready\n"
            stream = open_stream(place, cache=cache, order="blocks", block_size=2, rank=0, world_size=2)
            asked.clear()
            assert other.stdin is not None
            other.stdin.write("go\n")
            other.stdin.flush()
            assert len(all_facts(stream)) == SHARDS * OF_A_SHARD // 2
            assert other.stdout.readline() == f"{SHARDS * OF_A_SHARD // 2}\n"
    assert sorted(name for name in asked if name.endswith(".tar")) == [f"{stem}.tar" for stem in STEMS]


# Bad days


def test_a_shard_that_fails_in_the_background_is_an_error_of_the_batch_that_needs_it_alone(
    store: Store, cache: ShardCache
) -> None:
    stream = store.stream(cache)
    planned = shards_of(stream)
    broken = planned[-1]
    first = planned.index(broken)

    def meet(shard: int) -> None:
        if shard == broken:
            raise StoreError("no answer", where=STEMS[shard])

    store.meet = meet
    batches = iter(stream)
    next(batches)
    store.wait(lambda: set(store.asked) == set(range(SHARDS)))
    assert len(all_facts(batches, first - 1)) == first - 1
    with pytest.raises(StoreError, match="no answer"):
        next(batches)
    assert stream.position == first


def test_a_folder_that_cannot_be_written_is_an_error_of_the_first_batch(store: Store, cache: ShardCache) -> None:
    cache.root.write_bytes(b"a file")
    with pytest.raises((QieError, OSError), match=str(cache.root)):
        next(iter(store.stream(cache)))


# The end


def test_closing_gives_up_what_is_on_its_way_and_leaves_nothing_behind(
    store: Store, cache: ShardCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard comes in many parts; of the second block's, all wait for the end."""
    monkeypatch.setattr("qie.shards.cache.PART_BYTES", size_of(store) // 16)
    closing_now, stop = threading.Event(), Threads.stop

    def stopped(self: Threads) -> None:
        self._asked.set()
        if self._running:  # those who fetch ahead, and not the loads, which are a pool's
            closing_now.set()
        stop(self)

    monkeypatch.setattr(Threads, "stop", stopped)
    stream = store.stream(cache)
    planned = shards_of(stream)
    block = set(planned[: BLOCK * OF_A_SHARD])
    store.meet = lambda shard: shard in block or closing_now.wait(LONG_S)
    batches = iter(stream)
    next(batches)
    store.wait(lambda: any(shard not in block for shard in store.asked))

    cast(Any, batches).close()

    assert all(store.asked.count(shard) < 16 for shard in set(store.asked) - block)
    assert {path.suffix for path in cache.root.iterdir()} <= {".lock", ".tar"}
    assert copies(cache) <= {name_of(store, shard) for shard in block}


def test_closing_does_not_wait_for_a_shard_that_another_process_fetches(
    store: Store, cache: ShardCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = store.stream(cache, order="sequence")
    stream.position, stream.prefetch = OF_A_SHARD - 1, 1  # the next batch, which is prepared, is of the second shard
    lock, waiting = cache_module._lock, threading.Event()

    def noticed(handle: int, wait: bool) -> None:
        if wait and name_of(store, 1) in os.readlink(f"/proc/self/fd/{handle}"):
            waiting.set()
        lock(handle, wait)

    monkeypatch.setattr(cache_module, "_lock", noticed)
    batches = iter(stream)
    with another_fetches(cache, store, 1):
        next(batches)
        assert waiting.wait(LONG_S)
        end = threading.Thread(target=cast(Any, batches).close)
        end.start()
        end.join(LONG_S)
        ended = not end.is_alive()
    end.join()
    assert ended


# What batches hold


@pytest.mark.parametrize("order", ["blocks", "shuffle", "sequence"])
@pytest.mark.parametrize("shards", [1, 3, 6, 100])
def test_batches_are_those_of_a_stream_without_copies(store: Store, cache: ShardCache, shards: int, order: str) -> None:
    count = 5 * SHARDS
    expected = all_facts(store.stream(None, order=order).forever(), count)
    for prefetch in (0, 5):
        stream = store.stream(room(cache, store, shards), order=order)
        stream.prefetch = prefetch
        with closing(stream.forever()) as batches:
            assert all_facts(batches, count) == expected
            assert (stream.epoch, stream.position) == divmod(count, SHARDS * OF_A_SHARD)


def test_an_epoch_of_one_batch_follows_another(store: Store, cache: ShardCache) -> None:
    """Batches of several epochs are prepared at once, or as many as plans are kept for."""
    settings: dict[str, Any] = {"batch_size": SHARDS * OF_A_SHARD}
    expected = all_facts(store.stream(None, **settings).forever(), 5)
    stream = store.stream(cache, **settings)
    stream.prefetch = 4
    with closing(stream.forever()) as batches:
        assert all_facts(batches, 5) == expected


def test_samples_that_are_kept_in_memory_are_not_fetched_again(store: Store, cache: ShardCache) -> None:
    host = torch.device("cpu")
    stream = store.stream(room(cache, store, 4), kept=KeptSamples(Keep(host, host)))
    assert len(all_facts(stream)) == len(stream.plan)
    store.asked.clear()
    assert len(all_facts(islice(stream, None))) == len(stream.plan)
    assert store.asked == []
