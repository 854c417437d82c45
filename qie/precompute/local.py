"""Precompute on this machine: in this process, or in one process for each set of devices.

The parent deals shards to its workers one by one, so a slow device gets fewer. The stages of a worker overlap across
shards: it asks for the next one before it has finished the last. Each worker has a pipe of its own to the parent, so
one that dies disturbs no other.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from qie.data.live import RowEncoder
from qie.data.sources import Source
from qie.errors import QieError, UsageError
from qie.precompute.counts import OnReport, Report
from qie.precompute.engine import Engine, Settings
from qie.precompute.progress import PrecomputeRun, withdraw
from qie.precompute.prune import pruned, require_pruned
from qie.recipe import Recipe
from qie.shards.discovery import published, rows_of
from qie.shards.grid import SHARD_ROWS, Range, shard_ranges
from qie.shards.reader import Shard
from qie.shards.shard_set import require_disjoint
from qie.shards.writer import remove_abandoned
from qie.stores import File, Folder, LocalFolder, open_folder

Opener = Callable[[], tuple[Source, RowEncoder]]
"""Opens source and encoder in a worker. It travels there: a function of a module, with plain arguments."""

REPORT_EVERY_S = 0.5


def precompute(
    source: Source,
    encoder: RowEncoder,
    output: Folder | str | Path,
    *,
    rows: Range,
    shard_size: int = SHARD_ROWS,
    settings: Settings | None = None,
    workers: Sequence[Opener] = (),
    progress: OnReport = lambda report: None,
    prune: bool = False,
    tell: bool = False,
) -> Report:
    """Bring the shards of `rows` in `output` up to date with `source`.

    A published shard whose rows still have their keys is left alone. A shard with changed rows is written again, with
    the records of the other rows copied. Published shards are complete, so a killed run continues where it was.

    Args:
        source, encoder: the rows, and the encoder that makes samples of them.
        output: a folder, by path or URL.
        rows: the half-open range of rows.
        shard_size: rows per shard, on a grid that starts at row 0.
        settings: see `Settings`.
        workers: open source and encoder in processes of their own, which do the work; none for this process.
        progress: called with the report as it grows.
        prune: make the files of a run into an empty folder of what the output has, whatever rows the source has lost.
        tell: keep a file of each worker in the output's folder `progress`, for `qie watch`.

    Raises:
        UsageError: the output holds rows that the source no longer has, and `prune` is false or not possible there.
        RecipeMismatchError: the output holds shards of another recipe.
        RowError: a row cannot be encoded and `on_error` is "stop".
        ShardError, StoreError: a shard cannot be read or written, or, in a store without locks, another run has
            published some of the same rows meanwhile. Published shards stay.
    """
    output = open_folder(output)
    settings = settings or Settings()
    if prune:
        if settings.trust_published:
            raise UsageError("--prune compares all rows with the shards, and --trust-published none")
        context: AbstractContextManager[tuple[str, ...]] = pruned(output, encoder.recipe, rows, shard_size, len(source))
    else:
        require_pruned(output)
        context = nullcontext(())
    with context as links:
        settings = replace(settings, reuse=(*settings.reuse, *links))
        shards = plan_shards(output, encoder.recipe, rows, shard_size, len(source))
        told = PrecomputeRun.new(rows, len(source)) if tell else None
        if workers:
            report = _run_workers(workers, partial(_engine, output, settings, encoder.recipe, told), shards, progress)
        else:
            report = Engine(source, encoder, output, settings, progress, told=told).run(shards)
        if told and not report.shards_written:
            withdraw(output, told)
    require_disjoint((index, rows_of(index)) for index in published(output))
    return report


def plan_shards(output: Folder, recipe: Recipe, rows: Range, shard_size: int, source_rows: int) -> list[Range]:
    """The shards of a run. Prepares the output: makes the folder, and removes the partial files of killed runs.

    Opens one published shard to compare its recipe; the engine opens the others.
    """
    _make(output)
    there = check_output(output, recipe, source_rows)
    remove_abandoned(output, rows)
    return shard_ranges(*rows, shard_size, map(rows_of, there))


def check_output(output: Folder, recipe: Recipe, source_rows: int) -> list[File]:
    """The published shards. Checks the recipe of one, and that the source has all their rows.

    Raises:
        RecipeMismatchError: the output holds shards of another recipe.
        ShardError: two shards hold the same rows.
        UsageError: the output holds rows that the source no longer has.
    """
    there = published(output)
    require_disjoint((index, rows_of(index)) for index in there)
    if there:
        if first := Shard.published(there[0]):
            recipe.require_equal(
                first.index.recipe, there[0], "write to another folder, or delete the shards in this one"
            )
        if rows_of(there[-1])[1] > source_rows:
            raise UsageError(
                "the output holds rows that the source no longer has",
                where=there[-1],
                expected=f"rows below {source_rows}",
                hint="add --prune, which keeps the records of the rows that are left; or write to another folder",
            )
    return there


def _engine(
    output: Folder,
    settings: Settings,
    recipe: Recipe,
    told: PrecomputeRun | None,
    source: Source,
    encoder: RowEncoder,
    progress: OnReport,
) -> Engine:
    recipe.require_equal(encoder.recipe, "a worker", "name devices of one kind, or set cache.compute_dtype")
    return Engine(source, encoder, output, settings, progress, told=told)


def _make(output: Folder) -> None:
    if not isinstance(output, LocalFolder):
        return
    try:
        output.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            "the output is not a folder and cannot be created",
            where=output,
            found=error.strerror,
            hint="correct --output, or cache.cache_dir",
        ) from error


_EngineOf = Callable[[Source, RowEncoder, OnReport], Engine]


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    report: Report = field(default_factory=Report)


def _run_workers(
    openers: Sequence[Opener], engine_of: _EngineOf, shards: Sequence[Range], progress: OnReport
) -> Report:
    """Run a process for each of `openers` until all `shards` are done.

    Raises:
        QieError: raised in a worker, or because a worker died. The others are stopped; published shards stay.
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
    report = Report.of_all([worker.report for worker in workers])
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
        hint="was it out of memory? Published shards stay; run the same command again to continue",
    )


def _stop(workers: Iterable[_Worker]) -> None:
    """Let workers end by themselves, as on Ctrl-C, so that they remove their partial files."""
    for worker in workers:
        worker.pipe.close()  # tells a worker that waits for a shard that none will come
        if worker.process.is_alive():
            worker.process.terminate()
    for worker in workers:
        worker.process.join(timeout=30)
        if worker.process.is_alive():
            worker.process.kill()


def _work(opener: Opener, engine_of: _EngineOf, pipe: Connection) -> None:
    """The life of a worker. It sends None to ask for a shard, its report, an error, or "done"."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, too, which then stops its workers
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
    except (EOFError, BrokenPipeError):  # the parent is gone
        sys.exit(1)
    except (QieError, OSError) as error:
        send(error)
