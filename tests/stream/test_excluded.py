"""Samples on the exclude list beside their shards: gone from batches, while plan and resume of the others stay."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from qie.data.follow import GrowingPlans, GrowingSamples
from qie.data.opening import open_stream
from qie.data.plan_settings import PlanSettings
from qie.data.stream import Stream
from qie.errors import ShardError, UsageError
from qie.shards import excluded as lists
from qie.shards.excluded import EXCLUDED_NAME, positions_of, read_excluded
from qie.shards.shard_set import ShardSet, compact_folder
from qie.stores import LocalFolder, StoreError
from qie.stores.object_errors import DENIED
from tests.stream.checks import all_facts, assert_restores_everywhere, write

ROWS, GONE = 60, (4, 31, 59)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("whole"), ROWS, shard_size=16)


@pytest.fixture
def shards(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "shards"))


def exclude(shards: Path, positions: Sequence[int]) -> set[str]:
    keys = [ShardSet.open(shards).keys[position] for position in positions]
    (shards / EXCLUDED_NAME).write_text("".join(f"{key} # a note\n" for key in keys))
    return set(keys)


Global = tuple[tuple[str, ...], tuple[float, ...]]


def epoch_of(shards: Path, world_size: int, **settings: object) -> list[Global]:
    """Keys and weights of the global batches of an epoch."""
    ranks = [
        all_facts(open_stream(shards, batch_size=4 // world_size, rank=rank, world_size=world_size, **settings))
        for rank in range(world_size)
    ]
    return [
        (sum((part[0] for part in parts), ()), sum((part[2] for part in parts), ()))
        for parts in zip(*ranks, strict=True)
    ]


def real(batch: Global) -> list[str]:
    return [key for key, weight in zip(*batch, strict=True) if weight]


@pytest.mark.parametrize(("world_size", "tail"), [(1, "pad"), (2, "pad"), (2, "drop")])
def test_three_of_sixty_are_gone_and_the_others_keep_their_batch_and_their_place(
    shards: Path, world_size: int, tail: str
) -> None:
    before = epoch_of(shards, world_size, tail=tail)
    gone = exclude(shards, GONE)
    after = epoch_of(shards, world_size, tail=tail)
    for (keys, weights), (keys_now, weights_now) in zip(before, after, strict=True):
        assert not gone.intersection(keys_now)
        assert [one for one, now in zip(keys, keys_now, strict=True) if one != now and one not in gone] == []
        assert real((keys_now, weights_now)) == [key for key in real((keys, weights)) if key not in gone]
        assert np.mean(weights_now) == pytest.approx(1) and len(set(weights_now) - {0}) == 1
        assert gone.intersection(keys) or weights == weights_now


def test_the_identity_is_unchanged_and_a_run_whose_list_changed_is_resumed_at_every_position(shards: Path) -> None:
    def new() -> Stream:
        return open_stream(shards, batch_size=3, validation_rows=5)

    old = new()
    batches = iter(old)
    for _ in range(7):
        next(batches)
    state, rest = old.state_dict(), [real(one[::2]) for one in all_facts(batches)]
    gone = exclude(shards, GONE)
    stream = new()
    assert stream.plans.identity == old.plans.identity and len(stream) == len(old)
    stream.load_state_dict(state)
    assert [real(one[::2]) for one in all_facts(stream)] == [[key for key in of if key not in gone] for of in rest]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_global_batch_of_which_nothing_is_left_is_skipped_by_all_ranks_and_counts_as_a_position(
    shards: Path, world_size: int
) -> None:
    before = epoch_of(shards, world_size)
    known = ShardSet.open(shards).keys
    lost = (0, 1, 5, len(before) - 1)  # at both ends, too
    later = open_stream(shards, batch_size=4)
    later.set_epoch(1)
    gone = {key for number in lost for key in before[number][0]}
    if world_size > 1:  # at the beginning of the next epoch, too
        gone |= set(next(iter(later)).keys)
    exclude(shards, sorted(map(known.index, gone)))
    after = epoch_of(shards, world_size)
    kept = [batch for number, batch in enumerate(before) if number not in lost]
    assert after == kept if world_size == 1 else len(after) == len(kept)

    def new() -> Stream:
        return open_stream(shards, batch_size=4 // world_size, rank=world_size - 1, world_size=world_size, prefetch=3)

    assert len(new()) == new().count(1) == len(before)
    if world_size > 1:
        assert_restores_everywhere(new, epochs=2)
    resumed = new()
    resumed.load_state_dict(new().state_dict() | {"position": len(before) - 1})  # as a run without the list saves it
    assert len(all_facts(resumed)) > len(after) / 2 and (resumed.epoch, resumed.position) == (2, 0)
    ended = new()
    assert (len(all_facts(ended)), ended.epoch, ended.position) == (len(after), 1, 0)


def test_epochs_of_which_nothing_is_left_are_passed_until_one_has_a_sample(shards: Path) -> None:
    exclude(shards, range(40))  # of the other 20, an epoch in ten draws one
    batches = open_stream(shards, batch_size=2, weights={"more": 0.005}).forever()
    assert {ShardSet.open(shards).keys.index(next(batches).keys[0]) >= 40 for _ in range(3)} == {True}


def test_samples_that_are_all_excluded_are_an_error_that_says_how_to_mend_it(shards: Path) -> None:
    exclude(shards, range(ROWS))
    for batches in (iter(open_stream(shards)), open_stream(shards).forever()):
        with pytest.raises(UsageError, match="all samples of all batches are excluded"):
            next(batches)


def test_an_excluded_row_is_not_validated_on_and_the_others_that_are_kept_out_stay(shards: Path) -> None:
    stream = open_stream(shards, validation_rows=4)
    gone, *others = stream.plans.validation
    exclude(shards, [gone])
    now = open_stream(shards, validation_rows=4)
    assert [batch.positions[0] for batch in now.validation_batches()] == others
    assert now.held_out.tolist() == stream.held_out.tolist()


def test_shards_by_a_compacted_index_or_while_they_are_written_have_the_same_list(shards: Path, tmp_path: Path) -> None:
    gone = exclude(shards, GONE)
    compact_folder(LocalFolder(shards))
    named = (shards / "index.safetensors").rename(tmp_path / "all.safetensors")
    by_index = open_stream(shards, index=named)
    samples = GrowingSamples(LocalFolder(shards), ROWS)
    followed = Stream(samples, GrowingPlans(samples, PlanSettings(2)))
    for stream in (by_index, followed):
        assert {key.hex() for key in stream.excluded} == gone
        assert set(ShardSet.open(shards).keys) - {key for batch in stream for key in batch.keys} == gone


# The list


def test_a_list_has_keys_and_notes_and_a_line_of_something_else_is_refused(tmp_path: Path) -> None:
    folder, key = LocalFolder(tmp_path), "ab" * 32
    assert read_excluded(folder) == {}
    (tmp_path / EXCLUDED_NAME).write_text(f"# by hand\n\n{key.upper()}\n{'cd' * 32} # row 7 a # b\r\n")
    assert read_excluded(folder) == {key: "", "cd" * 32: "row 7 a # b"}
    (tmp_path / EXCLUDED_NAME).write_text(f"{key}\n{key[:20]}\n")
    with pytest.raises(ShardError, match="no key") as caught:
        read_excluded(folder)
    assert caught.value.where == f"{tmp_path}/{EXCLUDED_NAME}, line 2"


@pytest.mark.parametrize(("what", "found"), [(DENIED, {}), ("a request to the store failed", None)])
def test_a_store_that_may_not_be_listed_has_no_list_and_one_that_fails_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, found: object
) -> None:
    monkeypatch.setattr(LocalFolder, "read", lambda *_, **__: (_ for _ in ()).throw(StoreError(what)))
    if found is None:
        with pytest.raises(StoreError, match="failed"):
            read_excluded(LocalFolder(tmp_path))
    else:
        assert read_excluded(LocalFolder(tmp_path)) == found


def test_positions_of_keys_are_found_in_parts_and_for_no_key_nothing_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lists, "CHUNK", 7)
    digests = np.random.default_rng(0).integers(0, 256, (50, 32), np.uint8)
    digests[33], digests[34, :8] = digests[3], digests[3, :8]  # an equal one, and one that begins alike
    wanted = {digests[position].tobytes() for position in (3, 6, 7, 49)} | {bytes(32)}
    assert positions_of(digests, wanted).tolist() == [3, 6, 7, 33, 49]
    monkeypatch.setattr(lists, "_heads", lambda digests: np.zeros(len(digests), np.uint64))
    assert positions_of(digests, set()).tolist() == []
