"""Waiting for samples from a store: a web server with the latency and bandwidth of one far away, in one run.

    python benchmarks/store.py [--latency-ms 20] [--megabytes-per-s 200] [--demand 0.8] [--steps 48] [--runs 3]

Batches of eight samples of 1024² are read by ranges, without a local copy, or in blocks of whole shards from copies on
the local disk, which has room for four blocks, in one epoch of one process, and of two that share the disk and halve
the batches. A step is asleep, as a GPU lets the host sleep, for so long that the steps ask for the given share of the
bandwidth. Peers: the same stream, which asks for one sample of a batch after another; which fetches a shard when a
sample of it is read, and none ahead.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from unittest import mock

from measuring import Results, absolute, figure
from measuring import parser as common
from samples import exhaust, write_shards
from slow_server import sent, serving

from qie.data.opening import open_stream
from qie.data.stream import Stream
from qie.shards.cache import ShardCache
from qie.shards.shard_set import ShardSet, compact_folder
from qie.stores import open_folder
from qie.types import Batch

BATCH = 8
SHARD = 16
BLOCK = 4
"""Shards."""
ROOM = 4
"""Blocks."""


def parser() -> argparse.ArgumentParser:
    made = common(__doc__, runs=3)
    made.add_argument("--latency-ms", type=float, default=20)
    made.add_argument("--megabytes-per-s", type=float, default=200)
    made.add_argument("--demand", type=float, default=0.8, help="of the bandwidth")
    made.add_argument("--steps", type=int, default=48, help="timed steps of each in a run")
    made.add_argument("--tokens", type=int, default=40)
    made.add_argument("--processes", type=int, default=2, help="with one local folder, at most")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    results = Results(__file__, options, arguments)
    bytes_per_s, block = options.megabytes_per_s * 1e6, BLOCK * SHARD
    count = -(-BATCH * options.steps // block) * block
    with tempfile.TemporaryDirectory() as name:
        exhaust(write_shards(Path(name), count, options.tokens, SHARD))
        folder = open_folder(name)
        compact_folder(folder)  # which stands for a listing, that a web server does not give
        os.sync()  # what was written does not keep the disk busy while copies are flushed to it
        size = sum(file.stat().st_size for file in Path(name).glob("*.tar")) / count
        step_s = BATCH * size / (options.demand * bytes_per_s)
        asked = (
            f"{size / 1e6:.2f} MB a sample, {options.latency_ms:g} ms, {options.megabytes_per_s:g} MB/s, of which "
            f"steps of {1e3 * step_s:.0f} ms ask for {options.demand:g}"
        )
        with serving(Path(name), options.latency_ms / 1e3, bytes_per_s) as url:
            ranges(results, asked, url, options.steps, step_s, options.runs)
            blocks(
                results, asked, Epoch(url, step_s, round(ROOM * block * size * 1.01)), options.runs, options.processes
            )
    results.save()


def ranges(results: Results, asked: str, url: str, steps: int, step_s: float, runs: int) -> None:
    """Rows of samples that are asked for one by one."""
    found = [[waiting(url, steps, step_s, at_once=way) for way in (True, False)] for _ in range(runs)]
    ours, theirs = ([100 * run[way] for run in found] for way in (0, 1))
    what = f"waiting for batches of {BATCH}, {asked}"
    results.add(absolute("at once", what, ours, " % of the time"))
    results.add(absolute("in turn", f"{what}, one request after another", theirs, " % of the time"))


def waiting(url: str, steps: int, step_s: float, *, at_once: bool) -> float:
    """The part of the time in which no batch was ready, after the first ones."""
    with (
        mock.patch.object(ShardSet, "distant", at_once),
        open_stream(url, batch_size=BATCH) as stream,
        closing(stream.forever()) as batches,
    ):
        return share(waits_of(stream, batches, step_s, steps), step_s)


def share(waits: Sequence[float], step_s: float) -> float:
    """The part of the time that was waited."""
    return sum(waits) / (sum(waits) + len(waits) * step_s)


@dataclass(frozen=True)
class Epoch:
    """One epoch in blocks of whole shards, of which a folder on the disk has room for `local_bytes`."""

    url: str
    step_s: float
    local_bytes: int

    def run(self, pool: ProcessPoolExecutor | None, processes: int, ahead: bool) -> tuple[float, float, float]:
        """The part of the time in which a process had no batch; requests, and bytes that were sent, by trained ones."""
        before = sent(self.url)
        with tempfile.TemporaryDirectory() as local_dir:
            if pool is None:
                ranks = [self.waits(local_dir, 0, 1, ahead)]
            else:
                told = [pool.submit(self.waits, local_dir, rank, processes, ahead) for rank in range(processes)]
                ranks = [rank.result() for rank in told]
        after = sent(self.url)
        sizes = ShardSet.open(self.url).table.sizes
        waited = share(list(map(max, *ranks)) if len(ranks) > 1 else ranks[0], self.step_s)
        return waited, (after[0] - before[0]) / len(sizes), (after[1] - before[1]) / int(sizes.sum())

    def waits(self, local_dir: str, rank: int, world_size: int, ahead: bool) -> list[float]:
        """How long a process waited for each batch but the first ones."""
        cache = ShardCache(Path(local_dir), self.local_bytes)
        with open_stream(
            self.url,
            batch_size=BATCH // world_size,
            cache=cache,
            order="blocks",
            block_size=BLOCK,
            rank=rank,
            world_size=world_size,
        ) as stream:
            if not ahead:
                stream.samples.__dict__["copies"] = None
            return waits_of(stream, iter(stream), self.step_s)


def blocks(results: Results, asked: str, epoch: Epoch, runs: int, most: int) -> None:
    """Rows of whole shards: for one process and for two, ahead and not."""
    for processes in range(1, most + 1):
        with ExitStack() as stack:
            pool = stack.enter_context(started(processes)) if processes > 1 else None
            found = [[epoch.run(pool, processes, ahead) for ahead in (True, False)] for _ in range(runs)]
        who = "one process" if processes == 1 else f"{processes} processes with one local folder"
        for way, how in enumerate(("", ", none fetched ahead")):
            shares, requests, fetched = zip(*(run[way] for run in found), strict=True)
            key = f"blocks {processes}{' before' if way else ''}"
            what = f"{who}, whole shards in blocks of {BLOCK}, room for {ROOM} blocks, {asked}{how}"
            detail = f"{figure(max(requests))} requests a sample"
            waited = [100 * share for share in shares]
            results.add(absolute(key, f"waiting, {what}", waited, " % of the time", detail=detail))
            results.add(absolute(f"{key} fetched", f"bytes fetched by those trained on, {what}", fetched, "×"))


@contextmanager
def started(processes: int) -> Iterator[ProcessPoolExecutor]:
    """So many processes that have imported all they need, and keep step with one another."""
    spawning = multiprocessing.get_context("spawn")
    together = spawning.Barrier(processes)
    with ProcessPoolExecutor(processes, mp_context=spawning, initializer=keep_step, initargs=(together,)) as pool:
        for ready in [pool.submit(step) for _ in range(processes)]:
            ready.result()
        yield pool


_together: list[Barrier] = []
"""In a process of several: where they meet before each step, as they do when they add up their gradients."""


def keep_step(together: Barrier) -> None:
    _together.append(together)


def step(step_s: float = 0) -> None:
    time.sleep(step_s)
    for together in _together:
        together.wait()


def waits_of(stream: Stream, batches: Iterator[Batch], step_s: float, steps: int | None = None) -> list[float]:
    """How long batches were waited for, but the first ones, which nothing could fetch ahead: so many, or all."""
    found, first = list[float](), stream.prefetch + 1
    while steps is None or len(found) < first + steps:
        asked = time.perf_counter()
        if next(batches, None) is None:
            break
        found.append(time.perf_counter() - asked)
        step(step_s)
    return found[first:]


if __name__ == "__main__":
    main()
