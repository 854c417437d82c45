"""A stream stands anywhere it stood before: the same batches follow, bit for bit, however and by whoever it is read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import qie.data.live
import qie.data.plan_settings
import qie.data.windows
from qie.data.kept_samples import Keep
from qie.data.opening import open_stream
from qie.data.plan import PLAN_VERSION
from qie.data.stream import Stream
from qie.errors import QieError, UsageError
from qie.types import Batch
from tests.conftest import ROOT
from tests.stream.checks import all_facts, assert_restores_everywhere, epoch_after_epoch, facts, write
from tests.stubs import RECIPES, StubEncoder, StubSource

ROWS = 29
SETTINGS: dict[str, dict[str, Any]] = {
    "pad": {},
    "drop": {"tail": "drop"},
    "blocks": {"order": "blocks", "block_size": 2},
    "sequence": {"order": "sequence"},
    "lengths as they come": {"similar_lengths": 1},
    "a source drawn half as often": {"weights": {"more": 0.5}},
    "a source drawn more often": {"weights": {"more": 1.7}},
    "rows kept out": {"validation_rows": 3},
    "every record checked": {"verify": "always"},
    "samples kept in memory": {"keep": Keep(torch.device("cpu"), torch.device("cpu"))},
    "one thread, nothing ahead": {"threads": 1, "prefetch": 0},
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("restore") / "shards", ROWS)


def opener(place: Path, **settings: Any) -> Callable[..., Stream]:
    return lambda **more: open_stream(place, **({"batch_size": 4, "seed": 3} | settings | more))


# Each position


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_at_every_position_of_two_epochs(shards: Path, settings: dict[str, Any]) -> None:
    run = assert_restores_everywhere(opener(shards, **settings))

    assert len({keys for keys, *_ in run}) >= (len(run) // 3 if settings.get("order") == "sequence" else len(run) // 2)


@pytest.mark.parametrize("settings", [SETTINGS[name] for name in ("pad", "blocks", "rows kept out")])
@pytest.mark.parametrize("world_size", [1, 2])
def test_at_every_position_of_plans_in_windows(
    shards: Path, settings: dict[str, Any], world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At their edges, too; and a state of an order that was made at once is refused."""
    before = opener(shards, **settings)().state_dict()
    monkeypatch.setattr(qie.data.plan_settings, "AT_ONCE", 0)
    monkeypatch.setattr(qie.data.windows, "WINDOW", 8)
    rank = {"batch_size": 4 // world_size, "rank": world_size - 1, "world_size": world_size}
    assert_restores_everywhere(opener(shards, **settings, **rank))

    assert len(list(opener(shards, **settings)().plan.windows())) > 2
    with pytest.raises(UsageError, match="another stream: plan_version, shards changed"):
        opener(shards, **settings)().load_state_dict(before)


@pytest.mark.parametrize("order", ["shuffle", "blocks", "sequence"])
def test_rows_that_are_encoded_live_come_in_the_order_of_their_shards_in_windows(
    shards: Path, tmp_path: Path, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a position of one order is refused in that of other shards."""
    for module in (qie.data.plan_settings, qie.data.live):
        monkeypatch.setattr(module, "AT_ONCE", 0)
    monkeypatch.setattr(qie.data.windows, "WINDOW", 8)
    monkeypatch.setattr(qie.data.live, "SHARD_ROWS", 5)
    live = open_stream(StubSource.of(ROWS), encoder=StubEncoder(), batch_size=4, seed=3, order=order, block_size=2)
    cached = opener(shards, order=order, block_size=2)()
    cached.load_state_dict(live.state_dict())
    if order != "sequence":
        with pytest.raises(UsageError, match="another stream: shards changed"):
            opener(write(tmp_path, ROWS, shard_size=7), order=order, block_size=2)().load_state_dict(live.state_dict())
    assert all_facts(live.forever(), 2 * len(live)) == all_facts(cached.forever(), 2 * len(live))


def test_at_every_position_of_rows_with_any_number_of_controls_or_none(tmp_path: Path) -> None:
    """Of Qwen-Image-2.1: a batch has one number of controls, and its text has their places."""
    new = opener(write(tmp_path / "shards", ROWS, recipe=RECIPES["qwen_image_21"]), batch_size=2)
    assert_restores_everywhere(new)

    seen = {(len(batch.control_latent), batch.image_slots) for batch in new()}
    assert seen == {(0, ()), (1, (1,)), (2, (1, 2))}


def test_at_every_position_of_rows_that_are_encoded_live(shards: Path) -> None:
    run = assert_restores_everywhere(
        lambda: open_stream(StubSource.of(ROWS), encoder=StubEncoder(), batch_size=4, seed=3)
    )

    assert run == all_facts(opener(shards)().forever(), len(run)), "and they are those of the shards"


def through_a_data_loader(stream: Stream) -> Iterator[Batch]:
    return epoch_after_epoch(DataLoader(stream, batch_size=None))


@pytest.mark.parametrize("loop", [epoch_after_epoch, Stream.forever, through_a_data_loader])
def test_in_a_loop_without_end_and_through_a_data_loader(
    shards: Path, loop: Callable[[Stream], Iterator[Batch]]
) -> None:
    new = opener(shards)

    assert assert_restores_everywhere(new, loop=loop) == all_facts(new().forever(), 2 * len(new()))


# By whoever


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_by_any_number_of_processes_at_every_position(shards: Path, world_size: int) -> None:
    whole = opener(shards, batch_size=24)()
    batches, slices = whole.forever(), []
    total = 3 * len(whole)
    states = []
    for _ in range(total):
        states.append(whole.state_dict())
        slices.append(next(batches))
    for start in range(0, total, 2):
        ranks, streams = [], []
        for rank in range(world_size):
            part = opener(shards, batch_size=24 // world_size, rank=rank, world_size=world_size)()
            part.load_state_dict(states[start])
            streams.append(part)
            ranks.append(islice(part.forever(), total - start))
        for expected, parts in zip(slices[start:], zip(*ranks, strict=True), strict=True):
            assert sum((part.keys for part in parts), ()) == expected.keys
            assert sum((part.indices for part in parts), ()) == expected.indices
            assert torch.equal(torch.cat([part.weight for part in parts]), expected.weight)
            assert torch.equal(torch.cat([part.pixel_latent for part in parts]), expected.pixel_latent)
            for number, embed in enumerate(embed for part in parts for embed in part.prompt_embed):
                whole_embed = expected.prompt_embed[number]
                assert torch.equal(embed, whole_embed[: len(embed)]), "padded to the longest of fewer"
                assert not whole_embed[len(embed) :].any()
        assert all(part.state_dict() == whole.state_dict() for part in streams)


@pytest.mark.parametrize(("threads", "prefetch"), [(1, 0), (1, 5), (2, 2), (4, 1), (8, 30)])
def test_any_number_of_threads_and_batches_ahead_gives_the_same(shards: Path, threads: int, prefetch: int) -> None:
    """What is ahead, and how it was read, is no part of where a stream stands."""
    new = opener(shards)
    total = 3 * len(new())

    stream = new(threads=threads, prefetch=prefetch)

    assert all_facts(stream.forever(), total) == all_facts(new().forever(), total)
    assert (stream.epoch, stream.position) == (3, 0)
    new(verify="always").load_state_dict(stream.state_dict())


# In a training script


def test_it_is_what_torch_takes_for_a_data_set_and_no_worker_of_its_reads_it(shards: Path) -> None:
    stream = opener(shards)()

    assert isinstance(stream, IterableDataset)
    assert len(stream) == len(DataLoader(stream, batch_size=None)) == sum(1 for _ in stream) > 0
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UsageError, match="DataLoader workers"):
        patch.setattr("qie.data.stream.get_worker_info", lambda: object())
        next(iter(stream))


def test_a_loop_that_is_left_goes_on_where_it_was_left_and_ends_with_the_epoch(shards: Path) -> None:
    new = opener(shards)
    run, stream, read = all_facts(new().forever(), 2 * len(new())), new(), []

    while len(read) < len(run):
        for batch in stream:
            read.append(facts(batch))
            if len(read) % 3 == 0:
                break
        else:
            assert stream.position == 0

    assert read == run


def test_an_epoch_can_be_set(shards: Path) -> None:
    new = opener(shards)
    per_epoch = len(new())
    run = all_facts(new().forever(), 3 * per_epoch)

    for epoch in (2, 0, 1):
        stream = new()
        all_facts(stream, 2)
        stream.set_epoch(epoch)
        assert all_facts(stream) == run[epoch * per_epoch : (epoch + 1) * per_epoch]


def test_the_length_is_that_of_the_current_epoch(shards: Path) -> None:
    stream = opener(shards, weights={"more": 0.3}, batch_size=1)()

    for _ in range(4):
        length = len(stream)
        assert sum(1 for _ in stream) == length


# What is refused


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 4}, "seed"),
        ({"batch_size": 2}, "global_batch_size"),
        ({"world_size": 2}, "global_batch_size"),
        ({"tail": "drop"}, "tail"),
        ({"order": "blocks"}, "order"),
        ({"order": "sequence"}, "order"),
        ({"similar_lengths": 1}, "order"),
        ({"weights": {"more": 2.0}}, "weights"),
        ({"validation_rows": 2}, "validation_rows"),
        ({"seed": 9, "batch_size": 2, "tail": "drop"}, "seed, global_batch_size, tail"),
        ({}, "plan_version"),
    ],
)
def test_a_state_of_other_settings_is_refused_by_all_their_names(
    shards: Path, change: dict[str, Any], named: str
) -> None:
    state, other = opener(shards)().state_dict(), opener(shards)(**change)
    before = other.state_dict()
    if not change:
        state["of"]["plan_version"] = PLAN_VERSION - 1

    with pytest.raises(QieError) as refused:
        other.load_state_dict(state)

    assert f": {named} changed" in refused.value.what
    for one in named.split(", "):
        assert one in str(refused.value.expected) and one in str(refused.value.found)
    assert other.state_dict() == before


# Killed

_TRAIN = """
import json, os, sys
from pathlib import Path
from qie.data.opening import open_stream
from tests.stream.checks import facts

shards, checkpoint = sys.argv[1], Path(sys.argv[2])
stream = open_stream(shards, batch_size=4, seed=3)
for batch in stream.forever():
    checkpoint.with_suffix(".partial").write_text(json.dumps(stream.state_dict()))
    checkpoint.with_suffix(".partial").replace(checkpoint)
    print(json.dumps(facts(batch)), flush=True)
    if (stream.epoch, stream.position) == (1, 3):
        sys.stdin.read()
"""


def test_after_a_process_that_was_killed_another_goes_on_with_the_batch_behind_its_last_state(
    shards: Path, tmp_path: Path
) -> None:
    checkpoint, new = tmp_path / "state.json", opener(shards)
    count = len(new()) + 3
    expected = all_facts(new().forever(), 2 * count)
    command = [sys.executable, "-c", _TRAIN, shards, checkpoint]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(count)]
        process.kill()
    assert lines == json.loads(json.dumps(expected[:count]))
    restored = new()
    restored.load_state_dict(json.loads(checkpoint.read_text()))
    assert all_facts(restored.forever(), count) == expected[count:]
