"""What workers tell in the folder `progress`: they say how they do, and nobody takes it for anything else."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from qie.errors import RowError
from qie.precompute import Report, Settings, heartbeat, precompute
from qie.precompute.heartbeat import Pulse
from qie.precompute.progress import PrecomputeRun, WorkerProgress, forget_others, read_progress
from qie.precompute.reshard import reshard
from qie.shards.discovery import find_indexes, indexes_in, published
from qie.shards.shard_set import ShardSet, compact_folder
from qie.stages import Load
from qie.stats import summarise
from qie.stores import Folder, LocalFolder, open_folder
from qie.stores.hub import HubFolder
from tests.precompute import openers
from tests.stubs import StubEncoder, StubSource

ROWS = 60
MISSING, BROKEN = "the target is damaged: missing", "the target is damaged: broken"


@pytest.fixture(autouse=True)
def _told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "FIRST_BEAT_S", 0.0)


def run(output: Folder | Path | str, *, tell: bool = True, **named) -> Report:
    source = named.pop("source", None) or openers.rows(ROWS)
    encoder, rows = named.pop("encoder", None) or StubEncoder(), named.pop("rows", (0, len(source)))
    return precompute(source, encoder, output, rows=rows, shard_size=8, tell=tell, **named)


@pytest.fixture(params=["disk", "s3"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return open_folder(tmp_path / "out" if request.param == "disk" else f"{request.getfixturevalue('s3').url}/out")


def contents(folder: Folder) -> dict[str, bytes]:
    return {name: folder.read(name) for name in folder.listing()}


def test_a_worker_says_what_it_did_beside_shards_that_are_those_of_a_run_that_says_nothing(
    output: Folder, tmp_path: Path
) -> None:
    report = run(output)
    run(tmp_path / "plain", tell=False)
    (one,) = read_progress(output)
    assert (one.state, one.message, one.pid, one.run.rows, one.run.source_rows) == (
        "finished", None, os.getpid(), (0, ROWS), ROWS,
    )  # fmt: skip
    assert (one.rows, one.rows_open, one.encoded, one.shards_written) == (ROWS, 0, 58, 8)
    assert one.skipped == {gone.reason: 1 for gone in report.skipped} and len(one.skipped) == 2
    assert (one.bytes_written, one.bytes_per_row) == (report.bytes_written, report.bytes_written / ROWS)
    assert one.newest == ["00000056-00000060", "00000048-00000056", "00000040-00000048", "00000032-00000040"]
    assert one.bottleneck in one.stages and set(one.stages) == set(report.loads)
    assert contents(output) == contents(LocalFolder(tmp_path / "plain"))
    assert not (tmp_path / "plain" / "progress").exists()


def test_no_reader_takes_it_for_a_shard_or_for_a_stray(tmp_path: Path) -> None:
    run(tmp_path / "out")
    run(tmp_path / "plain", tell=False)
    (one,) = (tmp_path / "out" / "progress").iterdir()
    assert one.suffix == ".json"
    names = [index.name for index in indexes_in(tmp_path / "plain")]
    for place in (tmp_path / "out", f"{tmp_path}/out/*.tar", f"{tmp_path}/ou[t]/**/*.json", f"{tmp_path}/out/*"):
        assert [index.name for index in find_indexes(place, or_none=True)] in (names, []), place
    assert find_indexes(f"{tmp_path}/out/progress/*.json", or_none=True) == []
    assert summarise(indexes_in(tmp_path / "out"), verify=True).faults == []
    assert reshard([indexes_in(tmp_path / "out")], LocalFolder(tmp_path / "again"), shard_size=8).shards == len(names)
    assert contents(LocalFolder(tmp_path / "again")) == contents(LocalFolder(tmp_path / "plain"))
    for folder in ("out", "plain"):
        compact_folder(LocalFolder(tmp_path / folder))
    mine, plain = (ShardSet.open([tmp_path / folder]) for folder in ("out", "plain"))
    assert mine.keys == plain.keys
    # Pruned to half of the rows, they are those of a fresh run.
    half = openers.rows(ROWS // 2)
    run(tmp_path / "out", source=half, prune=True)
    run(tmp_path / "half", source=half, tell=False)
    (tmp_path / "out" / "index.safetensors").unlink(missing_ok=True)
    assert contents(LocalFolder(tmp_path / "out")) == contents(LocalFolder(tmp_path / "half"))
    assert one not in (tmp_path / "out" / "progress").iterdir(), "the file of a worker that has finished is removed"


def test_a_run_with_nothing_to_do_leaves_no_trace(output: Folder) -> None:
    run(output, tell=False)
    run(output)
    assert "progress" not in output.names()


def test_nothing_is_told_where_each_writing_would_be_a_commit() -> None:
    output = HubFolder.open("hf://datasets/owner/told/folder", MemoryFileSystem())
    run(output, source=StubSource.of(4))
    assert "progress" not in output.names() and len(published(output)) == 1


def test_a_folder_that_takes_no_progress_gets_its_shards_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "progress").write_text("a file")
    assert run(tmp_path / "out").shards_written == 8


def test_a_failed_run_says_so_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RowError) as raised:
        run(tmp_path / "out", settings=Settings(on_error="stop"))
    (one,) = read_progress(LocalFolder(tmp_path / "out"))
    assert (one.state, one.message) == ("failed", str(raised.value).splitlines()[0])


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def worker(state: str, rows: tuple[int, int], updated: float, source_rows: int = 100) -> WorkerProgress:
    one = Pulse(PrecomputeRun.new(rows, source_rows), 2.0).progress(state)
    return replace(one, updated=updated)


def test_the_files_that_are_forgotten_are_of_workers_that_finished_or_are_dead_and_replaced_or_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 2e9
    monkeypatch.setattr("qie.precompute.progress.time.time", lambda: now)
    mine = PrecomputeRun.new((0, 50), 100)
    gone = [
        worker("finished", (50, 60), now),
        worker("failed", (40, 60), now),
        worker("running", (49, 60), now - 20),
        worker("running", (50, 60), now - 90_000),
        worker("stopped", (50, 60), now - 90_000),
    ]
    kept = [
        replace(worker("finished", (0, 50), now), run=mine),
        worker("running", (0, 50), now - 5),
        worker("running", (0, 50), now + 5000),  # whose clock is ahead
        worker("running", (50, 60), now - 2000),
        worker("failed", (50, 60), now - 2000),
    ]
    folder = tmp_path / "progress"
    folder.mkdir()
    for one in gone + kept:
        (folder / f"{one.worker}.json").write_text(json.dumps(asdict(one)))
    for name, content in {"x.json": "{}", "y.json": "[" * 9999, "z.json": "\xff", "notes.txt": "mine"}.items():
        (folder / name).write_text(content)
    (folder / "copy.json").write_text(json.dumps(asdict(kept[0])))
    for partial_name, age in (("old.json.partial", 90_000), ("young.json.partial", 10)):
        (folder / partial_name).touch()
        os.utime(folder / partial_name, (now - age, now - age))
    forget_others(LocalFolder(tmp_path), mine)
    assert {one.worker for one in read_progress(LocalFolder(tmp_path))} == {one.worker for one in kept}
    left = {path.name for path in folder.iterdir()} - {f"{one.worker}.json" for one in kept}
    assert left == {"x.json", "y.json", "z.json", "notes.txt", "copy.json", "young.json.partial"}


def test_rates_and_loads_are_of_the_last_minute_and_of_the_time_since_encoding_began() -> None:
    clock = Clock()
    pulse = Pulse(PrecomputeRun.new((0, 1000), 1000), 2.0, clock)
    report = Report(rows=0)
    pulse.at(report)
    assert (pulse.progress().rate, pulse.progress().bottleneck) == (None, None)
    clock.now += 10
    report.rows, report.shards_kept = 400, 4  # compared: says nothing of the pace
    pulse.at(report)
    assert (pulse.progress().rate, pulse.progress().rows_open) == (None, 0)
    for second in range(0, 200, 10):
        slow = second >= 100
        report.rows += 10 if slow else 40
        report.encoded = report.rows - 400
        busy = 9.0 if slow else 1.0
        before = report.loads.get("vae", Load())
        report.loads = {"vae": before + Load(report.rows - 400 - before.items, busy, 0), "text": Load(9, 5.0)}
        pulse.at(report)
        said = pulse.progress()
        clock.now += 10
    clock.now -= 10
    assert said.rate == pytest.approx((report.rows - 440) / 190, abs=1e-3)
    assert said.rate_minute == pytest.approx(1.0)
    assert (said.stages["vae"].busy, said.bottleneck) == (pytest.approx(0.9), "vae")
    assert said.stages["text"].busy == 0
    assert (said.rows, said.rows_open, said.advanced) == (report.rows, report.rows - 400, clock.now)
