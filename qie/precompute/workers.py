"""Worker processes: one for each set of devices, fed with shards by their parent until there are none left.

Shards are dealt one by one, so a slow device gets fewer. A worker's stages overlap across shards: it asks for the next
one before it has finished the last. Each talks to the parent through a pipe of its own, so one that dies disturbs none.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from qie.data.samples import RowEncoder
from qie.data.sources import Source
from qie.errors import QieError
from qie.precompute.engine import Engine
from qie.precompute.ranges import Range
from qie.precompute.report import Progress, Report

Opener = Callable[[], tuple[Source, RowEncoder]]
"""Opens source and encoder in a worker; travels there, so it is a function of a module with plain arguments."""

EngineOf = Callable[[Source, RowEncoder, Progress], Engine]


REPORT_EVERY_S = 0.5


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    report: Report = field(default_factory=Report)


def run_workers(openers: Sequence[Opener], engine_of: EngineOf, shards: Sequence[Range], progress: Progress) -> Report:
    """Run a process for each of `openers` until all `shards` are done.

    Raises:
        QieError: as it was raised in a worker, or that a worker died. The others are stopped; what is published stays.
    """
    # Spawned, not forked: CUDA does not survive a fork, nor do the threads of this process.
    context = multiprocessing.get_context("spawn")
    workers: list[_Worker] = []
    waiting = iter(shards)
    try:
        for number, opener in enumerate(openers):
            mine, theirs = context.Pipe()
            process = context.Process(target=_work, args=(opener, engine_of, theirs), name=f"qie-worker-{number}")
            process.start()
            theirs.close()
            workers.append(_Worker(process, mine))
        started = time.monotonic()
        running = {worker.pipe: worker for worker in workers}
        while running:
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                worker = running[pipe]
                message = _received(worker)
                if message is None:
                    _deal(worker, next(waiting, None))
                elif isinstance(message, Report):
                    worker.report = message
                    progress(_together(workers, started))
                elif isinstance(message, BaseException):
                    raise message
                else:
                    del running[pipe]
        return _together(workers, started)
    except BaseException:
        _stop(workers)
        raise
    finally:
        for worker in workers:
            worker.process.join()
            worker.pipe.close()


def _together(workers: Sequence[_Worker], started: float) -> Report:
    report = sum((worker.report for worker in workers), Report())
    return replace(report, seconds=time.monotonic() - started)


def _received(worker: _Worker) -> Any:
    try:
        return worker.pipe.recv()
    except (EOFError, ConnectionError):
        raise _died(worker) from None


def _deal(worker: _Worker, shard: Range | None) -> None:
    try:
        worker.pipe.send(shard)
    except ConnectionError:
        raise _died(worker) from None


def _died(worker: _Worker) -> QieError:
    worker.process.join()
    code = worker.process.exitcode or 0
    return QieError(
        "a worker process died",
        where=worker.process.name,
        found=f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}",
        hint="was it out of memory? What is published stays; run the same command again to go on",
    )


def _stop(workers: Iterable[_Worker]) -> None:
    """Let workers end by themselves, as on Ctrl-C, so that they remove what is not published."""
    for worker in workers:
        worker.pipe.close()  # one that waits for a shard learns that there is nobody to give it
        if worker.process.is_alive():
            worker.process.terminate()
    for worker in workers:
        worker.process.join(timeout=30)
        if worker.process.is_alive():
            worker.process.kill()


def _work(opener: Opener, engine_of: EngineOf, pipe: Connection) -> None:
    """The life of a worker. What it sends: None to ask for a shard, its report, an error, or "done"."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the parent, too, which then stops its workers
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    lock = threading.Lock()
    reported = time.monotonic()

    def send(message: object) -> None:
        with lock:
            pipe.send(message)

    def report(done: Report) -> None:
        nonlocal reported
        if time.monotonic() - reported > REPORT_EVERY_S:
            reported = time.monotonic()
            send(done)

    def dealt() -> Iterator[Range]:
        while True:
            send(None)
            shard: Range | None = pipe.recv()
            if shard is None:
                return
            yield shard

    try:
        source, encoder = opener()
        send(engine_of(source, encoder, report).run(dealt()))
        send("done")
    except (EOFError, BrokenPipeError):  # the parent is gone: nobody is left to tell
        sys.exit(1)
    except (QieError, OSError) as error:
        send(error)
