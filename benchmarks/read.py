"""Reading shards back: how fast, how evenly, how soon. On the CPU, from a warm page cache.

    python benchmarks/read.py [--samples 200] [--mb 10] [--runs 5] [--workers 2] [--folder DIR]

read:    samples as they come of 1024² (two latents, a prompt's embedding, its null prompt as a short tail), one to a
         batch, in one process. Each peer reads the same tensors and copies each once into a new batch; the null
         prompt is stored as its tail by most. Its embedding is joined by no peer, and by all: the ratios to both are
         given, since a trainer wants it for some batches only. Peers take their turns within a run, and read where
         they are called; qie prepares ahead in two threads, as it does for a trainer.
    Peers: webdataset (the same tars, safetensors.torch.load), safetensors.torch.load_file and torch.load
            (weights_only) of a file for each sample, and files as qwen-image-finetune's cache has them (six for each
            sample, null prompt stored whole). To shuffle, webdataset draws from a buffer of as many samples as a shard
            has.
threads: the same, shuffled, with as many threads on both sides: peers with one of torch's threads and with all that it
         takes by itself, since their copies are torch's; a DataLoader of the files and webdataset's own loader, with
         workers, and so MDS and litdata, where they are installed; qie with one reader thread, with its default, and
         with four processes, each with its slice of every batch. qie's copies use no threads of torch.
check:   the cost of the first pass by `verify`: each record's hash once, or always, with one reader thread and with
         the default. Peer: no check, with as many.
wait:    the share of time that training steps of 50 ms wait for the next of these samples, by `verify="first"`.
start:   seconds from the start of a process to its first batch, imports included. Peer: one of a webdataset.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from formats import LOOSE, Pass, Tensors, batch, joined_batch, loaders, optional_loaders, peers, write_peers
from measuring import Results, Row, absolute, beside, figure, in_turn, seconds
from measuring import parser as common
from samples import WIDTH, write_shards

from qie.data.stream import Stream
from qie.shards.shard_set import ShardSet
from qie.types import Batch

SHARD_SIZE = 20
PROCESSES = 4
STEP_S = 0.05
OURS = "qie, verify {}"

Job = tuple[str, bool]
"""Who reads, and whether shuffled."""


def parser() -> argparse.ArgumentParser:
    made = common(__doc__, runs=5)
    made.add_argument("--samples", type=int, default=200)
    made.add_argument("--mb", type=float, default=10, help="of a prompt's embedding")
    made.add_argument("--workers", type=int, default=2, help="of the peers' loaders (%(default)s)")
    made.add_argument("--folder", type=Path, help="where to write some gigabytes; by default among temporary files")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    results = Results(__file__, options, arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        tokens = round(options.mb * 1e6 / WIDTH / 2)
        stored = 0
        for number, (sample, record) in enumerate(write_shards(folder / "shards", options.samples, tokens, SHARD_SIZE)):
            write_peers(folder, number, sample, record)
            stored += len(record)
        passes = peers(folder, SHARD_SIZE)
        # First: the loaders fork their workers while this process has no threads of a stream.
        results.add(*equal_threads(folder, passes, options.samples, options.runs, options.workers, stored))
        results.add(*reading(folder, passes, options.samples, options.runs, stored))
        results.add(*checking(folder, options.samples, options.runs))
        results.add(*waiting(folder, options.samples, options.runs))
        results.add(*starting(folder, options.runs))
    results.save()


def equal_threads(
    folder: Path, passes: Mapping[str, Pass], count: int, runs: int, workers: int, stored: int
) -> list[Row]:
    """Two rows for each peer and each number of torch's threads: beside one reader thread, and beside the default."""
    workers = min(workers, -(-count // SHARD_SIZE))  # webdataset refuses a worker without a shard
    with_workers = loaders(folder, SHARD_SIZE, workers) | optional_loaders(folder, workers)
    theirs: dict[str, Callable[[], object]] = {name: partial(exhausted, made) for name, made in with_workers.items()}
    more = dict.fromkeys(theirs, f"workers: {workers}")
    for name, threads in itertools.product(("webdataset", "safetensors files"), sorted({1, torch.get_num_threads()})):
        told = f"{name}, torch's threads: {'default' if threads > 1 else 1}"
        theirs[told] = partial(with_threads, threads, partial(read_once, passes[name], True, batch))
    ours = {
        "reader threads: 1": reader(opened(folder, "off", threads=1), count),
        "reader threads: default": reader(opened(folder, "off"), count),
    }
    with processes(folder, count) as ours[f"processes: {PROCESSES}"]:
        took, shown = in_turn(theirs | ours, runs), partial(rate, stored)
    return [
        beside(
            f"{peer}, {mine}",
            f"read shuffled, {mine}",
            peer,
            took[peer],
            took[mine],
            shown=shown,
            more=more.get(peer, ""),
        )
        for peer, mine in itertools.product(theirs, ours)
    ]


@contextmanager
def processes(folder: Path, count: int) -> Iterator[Callable[[], None]]:
    """Reads the next `count` samples in several processes, a slice in each, as ranks of a run do."""
    started, pipes = multiprocessing.get_context("spawn"), list[Connection]()
    try:
        for rank in range(PROCESSES):
            mine, its = started.Pipe()
            started.Process(target=_rank, args=(folder, rank, -(-count // PROCESSES), its), daemon=True).start()
            pipes.append(mine)
        for pipe in pipes:
            pipe.recv()

        def read() -> None:
            for pipe in pipes:
                pipe.send(True)
            for pipe in pipes:
                pipe.recv()

        yield read
    finally:
        for pipe in pipes:
            pipe.send(False)


def _rank(folder: Path, rank: int, count: int, pipe: Connection) -> None:
    samples = ShardSet.open([folder / "shards"], verify="off")
    read = reader(Stream.over(samples, 1, rank=rank, world_size=PROCESSES), count)
    pipe.send(True)
    while pipe.recv():
        read()
        pipe.send(True)


def with_threads(threads: int, read: Callable[[], object]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        read()
    finally:
        torch.set_num_threads(before)


def exhausted(batches: Callable[[], Iterable[object]]) -> None:
    exhaust(batches())


def rate(stored: int, taken: float) -> str:
    # A record is counted once, whatever is made of it: the peers differ in what they copy.
    return f"{figure(stored / taken / 1e9)} GB/s"


def reading(folder: Path, passes: Mapping[str, Pass], count: int, runs: int, stored: int) -> list[Row]:
    """Two rows of qie's own evenness, and two for each peer in either order."""
    jobs: dict[Job, Callable[[], object]] = {}
    for shuffled in (False, True):
        for verify in ("off", "first"):
            jobs[OURS.format(verify), shuffled] = reader(opened(folder, verify, shuffled), count)
        for name, samples in passes.items():
            for made in (batch,) if name == LOOSE else (batch, joined_batch):
                key = name if made is batch else f"{name}, joined"
                jobs[key, shuffled] = partial(read_once, samples, shuffled, made)
    numbered = dict(enumerate(jobs))
    taken = in_turn({str(number): jobs[job] for number, job in numbered.items()}, runs)
    took = {job: taken[str(number)] for number, job in numbered.items()}

    shown = partial(rate, stored)
    rows = []
    for verify in ("off", "first"):
        name = OURS.format(verify)
        what, peer = f"read shuffled, {name}", f"{name}, in order"
        rows.append(beside(f"even {verify}", what, peer, took[name, False], took[name, True], shown=shown))
    for shuffled, name in itertools.product((False, True), passes):
        order, mine = "shuffled" if shuffled else "in order", took[OURS.format("off"), shuffled]
        rows.append(beside(f"{name} {order}", f"read {order}", name, took[name, shuffled], mine, shown=shown))
        if (joined := took.get((f"{name}, joined", shuffled))) is not None:
            peer = f"{name}, joining the null prompt"
            rows.append(beside(f"{name} {order} joined", f"read {order}", peer, joined, mine, shown=shown))
    return rows


def read_once(samples: Pass, shuffled: bool, made: Callable[[Tensors], Tensors]) -> None:
    exhaust(map(made, samples(shuffled)))


def exhaust(batches: Iterable[object]) -> None:
    for _ in batches:
        pass


def opened(folder: Path, verify: str, shuffled: bool = True, threads: int = Stream.threads) -> Stream:
    samples = ShardSet.open([folder / "shards"], verify=verify)  # type: ignore[arg-type]
    return Stream.over(samples, 1, order="shuffle" if shuffled else "sequence", threads=threads)


def reader(stream: Stream, count: int) -> Callable[[], None]:
    """Reads the next `count` batches each time; what is prepared ahead is as much before as behind."""
    batches: Iterator[Batch] = iter(stream.forever())
    return lambda: exhaust(itertools.islice(batches, count))


def checking(folder: Path, count: int, runs: int) -> list[Row]:
    """Rows of first passes by one reader thread and by the default, and of later passes."""
    counts = {"1": 1, "default": Stream.threads}
    passes: dict[tuple[str, str], list[float]] = {}

    def timed(verify: str, threads: str, read: Callable[[], None]) -> None:
        passes.setdefault((verify, threads), []).append(seconds(read) / count)

    jobs = list(itertools.product(("off", "first", "always"), counts))
    for run in range(runs):
        first = run % len(jobs)
        for verify, threads in jobs[first:] + jobs[:first]:
            read = reader(opened(folder, verify, threads=counts[threads]), count)
            timed(verify, threads, read)
            timed(f"{verify}, again", threads, read)
    told = {"first": "first pass, verify first", "always": "first pass, verify always"}
    told |= {f"{verify}, again": f"a later pass, verify {verify}" for verify in told}
    return [
        beside(
            f"check {verify}, {threads}",
            f"{what}, reader threads: {threads}",
            "verify off",
            passes["off, again" if "again" in verify else "off", threads],
            passes[verify, threads],
            unit="× the time",
            share=True,
            shown=lambda one: f"{figure(1000 * one)} ms a sample",
        )
        for (verify, what), threads in itertools.product(told.items(), counts)
    ]


def waiting(folder: Path, count: int, runs: int) -> list[Row]:
    shares: dict[str, list[tuple[float, float]]] = {"first": [], "second": []}
    for _ in range(runs):
        batches = opened(folder, "first").forever()
        held = next(batches)
        for share in shares.values():
            waited = freed = 0.0
            started = time.perf_counter()
            for _ in range(count):
                time.sleep(STEP_S)
                before = time.perf_counter()
                upcoming = next(batches)
                there = time.perf_counter()
                held = upcoming
                del upcoming  # the batch before is nobody's any more
                waited += there - before
                freed += time.perf_counter() - there
            total = time.perf_counter() - started
            share.append((100 * waited / total, 100 * freed / total))
        assert len(held) == 1
    rows = []
    for name, share in shares.items():
        waits, frees = zip(*share, strict=True)
        detail = f"freeing the previous batch: {figure(statistics.median(frees))} %"
        what = f"waiting for the next sample, {name} pass, steps of {1000 * STEP_S:.0f} ms"
        rows.append(absolute(f"wait {name}", what, waits, " % of the time", detail=detail))
    return rows


_STARTS = {
    "qie": "from qie.data.opening import open_stream\nnext(iter(open_stream({shards!r})))",
    "webdataset": "import torch, webdataset\nfrom safetensors.torch import load\n"
    "sample = next(iter(webdataset.WebDataset({tars!r}, shardshuffle=False)))\n"
    "{{name: torch.stack([tensor]) for name, tensor in load(sample['safetensors']).items()}}",
    "a safetensors file": "import torch\nfrom safetensors.torch import load_file\n"
    "{{name: torch.stack([tensor]) for name, tensor in load_file({file!r}).items()}}",
    "import torch": "import torch",
}


def starting(folder: Path, runs: int) -> list[Row]:
    places = {
        "shards": str(folder / "shards"),
        "tars": [str(path) for path in sorted((folder / "shards").glob("*.tar"))],
        "file": str(folder / "safetensors" / "0.safetensors"),
    }
    scripts = {name: script.format(**places) for name, script in _STARTS.items()}
    took = in_turn({name: partial(first_batch, script) for name, script in scripts.items()}, runs, warm_up=False)
    what = "time to the first batch, process start included"
    return [beside(f"start {name}", what, name, took[name], took["qie"]) for name in scripts if name != "qie"]


def first_batch(script: str) -> None:
    """Wait until a process says that it is there; not until it has ended."""
    command = [sys.executable, "-W", "ignore", "-c", f"{script}\nprint('there', flush=True)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        process.kill()


if __name__ == "__main__":
    main()
