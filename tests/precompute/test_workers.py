"""Worker processes: they write what one process writes, and none of them is left, however a run ends."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from qie.errors import QieError, RecipeMismatchError, RowError
from qie.precompute import Report, Settings, precompute
from qie.precompute.progress import is_silent, read_progress
from qie.shards.discovery import published, rows_of
from qie.shards.reader import Shard
from qie.shards.verify import shard_faults
from qie.stores import LocalFolder
from tests.precompute import openers
from tests.stubs import StubEncoder

ROWS, SHARD_SIZE, TIMEOUT_S = 60, 4, 300


def run(output: Path, *workers: Callable, count: int = ROWS, shard_size: int = SHARD_SIZE, **named) -> Report:
    settings = Settings(**named.pop("settings", {}))
    return precompute(
        openers.rows(count),
        named.pop("encoder", None) or StubEncoder(),
        output,
        rows=(0, count),
        shard_size=shard_size,
        settings=settings,
        workers=workers,
        **named,
    )


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def noted(notes: Path) -> tuple[set[str], list[int]]:
    """Processes that encoded, and the rows that they encoded."""
    lines = [line.split() for line in notes.read_text().splitlines()]
    return {process for process, _ in lines}, sorted(int(row) for _, row in lines)


def assert_sound(folder: Path) -> None:
    assert not list(folder.glob("*.partial"))
    for index in published(folder):
        assert list(shard_faults(Shard(index))) == []
    assert len(list(folder.glob("*.tar"))) == len(published(folder))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process writes."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    run(folder)
    return files(folder)


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    left = multiprocessing.active_children()
    for process in left:
        process.kill()
        process.join()
    assert left == []


@pytest.fixture
def in_time(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Calls a function in a thread and gives its result or error; a hang is a failure, and so is a worker that did not
    end when it was told to and had to be killed."""
    kill, killed = SpawnProcess.kill, []

    def noted_kill(self: SpawnProcess) -> None:
        killed.append(self.name)
        kill(self)

    monkeypatch.setattr(SpawnProcess, "kill", noted_kill)

    def call(function: Callable) -> object:
        outcome: list[object] = []

        def work() -> None:
            try:
                outcome.append(function())
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(TIMEOUT_S)
        assert outcome, "it did not end"
        assert killed == [], "workers did not end when they were told to"
        return outcome[0]

    return call


def test_two_workers_write_the_files_that_one_process_writes_say_nothing_and_end_by_themselves(
    tmp_path: Path, whole: dict[str, bytes], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object) -> None:
        raise AssertionError("a worker that was done was terminated")

    monkeypatch.setattr(SpawnProcess, "terminate", refuse)
    notes = tmp_path / "notes"
    seen: list[int] = []
    opener = partial(openers.noting, ROWS, str(notes))
    report = run(tmp_path / "out", opener, opener, progress=lambda report: seen.append(report.rows))
    assert capfd.readouterr().err == ""
    assert files(tmp_path / "out") == whole
    processes, rows = noted(notes)
    assert rows == sorted(set(range(ROWS)) - {7, 20})
    assert 1 <= len(processes) <= 2
    assert (report.rows, report.encoded, report.reused, report.shards_written) == (60, 58, 0, 15)
    assert [gone.row for gone in report.skipped] == [7, 20]
    assert report.bytes_written == sum(len(content) for name, content in whole.items() if name.endswith(".tar"))
    assert report.loads["encode"].workers == 2
    assert seen == sorted(seen) and seen[-1] == 60

    again = run(tmp_path / "out", opener)
    assert (again.encoded, again.reused, again.shards_kept, len(again.skipped)) == (0, 58, 15, 2)
    assert noted(notes)[1] == rows


def test_more_workers_than_shards_are_no_trouble(tmp_path: Path) -> None:
    opener = partial(openers.plain, ROWS)
    report = run(tmp_path / "out", opener, opener, shard_size=64)
    assert (report.rows, report.shards_written) == (ROWS, 1)


def test_a_killed_worker_ends_the_run_with_its_signal_and_the_next_run_completes_it(
    tmp_path: Path, whole: dict[str, bytes], in_time: Callable
) -> None:
    notes = tmp_path / "notes"
    progress = tmp_path / "out" / "progress"
    opener = partial(openers.dying, ROWS, 30, str(tmp_path / "once"), str(notes), str(progress))
    error = in_time(lambda: run(tmp_path / "out", opener, opener, tell=True))
    assert isinstance(error, QieError), error
    assert "a worker process died" in str(error) and "SIGKILL" in str(error)
    # The last that it told of itself stays as it is; the other one has said that it was stopped, if it had begun.
    (killed,) = (one for one in read_progress(LocalFolder(tmp_path / "out")) if one.state == "running")
    assert killed.task in ("qie-worker-0", "qie-worker-1") and killed.run.rows == (0, ROWS)
    assert not is_silent(killed, 5 * killed.interval_s) and is_silent(killed, 5.1 * killed.interval_s)
    (progress / f"{killed.worker}.json").write_text(json.dumps(asdict(replace(killed, updated=killed.updated - 60))))
    # What the killed one held is invisible and taken over by the next run.
    for index in published(tmp_path / "out"):
        assert list(shard_faults(Shard(index))) == []
    done = {row for index in published(tmp_path / "out") for row in range(*rows_of(index))}
    encoder = StubEncoder()
    run(tmp_path / "out", encoder=encoder, tell=True)
    assert files(tmp_path / "out") == whole
    assert sorted(encoder.encoded) == sorted(set(range(ROWS)) - done - {7, 20})
    left = {one.worker for one in read_progress(LocalFolder(tmp_path / "out"))}
    assert killed.worker not in left, "who takes over its rows removes its file"


def test_a_worker_killed_while_it_waits_for_a_shard_is_a_worker_that_died(tmp_path: Path, in_time: Callable) -> None:
    error = in_time(lambda: run(tmp_path / "out", partial(openers.dying_when_it_has_asked, ROWS)))
    assert isinstance(error, QieError), repr(error)
    assert "a worker process died" in str(error) and "SIGKILL" in str(error)


def test_an_error_of_a_row_arrives_as_it_is_when_rows_stop_the_run(tmp_path: Path, in_time: Callable) -> None:
    opener = partial(openers.refusing, ROWS, 3)
    error = in_time(lambda: run(tmp_path / "out", opener, settings={"on_error": "stop"}))
    assert isinstance(error, RowError), repr(error)
    assert "row 3 (row3)" in str(error) and "it is not wanted" in str(error)
    assert (error.expected, error.found) == ("another", 3)
    assert_sound(tmp_path / "out")


def test_an_unforeseen_error_of_a_worker_ends_the_run(tmp_path: Path, in_time: Callable, capfd) -> None:
    error = in_time(lambda: run(tmp_path / "out", partial(openers.crashing, ROWS)))
    assert isinstance(error, QieError), repr(error)
    assert "exit status 1" in str(error)
    assert "not foreseen" in capfd.readouterr().err
    assert_sound(tmp_path / "out")


def test_an_interrupted_run_stops_its_workers_at_once_and_leaves_no_partial_file(
    tmp_path: Path, in_time: Callable
) -> None:
    """Even one that waits for a shard, which nobody will give it."""
    stopping, marker = tmp_path / "stopping", tmp_path / "waits"

    def interrupt(report: Report) -> None:
        stopping.touch()
        deadline = time.monotonic() + TIMEOUT_S / 2
        while not marker.exists() and time.monotonic() < deadline:
            threading.Event().wait(0.005)
        assert marker.exists()
        raise KeyboardInterrupt

    opener = partial(openers.asking, 4000, str(stopping), str(marker))
    error = in_time(lambda: run(tmp_path / "out", opener, opener, count=4000, shard_size=1, progress=interrupt))
    assert isinstance(error, KeyboardInterrupt), repr(error)
    assert multiprocessing.active_children() == []
    assert_sound(tmp_path / "out")
    assert len(published(tmp_path / "out")) < 4000


def test_workers_of_another_recipe_are_refused(tmp_path: Path, in_time: Callable) -> None:
    error = in_time(lambda: run(tmp_path / "out", partial(openers.of_another_recipe, ROWS)))
    assert isinstance(error, RecipeMismatchError), repr(error)
    assert "vae_dtype" in str(error)
    assert published(tmp_path / "out") == []
