"""Waiting for samples from a store: a web server with the latency and bandwidth of one far away, in one run.

    python benchmarks/store.py [--latency-ms 20] [--megabytes-per-s 200] [--demand 0.8] [--steps 60] [--runs 3]

Batches of eight samples of 1024² are read by ranges, without a local copy. A step is asleep, as a GPU lets the host
sleep, for so long that the steps ask for the given share of the bandwidth. Peer: the same stream, which asks for one
sample of a batch after another.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from unittest import mock

from measuring import Results, absolute
from measuring import parser as common
from samples import exhaust, write_shards
from slow_server import serving

from qie.data.opening import open_stream
from qie.shards.shard_set import ShardSet, compact_folder
from qie.stores import open_folder

BATCH = 8


def parser() -> argparse.ArgumentParser:
    made = common(__doc__, runs=3)
    made.add_argument("--latency-ms", type=float, default=20)
    made.add_argument("--megabytes-per-s", type=float, default=200)
    made.add_argument("--demand", type=float, default=0.8, help="of the bandwidth")
    made.add_argument("--steps", type=int, default=60, help="timed steps of each in a run")
    made.add_argument("--tokens", type=int, default=40)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    results = Results(__file__, options, arguments)
    count, bytes_per_s = BATCH * min(options.steps + 4, 16), options.megabytes_per_s * 1e6
    with tempfile.TemporaryDirectory() as name:
        exhaust(write_shards(Path(name), count, options.tokens, 16))
        folder = open_folder(name)
        compact_folder(folder)  # which stands for a listing, that a web server does not give
        size = sum(file.stat().st_size for file in Path(name).glob("*.tar")) / count
        step_s = BATCH * size / (options.demand * bytes_per_s)
        with serving(Path(name), options.latency_ms / 1e3, bytes_per_s) as url:
            found = [
                [waiting(url, options.steps, step_s, at_once=way) for way in (True, False)] for _ in range(options.runs)
            ]
    ours, theirs = ([100 * run[way] for run in found] for way in (0, 1))
    what = (
        f"waiting for batches of {BATCH}, {size / 1e6:.2f} MB a sample, {options.latency_ms:g} ms, "
        f"{options.megabytes_per_s:g} MB/s, of which steps of {1e3 * step_s:.0f} ms ask for {options.demand:g}"
    )
    results.add(absolute("at once", what, ours, " % of the time"))
    results.add(absolute("in turn", f"{what}, one request after another", theirs, " % of the time"))
    results.save()


def waiting(url: str, steps: int, step_s: float, *, at_once: bool) -> float:
    """The part of the time in which no batch was ready, after the first ones."""
    waited = 0.0
    with (
        mock.patch.object(ShardSet, "distant", at_once),
        open_stream(url, batch_size=BATCH) as stream,
        closing(stream.forever()) as batches,
    ):
        for _ in range(stream.prefetch + 1):
            next(batches)
        started = time.perf_counter()
        for _ in range(steps):
            time.sleep(step_s)
            asked = time.perf_counter()
            next(batches)
            waited += time.perf_counter() - asked
        return waited / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
