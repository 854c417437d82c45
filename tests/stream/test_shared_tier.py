"""Samples that all processes of a machine keep together."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from qie.data.kept_samples import DeviceTier, Keep, KeptSamples
from qie.data.opening import open_stream
from qie.data.shared_tier import SharedTier, Unshared, open_shared
from qie.types import Sample
from tests.stream.checks import all_facts, write
from tests.stream.forked_ranks import EPOCHS, RANKS, ROWS, SETTINGS, digest, run_ranks
from tests.stubs import StubEncoder, StubSource

CPU, META = torch.device("cpu"), torch.device("meta")
ROOM, LITTLE = 10**9, 40 * mmap.PAGESIZE
PART = {"tensor": torch.arange(mmap.PAGESIZE, dtype=torch.uint8)}
"""Takes two pages, with what describes it."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("shared") / "shards", ROWS)


@pytest.fixture(scope="module")
def ranks(shards: Path) -> dict[str, tuple[list[int], list[Any]]]:
    """Of each run of four real processes: their statuses, and what they said."""
    room, little, last = run_ranks(shards, ("epochs", [ROOM]), ("epochs", [LITTLE]), ("killed", []))
    return {"room": room, "little": little, "killed": last}


@pytest.mark.parametrize("budget", ["room", "little"])
def test_four_ranks_keep_each_sample_once_within_the_budget_and_their_batches_are_the_same(
    shards: Path, ranks: dict[str, tuple[list[int], list[Any]]], budget: str
) -> None:
    statuses, said = ranks[budget]
    assert statuses == [0] * RANKS
    for rank, found in enumerate(said):
        plain = open_stream(shards, rank=rank, **SETTINGS)
        assert found["batches"] == [digest(all_facts(plain)) for _ in range(EPOCHS)]
        assert found["said"] == []
        assert found["file"] == said[0]["file"] and found["places"] == said[0]["places"], "one memory for all"
    kept = {place: (start, size) for place, (start, size) in enumerate(said[0]["places"]) if size}
    ends = [(start, start + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE) for start, size in sorted(kept.values())]
    assert all(stop <= start for (_, stop), (start, _) in pairwise(ends))
    assert said[0]["bytes"] == sum(stop - start for start, stop in ends) <= {"room": ROOM, "little": LITTLE}[budget]
    assert said[0]["memory"] <= said[0]["bytes"] + 2 * mmap.PAGESIZE, "with what says where they are"
    assert len(kept) == (ROWS if budget == "room" else 40)
    first, *later = ({position for one in said for position in one["reads"][n]} for n in range(EPOCHS))
    assert first == set(range(ROWS))
    assert later == [set(range(ROWS)) - set(kept)] * (EPOCHS - 1)


def test_a_rank_that_is_killed_leaves_no_file_and_no_lock(ranks: dict[str, tuple[list[int], list[Any]]]) -> None:
    assert {found["file"][0] for found in ranks["room"][1]} == {"/memfd:qie-samples (deleted)"}, "it has no name"
    statuses, said = ranks["killed"]
    assert statuses == [0] * (RANKS - 1) + [signal.SIGKILL]
    *others, last = said
    assert last is None and all(found["right"] for found in others)
    # Of what the others keep, one each may be on its way when one of them looks.
    assert all(found["lacking"][0] == 0 and len(found["lacking"]) < RANKS for found in others)


class Machine:
    """Processes of one machine, in one: each is asked to open the memory that the first one offers."""

    def __init__(self, budget_bytes: int = ROOM) -> None:
        self.budget_bytes = budget_bytes
        self.offers: list[Any] = []
        self.said: list[str] = []

    def join(self) -> SharedTier:
        tier = open_shared(8, self.budget_bytes, self.gather, self.said.append)
        assert isinstance(tier, SharedTier)
        return tier

    def gather(self, mine: Any) -> list[Any]:
        if isinstance(mine, tuple):
            return [mine]
        self.offers.append(mine)
        return self.offers


def test_what_is_on_its_way_is_not_there_and_nobody_else_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    one, other = machine.join(), machine.join()
    found: list[Any] = []

    def write_slowly(*arguments: Any) -> None:
        monkeypatch.undo()
        found.extend(tier.get(3) for tier in (one, other))
        found.append(other.add(3, PART))
        _write(*arguments)

    from qie.data.shared_tier import _write

    monkeypatch.setattr("qie.data.shared_tier._write", write_slowly)
    assert one.add(3, PART) is not None
    assert found == [None] * 3
    there = other.get(3)
    assert there is not None and torch.equal(there["tensor"], PART["tensor"])
    assert one.bytes == other.bytes == 2 * mmap.PAGESIZE


@pytest.mark.parametrize("position", [3, 4])
def test_room_that_another_takes_between_look_and_lock_is_not_taken_twice(
    monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    machine = Machine(3 * mmap.PAGESIZE)
    one, other = machine.join(), machine.join()
    locked = one._locked

    def later() -> Any:
        monkeypatch.undo()
        assert other.add(position, PART) is not None
        return locked()

    monkeypatch.setattr(one, "_locked", later)
    assert one.add(3, PART) is None
    assert one.bytes == 2 * mmap.PAGESIZE and one.get(3 + 4 - position) is None
    there = one.get(position)
    assert there is not None and torch.equal(there["tensor"], PART["tensor"])


def test_a_position_beyond_the_table_is_not_kept() -> None:
    tier = Machine().join()
    assert tier.add(8, PART) is None and tier.get(8) is None and tier.bytes == 0


def test_who_writes_into_a_kept_tensor_changes_it_for_nobody_else() -> None:
    machine = Machine()
    one, other = machine.join(), machine.join()
    mine = one.add(0, PART)
    assert mine is not None
    mine["tensor"].zero_()
    one.add(1, PART)
    for tier, position in ((other, 0), (other, 1), (one, 1)):
        there = tier.get(position)
        assert there is not None and torch.equal(there["tensor"], PART["tensor"])


def test_memory_that_the_machine_refuses_ends_the_budget_with_one_line() -> None:
    machine = Machine(ROOM)
    tier = machine.join()
    before = tier.add(0, PART)
    with largest_file(tier._start + 3 * mmap.PAGESIZE):
        assert [tier.add(position, PART) for position in (1, 2)] == [None, None]
    assert tier.add(3, PART) is None and tier.get(1) is None and tier.get(0) is before is not None
    assert machine.said == [
        "memory for kept samples ends at 16.4 kB of 1.0 GB (File too large): samples that are not kept by now are read "
        "again in each epoch"
    ]
    assert machine.join().get(0) is not None


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("fault", ["no memory", "another's file", "a process that is gone", "the other's fault"])
def test_processes_that_cannot_share_divide_the_budget_and_one_says_so(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    other = os.memfd_create("other")

    def gather(mine: Any) -> list[Any]:
        if isinstance(mine, tuple):
            return [mine, (mine[0], "out of reach" if fault == "the other's fault" else mine[1])]
        changes = {"another's file": {"file": other}, "a process that is gone": {"process": 0}}
        return [replace(mine, **changes.get(fault, {})), replace(mine, file=99), replace(mine, machine="another")]

    if fault == "no memory":
        refused = OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        monkeypatch.setattr(os, "memfd_create", lambda name: (_ for _ in ()).throw(refused))
    said: list[str] = []
    for first in (True, False):
        kept = KeptSamples.of_machine(Keep(CPU, None, 10**6), 8, gather, said.append, first=first)
        ((tier, _),) = kept._tiers
        assert isinstance(tier, DeviceTier) and tier._budget_bytes == 500_000
    reasons = {"no memory": "not implemented", "another's file": "in the place", "the other's fault": "out of reach"}
    (line,) = said
    assert "cannot share kept samples (" in line and reasons.get(fault, "No such file") in line
    assert "up to 500.0 kB of cache.keep.budget_bytes" in line
    assert isinstance(open_shared(8, 10**6, gather), Unshared)
    os.close(other)


@pytest.mark.parametrize("keep", [Keep(CPU, CPU), Keep(CPU), Keep(None, CPU), Keep(CPU, META), Keep(META, META)])
def test_a_sample_comes_back_byte_for_byte_and_what_is_for_a_gpu_stays_with_its_process(keep: Keep) -> None:
    rows = StubSource.of(1).rows
    sample = replace(
        StubEncoder().encode(rows[0]),
        prompt="\udcff – \0",
        loss_mask=torch.arange(16, dtype=torch.uint8).view(4, 4),
        empty_tail=torch.empty(0, 8, dtype=torch.float16),
        control_latent=(torch.ones(16, 1, 2, 4, dtype=torch.bfloat16), torch.full((16, 1, 4, 2), torch.nan)),
        image_slots=(1, 2),
        notes=("note",),
    )
    machine = Machine()
    one, other = (KeptSamples.of_machine(keep, 8, machine.gather, machine.said.append, first=True) for _ in range(2))
    one.fetch(5, lambda position: sample)
    shares = CPU in (keep.latents, keep.embeds)
    whole = keep.latents == keep.embeds and shares
    found = other.fetch(5, (lambda position: pytest.fail("read again")) if whole else lambda position: sample)
    assert_equal(found, sample)
    assert (other.bytes == one.bytes > 0) == shares or META in (keep.latents, keep.embeds)


def assert_equal(found: Sample, expected: Sample) -> None:
    for name, mine in vars(found).items():
        theirs = getattr(expected, name)
        pairs = zip(mine, theirs, strict=True) if isinstance(mine, tuple) else [(mine, theirs)]
        for one, other in pairs:
            if isinstance(one, torch.Tensor):
                assert (one.dtype, one.shape) == (other.dtype, other.shape), name
                if one.device == CPU:
                    assert bytes(one.view(-1).view(torch.uint8).numpy()) == bytes(
                        other.reshape(-1).view(torch.uint8).numpy()
                    )
            else:
                assert one == other and type(one) is type(other), name
