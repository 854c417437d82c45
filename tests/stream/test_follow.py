"""Training on shards while they are written; samples kept in memory; shards with raw rows for what they lack."""

from __future__ import annotations

import threading
import weakref
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from qie.data.follow import GrowingPlans, GrowingSamples
from qie.data.kept_samples import Keep
from qie.data.opening import open_stream
from qie.data.plan_settings import PlanSettings
from qie.data.stream import Stream
from qie.data.variants import Variants
from qie.errors import QieError, UsageError
from qie.precompute import Settings, precompute
from qie.shards.discovery import published
from qie.shards.index import ShardIndex, read_index
from qie.shards.shard_set import ShardSet
from qie.stores import File, Folder, open_folder
from qie.types import Batch
from tests.stubs import SHAPES, StubEncoder, StubSource

SOURCE = StubSource.of(60).changed(7, target=b"broken").changed(20, target=b"missing")
CPU = torch.device("cpu")


def write(folder: Path, rows: tuple[int, int] = (0, 60)) -> None:
    precompute(SOURCE, StubEncoder(), folder, rows=rows, shard_size=8)


def followed(folder: Path, **settings) -> Stream:
    growing = {name: settings.pop(name) for name in ("timeout_s", "alive") if name in settings}
    samples = GrowingSamples(open_folder(folder), 60, poll_s=0.01, **growing)
    rank, world_size = settings.pop("rank", 0), settings.pop("world_size", 1)
    chosen = PlanSettings(settings.pop("batch_size", 2) * world_size, seed=1, **settings)
    return Stream(samples, GrowingPlans(samples, chosen), rank, world_size)


def keys(stream, count: int) -> list[tuple[str, ...]]:
    batches = stream.forever()
    return [next(batches).keys for _ in range(count)]


def epoch_of(stream) -> list[tuple[str, ...]]:
    return [batch.keys for batch in stream]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    write(tmp_path / "whole")
    return tmp_path / "whole"


def test_the_first_epoch_takes_rows_in_order_and_later_ones_are_those_of_any_stream(whole: Path) -> None:
    stream = followed(whole)
    first = [
        position for batch in stream for position, weight in zip(batch.indices, batch.weight, strict=True) if weight
    ]
    assert sorted(first) == list(range(58)), "each sample once"
    assert max(abs(position - place) for place, position in enumerate(first)) < 20, "about in the order of rows"
    other = open_stream(whole, batch_size=2, seed=1)
    other.set_epoch(1)
    assert keys(stream, 60) == keys(other, 60)


def test_batches_do_not_depend_on_when_shards_came(whole: Path, tmp_path: Path) -> None:
    expected = keys(followed(whole), 70)
    growing = tmp_path / "growing"
    write(growing, (0, 8))
    stream = followed(growing)
    batches, found, shard = stream.forever(), [], 8
    while len(found) < 70:
        if shard < 60 and len(found) % 3 == 0:
            write(growing, (shard, min(shard + 8, 60)))
            shard += 8
        found.append(next(batches).keys)
    assert found == expected


@pytest.mark.parametrize("variants", [1, 3])
def test_growing_shard_by_shard_gives_what_opening_them_all_at_once_does(tmp_path: Path, variants: int) -> None:
    source = SOURCE
    for index in range(60):
        source = source.changed(index, source="abc"[index // 25])
    for index in range(24, 32):
        source = source.changed(index, target=b"missing")  # a shard without samples
    encoder = StubEncoder()

    def write_more(stop: int) -> None:
        encoder._shapes = SHAPES if stop > 32 else SHAPES[:2]  # the one that comes late sorts first
        varied = Settings(variants=Variants(variants))
        precompute(source, encoder, tmp_path, rows=(0, stop), shard_size=8, settings=varied)

    samples = GrowingSamples(open_folder(tmp_path), 60)
    settings = PlanSettings(4, seed=5, validation_rows=2)
    for stop in (8, 16, 24, 32, 40, 48, 56, 60):
        write_more(stop)
        if stop == 8:
            plans = GrowingPlans(samples, settings)
        else:
            assert samples.grow()
        there = ShardSet.open(tmp_path)
        assert_equal_arrays(samples._there.table, there.table)
        assert_equal_arrays(samples.columns, there.columns)
        assert samples.skipped == there.skipped and samples.covered == stop
        assert samples._there.keys == there.keys and [tar.name for tar in samples._there._tars] == [
            tar.name for tar in there._tars
        ]
        whole = replace(settings, order="sequence").plan(there.columns, 0, plans.held_out)
        known = plans.of(0)
        assert_equal_arrays(known, whole[: len(known)])
    assert len(known) == len(whole) and min(SHAPES) == SHAPES[2] in there.table.shape_names


def assert_equal_arrays(one: object, other: object) -> None:
    for field in fields(one):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(mine, np.ndarray):
            assert mine.dtype == theirs.dtype, field.name
            np.testing.assert_array_equal(mine, theirs, field.name)
        else:
            assert mine == theirs, field.name


def test_a_folder_is_listed_only_when_the_expected_shard_was_long_missing(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[Folder] = []
    monkeypatch.setattr("qie.data.follow.published", lambda folder: listed.append(folder) or published(folder))
    monkeypatch.setattr("qie.data.follow.SHARDS_A_LOOK", 1)
    write(tmp_path, (0, 32))
    samples = GrowingSamples(open_folder(tmp_path), 60)
    assert samples.grow() and len(listed) == 1
    write(tmp_path, (32, 40))
    assert samples.grow() and samples.covered == 40
    write(tmp_path, (40, 44))  # not what is expected
    assert [samples.grow() for _ in range(4)] == [False] * 4 and len(listed) == 1
    assert samples.grow() and samples.covered == 44 and len(listed) == 2
    write(tmp_path, (44, 60))
    assert samples.grow() and samples.complete and len(listed) == 2


def test_it_waits_for_a_shard_that_is_not_there_yet(whole: Path, tmp_path: Path) -> None:
    growing = tmp_path / "growing"
    write(growing, (0, 16))
    stream = followed(growing)
    asked = threading.Event()
    stream.samples.alive = asked.set

    def write_when_asked() -> None:
        assert asked.wait(200)
        write(growing, (16, 60))

    writer = threading.Thread(target=write_when_asked)
    writer.start()
    assert keys(stream, 40) == keys(followed(whole), 40)
    writer.join()


@pytest.mark.parametrize("stopped", [0, 5, 29, 30, 45])
def test_it_goes_on_where_it_stopped_also_when_more_or_fewer_shards_are_there(
    whole: Path, tmp_path: Path, stopped: int
) -> None:
    stream = followed(whole)
    keys(stream, stopped)
    state, tail = stream.state_dict(), keys(stream, 40)
    resumed = followed(whole)
    resumed.load_state_dict(state)
    assert keys(resumed, 40) == tail

    growing = tmp_path / "growing"
    write(growing, (0, 8))
    resumed = followed(growing)
    resumed.load_state_dict(state)
    writer = threading.Thread(target=write, args=(growing, (8, 60)))
    writer.start()
    assert keys(resumed, 40) == tail
    writer.join()


def test_ranks_share_the_global_batches(whole: Path) -> None:
    alone = keys(followed(whole, batch_size=6), 20)
    for world_size in (2, 3):
        settings = {"batch_size": 6 // world_size, "world_size": world_size}
        ranks = [keys(followed(whole, rank=rank, **settings), 20) for rank in range(world_size)]
        assert [sum(parts, ()) for parts in zip(*ranks, strict=True)] == alone


def test_rows_for_validation_are_of_the_first_shard_and_stay_out_of_all_epochs(whole: Path) -> None:
    stream = followed(whole, validation_rows=3)
    validation = {position for batch in stream.validation_batches() for position in batch.positions}
    assert len(validation) == 3 and max(validation) < 8
    for _ in range(3):
        assert not {position for batch in stream for position in batch.indices} & validation
    with pytest.raises(UsageError, match="first shard"):
        followed(whole, validation_rows=7)


def test_the_first_epoch_is_not_over_where_the_shards_that_are_there_end(tmp_path: Path) -> None:
    write(tmp_path, (0, 16))
    stream = followed(tmp_path)
    known = len(stream)
    keys(stream, known)
    assert (stream.epoch, stream.position) == (0, known)


def test_shards_beyond_the_rows_that_are_current_are_left_from_an_older_run(whole: Path) -> None:
    samples = GrowingSamples(open_folder(whole), 60, current=lambda: 20)
    assert samples.grow() and samples.covered == 16


def test_what_was_checked_is_not_checked_again_when_more_shards_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, (0, 8))
    samples = GrowingSamples(open_folder(tmp_path), 60)
    assert samples.grow()
    samples.fetch(0)
    write(tmp_path, (8, 16))
    assert samples.grow() and len(samples.digests) == 15

    monkeypatch.setattr("qie.shards.shard_set.missed", None)
    samples.fetch(0)
    with pytest.raises(TypeError, match="NoneType"):
        samples.fetch(1)


def test_a_parsed_index_is_gone_when_its_shard_was_taken_in(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes ten times the memory of its table."""
    parsed: list[weakref.ref[ShardIndex]] = []

    def read(place: File) -> ShardIndex:
        parsed.append(weakref.ref(index := read_index(place)))
        return index

    monkeypatch.setattr("qie.shards.reader.read_index", read)
    samples = GrowingSamples(open_folder(whole), 60)
    assert samples.grow() and samples.skipped
    assert len(parsed) == 8 and {index() for index in parsed} == {None}


def test_a_shard_that_never_comes_is_an_error_and_a_writer_that_failed_or_a_stream_that_was_closed_another(
    tmp_path: Path,
) -> None:
    def fail() -> None:
        raise QieError("the writer failed")

    write(tmp_path, (0, 16))
    with pytest.raises(QieError, match="no further shard was published") as refused:
        keys(followed(tmp_path, timeout_s=0), 40)
    assert "row 16, of 60" in str(refused.value) and str(tmp_path) in str(refused.value)
    with pytest.raises(QieError, match="the writer failed"):
        keys(followed(tmp_path, alive=fail), 40)
    stream = followed(tmp_path)
    stream.samples.alive = stream.close
    with pytest.raises(QieError, match="closed while it waited"):
        keys(stream, 40)


def tensors(batch: Batch) -> list[torch.Tensor]:
    found = [batch.pixel_latent, *batch.control_latent, batch.prompt_embed, batch.empty_prompt_embed, batch.weight]
    return found + [mask for mask in (batch.prompt_embeds_mask, batch.empty_prompt_embeds_mask) if mask is not None]


def assert_same(one: Batch, other: Batch) -> None:
    assert one.keys == other.keys
    assert all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


@pytest.mark.parametrize(
    "keep", [Keep(CPU, CPU), Keep(CPU), Keep(None, CPU), Keep(CPU, CPU, 20_000), Keep(CPU, CPU, 0)]
)
def test_what_is_kept_in_memory_is_what_was_read_and_not_read_again_if_it_is_all(
    whole: Path, keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, kept = open_stream(whole, batch_size=2), open_stream(whole, batch_size=2, keep=keep)
    for _ in range(3):
        for one, other in zip(plain, kept, strict=True):
            assert_same(one, other)
    assert kept.kept is not None
    assert kept.kept.bytes <= keep.budget_bytes
    assert (kept.kept.bytes > 0) == (keep.budget_bytes > 0)


def test_rows_that_the_shards_lack_are_encoded_and_the_others_are_not(whole: Path, tmp_path: Path) -> None:
    write(tmp_path / "some", (0, 24))
    encoder = StubEncoder()
    mixed = open_stream(SOURCE, encoder=encoder, shards=tmp_path / "some", batch_size=2)
    encoder.encoded.clear()
    for one, other in zip(open_stream(whole, batch_size=2), mixed, strict=True):
        assert_same(one, other)
    assert set(encoder.encoded) == set(range(24, 60))


def test_an_encoder_is_loaded_by_one_row_where_others_are_in_shards(whole: Path, tmp_path: Path) -> None:
    write(tmp_path / "some", (0, 24))
    for shards, expected in ((tmp_path / "some", [24]), (whole, []), (None, [])):
        encoder = StubEncoder()
        samples = open_stream(SOURCE, encoder=encoder, shards=shards).samples
        encoder.encoded.clear()
        samples.load_encoder()
        assert encoder.encoded == expected


def test_shards_of_another_recipe_are_simply_not_found(whole: Path) -> None:
    encoder = StubEncoder(replace(StubEncoder().recipe, vae="9" * 64))
    stream = open_stream(SOURCE, encoder=encoder, shards=whole, batch_size=2)
    epoch_of(stream)
    assert set(encoder.encoded) == set(range(60)) - {7, 20}
