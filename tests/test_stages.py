"""Stages: overlapped or in turn, the same results in the same order; and whatever happens, no thread is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from qie.data.follow import GrowingSamples
from qie.stages import Load, Pipeline, Stage, Stages, in_turn
from qie.stores import open_folder
from qie.stores.retry import patiently
from qie.threads import pause
from tests.conftest import ROOT, own_threads

TIMEOUT_S = 100
PLACES = ["items", "first", "middle", "last"]


def three(workers: int = 1, **works) -> Stages:
    return Stages(*(Stage(name, works.get(name, lambda item: item), workers) for name in ("first", "middle", "last")))


@pytest.mark.parametrize("workers", [1, 5])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 100])
def test_overlapped_the_results_are_those_in_turn_in_their_order(workers: int, depth: int, count: int) -> None:
    text = Stages.of(Stage("text", str, workers)).then(Stage("twice", lambda s: s * 2))
    stages = Stages.of(Stage("add", lambda n: n + 1, workers)).then(text)
    expected = [str(n + 1) * 2 for n in range(count)]
    assert list(Pipeline(stages, depth).run(range(count))) == [in_turn(stages, n) for n in range(count)] == expected


def test_stages_beside_something_work_on_the_second_part_of_a_pair_and_count_it_by_what_came_in() -> None:
    stages = Stages.of(Stage("double", lambda text: text * 2)).then(Stage("length", len, workers=2))
    pipeline = Pipeline(stages.beside(size=len))
    assert list(pipeline.run([("a", "xy"), ("b", ""), (None, "z")])) == [("a", 4), ("b", 0), (None, 2)]
    assert [(stage.name, stage.workers) for stage in stages.beside(len)] == [("double", 1), ("length", 2)]
    assert {name: load.items for name, load in pipeline.loads.items()} == {"double": 3, "length": 6}


def test_items_that_finish_in_reverse_leave_in_their_order() -> None:
    finished = [threading.Event() for _ in range(5)]

    def work(number: int) -> int:
        """Each waits for the one after it; the last of those that may be at work at once waits for none."""
        if number < 4:
            assert finished[number + 1].wait(TIMEOUT_S)
        finished[number].set()
        return number

    assert list(Pipeline(Stage("reverse", work, workers=5)).run(range(5))) == list(range(5))


def test_none_is_an_item_like_any_other_and_without_stages_items_pass_unchanged() -> None:
    assert list(Pipeline(Stage("none", lambda item: None)).run([None, 0, ""])) == [None] * 3
    assert list(Pipeline(Stages()).run([None, 0, ""])) == [None, 0, ""]


def test_the_vae_of_a_row_and_the_text_of_the_one_before_it_run_at_once() -> None:
    meeting = threading.Barrier(2, timeout=TIMEOUT_S)

    def vae(number: int) -> int:
        if number:
            meeting.wait()
        return number

    def text(number: int) -> int:
        if number < 9:
            meeting.wait()
        return number

    assert list(Pipeline(Stages(Stage("vae", vae), Stage("text", text))).run(range(10))) == list(range(10))


@pytest.mark.parametrize("workers", [2, 3])
def test_as_many_items_are_in_a_stage_at_once_as_it_has_workers(workers: int) -> None:
    meeting = threading.Barrier(workers, timeout=TIMEOUT_S)
    stage = Stage("meet", lambda item: meeting.wait() and None, workers)
    assert len(list(Pipeline(stage).run(range(4 * workers)))) == 4 * workers


def test_a_stage_of_one_worker_never_has_two_items() -> None:
    busy = threading.Lock()

    def work(item: int) -> int:
        assert busy.acquire(blocking=False)
        try:
            return sum(range(1000)) and item
        finally:
            busy.release()

    assert len(list(Pipeline(three(middle=work)).run(range(200)))) == 200


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_what_is_done_does_not_wait_for_an_item_that_is_long_in_coming(workers: int) -> None:
    left = threading.Event()

    def items() -> Iterator[int]:
        yield 0
        assert left.wait(TIMEOUT_S), "it stayed in a stage"
        yield 1

    seen = []
    for number in Pipeline(three(workers)).run(items()):
        seen.append(number)
        left.set()
    assert seen == [0, 1]


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_consumer_that_is_slow_bounds_what_is_read(workers: int, depth: int) -> None:
    # One that waits in front of the first queue; in each stage its workers', and one that waits after it.
    bound = 1 + 4 * depth + 3 * (workers + (workers > 1))
    produced, consumed, most = 0, 0, 0
    full = threading.Event()

    def items() -> Iterator[int]:
        nonlocal produced, most
        for number in range(20 * bound):
            produced += 1
            most = max(most, produced - consumed)
            if produced >= 1 + 4 * depth + 3:
                full.set()
            yield number

    for _ in Pipeline(three(workers), depth).run(items()):
        assert full.wait(TIMEOUT_S), "nothing is read ahead"
        consumed += 1
    assert consumed == 20 * bound
    assert most <= bound + 1


ERRORS = [ValueError("this one"), KeyboardInterrupt(), SystemExit(3), GeneratorExit(), StopIteration()]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", [0, 20, 99])
@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_error_anywhere_is_raised_once_behind_what_came_before_it_even_if_it_is_no_exception(
    place: str, workers: int, number: int, error: BaseException
) -> None:
    def fail(item: int) -> int:
        if item == number:
            raise error
        return item

    in_items = place == "items"
    running = Pipeline(three(workers, **({} if in_items else {place: fail}))).run(
        map(fail, range(100)) if in_items else range(100)
    )
    seen: list[int] = []
    if isinstance(error, StopIteration) and in_items:  # there it is the end
        seen.extend(running)
    else:
        with pytest.raises(RuntimeError if isinstance(error, StopIteration) else type(error)) as caught:
            seen.extend(running)
        assert caught.value is error or caught.value.__cause__ is error
    assert seen == list(range(number)), "results from before the error are lost"
    assert list(running) == []


def test_of_two_errors_the_one_of_the_earlier_item_is_raised() -> None:
    late = threading.Event()

    def first(number: int) -> int:
        if number == 3:
            late.set()
            raise ValueError("the later item, at once")
        return number

    def last(number: int) -> int:
        if number == 2:
            assert late.wait(TIMEOUT_S)
            raise KeyError("the earlier item")
        return number

    with pytest.raises(KeyError):
        list(Pipeline(three(first=first, last=last), depth=4).run(range(9)))


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("taken", [0, 1, 7])
@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_closed_early_or_by_an_error_of_its_consumer_it_ends_with_all_its_threads(
    workers: int, taken: int, error: type[BaseException] | None
) -> None:
    closed: list[bool] = []

    def items() -> Iterator[int]:
        try:
            yield from range(10**9)
        finally:
            closed.append(True)

    with pytest.raises(error) if error else nullcontext(), closing(Pipeline(three(workers)).run(items())) as running:
        assert [next(running) for _ in range(taken)] == list(range(taken))
        if error:
            raise error
    assert own_threads() == []
    assert len(closed) == bool(taken), "the source was left open"


@pytest.mark.parametrize("began", [True, False])
@pytest.mark.parametrize("which", PLACES)
def test_interrupted_while_its_threads_start_it_ends_with_all_of_them(
    which: str, began: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if thread.name != f"qie-{which}" or began:
            start(thread)
        if thread.name == f"qie-{which}":
            raise SystemExit(143)  # as the handler of a signal does

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(SystemExit):
        next(Pipeline(three()).run(iter(range(10**9))))
    assert own_threads() == []


def test_closed_while_a_stage_is_at_work_its_neighbours_end_and_it_is_waited_for() -> None:
    reached, release = threading.Event(), threading.Event()

    def middle(number: int) -> int:
        if number == 1:
            reached.set()
            assert release.wait(TIMEOUT_S)
        return number

    running = Pipeline(three(middle=middle), depth=1).run(range(100))
    assert next(running) == 0
    assert reached.wait(TIMEOUT_S)
    by_name = {thread.name: thread for thread in own_threads()}
    assert set(by_name) == {"qie-items", "qie-first", "qie-middle", "qie-last"}
    closing = threading.Thread(target=running.close)
    closing.start()
    for name in ("qie-items", "qie-first", "qie-last"):
        by_name[name].join(TIMEOUT_S)
        assert not by_name[name].is_alive(), name
    assert closing.is_alive() and by_name["qie-middle"].is_alive()
    release.set()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("place", ["items", "middle", "inner"])
@pytest.mark.parametrize("what", ["pause", "shard", "store"])
def test_closed_early_it_ends_where_it_waits_for_what_will_not_come(
    what: str, place: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QIE_STORE_RETRY_S", "100000")
    waiting = threading.Event()

    def look() -> None:
        waiting.set()

    def refused() -> None:
        waiting.set()
        raise OSError("no connection")

    shards = GrowingSamples(open_folder(tmp_path), 8, timeout_s=1e6, poll_s=1e5, alive=look)
    waits = {
        "pause": lambda: waiting.set() or pause(1e5),
        "shard": shards.wait,
        "store": lambda: patiently(refused, lambda error: True),
    }

    def work(number: int) -> int:
        return waits[what]() or number if number else number

    items: Iterator[int] = iter(range(2)) if place == "middle" else map(work, range(2))
    if place == "inner":
        items = Pipeline(Stages()).run(items)
    running = Pipeline(three(workers, **({"middle": work} if place == "middle" else {}))).run(items)
    assert next(running) == 0 and waiting.wait(TIMEOUT_S)
    closing = threading.Thread(target=running.close, daemon=True)
    closing.start()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive() and own_threads() == []


# Children of one process, for to import torch takes longer than all of them. Eight end while their thread is in the
# midst of native code that gives up Python's lock and takes it again on its way out. In the last one the second Ctrl-C
# arrives while the pipeline waits for its thread, which is in native code for as long as somebody holds stdin open: if
# these tests are killed, it does not go on.
ENDINGS = """
import gc, os, select, signal, sys, threading
from contextlib import closing
import click, torch
from qie.cli.common import explained
from qie.stages import Pipeline, Stages
from qie.threads import Threads, pause

torch.set_num_threads(1)
gc.freeze()  # what was imported is not gone through at each end
busy = threading.Event()

def items(stopped):
    yield 0
    busy.set()
    while not stopped():
        torch.rand(1 << 16).sort()

def ends():
    with closing(Pipeline(Stages()).run(items(lambda: pause(0)))) as running:
        next(running)

@click.command()
@explained
def interrupted_twice():
    with closing(Pipeline(Stages()).run(items(lambda: select.select([0], [], [], 0)[0]))) as running:
        next(running)
        busy.wait()
        threading.Thread(target=interrupt, daemon=True).start()
        raise KeyboardInterrupt

def interrupt():
    frame = None
    while frame is None:
        frame = sys._current_frames()[threading.main_thread().ident]
        while frame and frame.f_code is not Threads.join.__code__:
            frame = frame.f_back
    os.kill(os.getpid(), signal.SIGINT)

for work in (*[ends] * 8, interrupted_twice):
    child = os.fork()
    if child == 0:
        sys.argv = [""]
        sys.exit(work())
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def endings() -> tuple[list[int], str]:
    """Exit statuses, and what was said."""
    reader, writer = os.pipe()
    try:
        done = subprocess.run([sys.executable, "-c", ENDINGS], cwd=ROOT, capture_output=True, text=True, stdin=reader)
    finally:
        os.close(reader)
        os.close(writer)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()], done.stderr


def test_a_process_whose_threads_are_in_native_code_ends_without_abort(endings) -> None:
    statuses, said = endings
    assert statuses[:8] == [0] * 8, said


def test_a_second_ctrl_c_leaves_a_thread_in_native_code_behind_without_abort(endings) -> None:
    statuses, said = endings
    assert statuses[8:] == [128 + signal.SIGINT] and said.startswith("interrupted: ")


def test_a_load_counts_items_by_their_size_failed_ones_too_and_the_time_of_its_workers() -> None:
    pipeline = Pipeline(Stages(Stage("pack", lambda n: n, size=abs), Stage("divide", lambda n: 1 // n, workers=3)))
    assert pipeline.loads == {"pack": Load(), "divide": Load(workers=3)}
    with pytest.raises(ZeroDivisionError):
        list(pipeline.run([3, -2, 0]))
    assert {name: load.items for name, load in pipeline.loads.items()} == {"pack": 5, "divide": 3}
    assert all(load.busy_s > 0 for load in pipeline.loads.values())


def test_the_share_of_a_load_is_of_all_its_workers_time() -> None:
    assert Load(10, busy_s=6.0, workers=1).share(8.0) == 0.75
    assert Load(10, busy_s=6.0, workers=3).share(8.0) == 0.25
    assert Load(10, busy_s=6.0, workers=1).share(0.0) == 0.0
    assert Load(1, 2.0, 3) + Load(10, 20.0, 30) == Load(11, 22.0, 33)
    assert (Load(12, busy_s=6.0, workers=3).rate, Load().rate) == (6.0, 0.0)
