"""A stream stands anywhere it stood before: the same batches follow, bit for bit, however and by whoever it is read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from qie.data.keep import Keep
from qie.data.plan import PLAN_VERSION
from qie.data.stream import Stream
from qie.errors import QieError
from qie.stream_chooser import open_stream
from tests.conftest import ROOT
from tests.stream.checks import all_facts, assert_restores_everywhere, epoch_after_epoch, facts, write
from tests.stubs import StubEncoder, StubSource

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
def test_at_every_position_of_three_epochs(shards: Path, settings: dict[str, Any]) -> None:
    run = assert_restores_everywhere(opener(shards, **settings))

    assert len({keys for keys, *_ in run}) >= (len(run) // 3 if settings.get("order") == "sequence" else len(run) // 2)


def test_at_every_position_of_rows_that_are_encoded_live(shards: Path) -> None:
    run = assert_restores_everywhere(
        lambda: open_stream(StubSource.of(ROWS), encoder=StubEncoder(), batch_size=4, seed=3)
    )

    assert run == all_facts(opener(shards)().forever(), len(run)), "and they are those of the shards"


@pytest.mark.parametrize("loop", [epoch_after_epoch, Stream.forever], ids=["for", "forever"])
def test_in_a_loop_and_without_end(shards: Path, loop: Callable) -> None:
    new = opener(shards)

    assert assert_restores_everywhere(new, 2, loop) == all_facts(new().forever(), 2 * len(new()))


def test_through_a_data_loader(shards: Path) -> None:
    def through(stream: Stream):
        return epoch_after_epoch(DataLoader(stream, batch_size=None))

    new = opener(shards)

    assert assert_restores_everywhere(new, 2, through) == all_facts(new().forever(), 2 * len(new()))


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
        ranks = []
        for rank in range(world_size):
            part = opener(shards, batch_size=24 // world_size, rank=rank, world_size=world_size)()
            part.load_state_dict(states[start])
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


def test_any_number_of_processes_saves_the_same_state(shards: Path) -> None:
    states = []
    for world_size in (1, 2, 3, 8):
        part = opener(shards, batch_size=24 // world_size, rank=world_size - 1, world_size=world_size)()
        all_facts(part.forever(), 4)
        states.append(part.state_dict())

    assert states[1:] == states[:-1]


@pytest.mark.parametrize(("threads", "prefetch"), [(1, 0), (1, 5), (2, 2), (4, 1), (8, 30)])
def test_any_number_of_threads_and_batches_ahead_gives_the_same(shards: Path, threads: int, prefetch: int) -> None:
    new = opener(shards)
    total = 3 * len(new())

    stream = new(threads=threads, prefetch=prefetch)

    assert all_facts(stream.forever(), total) == all_facts(new().forever(), total)
    assert (stream.epoch, stream.position) == (3, 0), "what is ahead is no part of where it stands"


# In a training script


def test_it_is_what_torch_takes_for_a_data_set(shards: Path) -> None:
    stream = opener(shards)()

    assert isinstance(stream, IterableDataset)
    assert len(stream) == len(DataLoader(stream, batch_size=None)) == sum(1 for _ in stream) > 0


def test_a_loop_that_is_left_goes_on_where_it_was_left(shards: Path) -> None:
    new = opener(shards)
    run, stream, read = all_facts(new().forever(), 2 * len(new())), new(), []

    while len(read) < len(run):
        for batch in stream:
            read.append(facts(batch))
            if len(read) % 3 == 0:
                break

    assert read == run


def test_the_loop_behind_one_that_was_left_ends_with_the_epoch(shards: Path) -> None:
    stream = opener(shards)()
    next(iter(stream))

    assert sum(1 for _ in stream) == len(stream) - 1
    assert (stream.epoch, stream.position) == (1, 0)
    assert sum(1 for _ in stream) == len(stream)


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
    ],
)
def test_a_state_of_other_settings_is_refused_by_their_name(shards: Path, change: dict[str, Any], named: str) -> None:
    stream, other = opener(shards)(), opener(shards)(**change)
    before = other.state_dict()

    with pytest.raises(QieError) as refused:
        other.load_state_dict(stream.state_dict())

    assert f"{named} changed" in refused.value.what
    assert named in str(refused.value.expected) and named in str(refused.value.found)
    assert other.state_dict() == before


def test_all_that_differs_is_named_at_once(shards: Path) -> None:
    with pytest.raises(QieError, match="seed, global_batch_size, tail changed"):
        opener(shards, seed=9, batch_size=2, tail="drop")().load_state_dict(opener(shards)().state_dict())


def test_a_state_of_another_plan_is_refused(shards: Path) -> None:
    state = opener(shards)().state_dict()
    state["of"]["plan_version"] = PLAN_VERSION - 1

    with pytest.raises(QieError, match="plan_version changed"):
        opener(shards)().load_state_dict(state)


def test_threads_and_batches_ahead_are_no_part_of_a_state(shards: Path) -> None:
    state = opener(shards)().state_dict()

    opener(shards, threads=5, prefetch=9, verify="always")().load_state_dict(state)


# Killed

_TRAIN = """
import json, os, sys
from pathlib import Path
from qie.stream_chooser import open_stream
from tests.stream.checks import facts

shards, checkpoint = sys.argv[1], Path(sys.argv[2])
stream = open_stream(shards, batch_size=4, seed=3)
if checkpoint.exists():
    stream.load_state_dict(json.loads(checkpoint.read_text()))
for batch in stream.forever():
    checkpoint.with_suffix(".partial").write_text(json.dumps(stream.state_dict()))
    checkpoint.with_suffix(".partial").replace(checkpoint)
    print(json.dumps(facts(batch)), flush=True)
"""


def test_a_process_that_was_killed_goes_on_with_the_batch_behind_its_last_state(shards: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "state.json"
    expected = all_facts(opener(shards)().forever(), 60)
    done = 0
    for count in (7, 12):  # the second one dies, too, in another epoch
        with subprocess.Popen(
            [sys.executable, "-c", _TRAIN, shards, checkpoint], cwd=ROOT, stdout=subprocess.PIPE, text=True
        ) as process:
            lines = [process.stdout.readline() for _ in range(count)]
            process.kill()
        assert [as_facts(line) for line in lines] == expected[done : done + count]
        restored = opener(shards)()
        restored.load_state_dict(json.loads(checkpoint.read_text()))
        per_epoch = len(restored)
        done = restored.epoch * per_epoch + restored.position  # it went on while it was being killed
    assert all_facts(restored.forever(), len(expected) - done) == expected[done:]


def as_facts(line: str):
    keys, positions, weights, digest = json.loads(line)
    return tuple(keys), tuple(positions), tuple(weights), digest
