"""One process of a run looks for shards that are being written, and tells the others."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from qie.data.announcements import TOLD_TOGETHER, Announcements
from qie.data.follow import GrowingSamples
from qie.errors import QieError, ShardError
from tests.stream.checks import all_facts, write
from tests.stream.forked_ranks import LIMIT_S, RANKS, ROWS, STEPS, AskedFolder, digest, following, run_ranks

SHARDS = 15


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("announced") / "shards", ROWS)


def samples(folder: Path, server: dist.Store, *, first: bool, timeout_s: float = LIMIT_S) -> GrowingSamples:
    announcements = Announcements(server, first=first)
    return GrowingSamples(AskedFolder(folder), ROWS, timeout_s=timeout_s, poll_s=0.01, announcements=announcements)


def test_of_real_processes_one_looks_the_others_read_what_it_found_and_all_notice_when_it_is_killed(
    shards: Path,
) -> None:
    (statuses, said), (killed, bereft) = run_ranks(shards, ("followed", [SHARDS]), ("followed", [3]))
    assert statuses == [0] * RANKS
    for rank, found in enumerate(said):
        assert found["batches"] == digest(all_facts(following(AskedFolder(shards), rank).forever(), STEPS))
    read = sorted(f"{what}.{kind}" for tar in shards.glob("*.tar") for what, kind in needed(tar.stem))
    first, *others = (found["asked"] for found in said)
    # The exclude list is asked for once, when the stream is opened.
    assert [sorted(name for name in asked if name != "read excluded.txt") for asked in others] == [read] * len(others)
    looks = [name for name in first if name not in read]
    assert len(looks) > SHARDS and "listing" in looks

    assert killed == [signal.SIGKILL] + [0] * (RANKS - 1)
    assert all("looks for new shards cannot be reached" in found["error"] for found in bereft[1:])


def needed(stem: str) -> list[tuple[str, str]]:
    return [(f"read {stem}", "json"), (f"size {stem}", "tar")]


def test_names_are_told_in_order_some_together_and_each_until_it_is_done() -> None:
    server = dist.HashStore()
    first, other = Announcements(server, first=True), Announcements(server, first=False)
    names = [f"{number}.json" for number in range(TOLD_TOGETHER + 1)]
    for name in names:
        first.add(name)
    found = []
    while name := other.next():
        assert other.next() == name
        found.append(name)
        other.done()
    assert found == names[:-1]
    first.send()
    first.send()
    assert (other.next(), other.ended) == (names[-1], False)
    first.end()
    assert other.ended and other.next() == names[-1]


def test_a_shard_that_this_machine_does_not_see_yet_is_waited_for_and_one_that_is_damaged_is_an_error(
    shards: Path, tmp_path: Path
) -> None:
    server, behind = dist.HashStore(), tmp_path / "behind"
    first = samples(shards, server, first=True)
    assert first.grow()
    first.close()
    shutil.copytree(shards, behind)
    late = sorted(behind.glob("*-*.json"))[3]
    content = late.read_bytes()
    late.unlink()
    other = samples(behind, server, first=False)
    assert (other.grow(), other.covered, other.grow()) == (True, 15, False)
    other.alive = lambda: late.write_bytes(content)
    other.wait()
    assert other.complete

    late.write_bytes(content[:-20])
    with pytest.raises(ShardError):
        samples(behind, server, first=False).grow()


def test_who_was_told_of_nothing_looks_for_itself_before_it_gives_up(shards: Path, tmp_path: Path) -> None:
    """The first process may be saving for hours."""
    server = dist.HashStore()
    first, other = samples(shards, server, first=True), samples(shards, server, first=False, timeout_s=0)
    other.wait()
    assert other.complete and first.grow() and not other.grow()

    tmp_path.mkdir(exist_ok=True)
    with pytest.raises(QieError, match="no further shard was published"):
        samples(tmp_path, server, first=False, timeout_s=0).wait()


def test_when_the_first_process_ends_the_others_take_what_it_told_and_wait_no_longer(
    shards: Path, tmp_path: Path
) -> None:
    server, some = dist.HashStore(), tmp_path / "some"
    some.mkdir()
    for file in sorted(shards.iterdir())[:4]:
        shutil.copy(file, some)
    first, other = samples(some, server, first=True), samples(some, server, first=False)
    first.wait()
    first.close()
    other.wait()
    assert other.covered == first.covered == 10
    with pytest.raises(QieError, match="looks for no more shards") as error:
        other.wait()
    assert "row 10, of 72" in str(error.value)
