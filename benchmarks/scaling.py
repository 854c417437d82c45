"""How qie scales with samples and GPUs: the curves that one machine can measure, and the rest on paper.

    python benchmarks/scaling.py [--samples 10000 100000 1000000 10000000] [--mapped 100000000] [--own 100000]
                                 [--follow 4000] [--runs 3] [--folder DIR]
    python benchmarks/scaling.py --only-computed

open:    a folder of tiny samples by its compacted index, in a process of its own: the index named (`--index`), then the
         first plan, of a shuffle in batches of 8, and the first batch. Memory is what this process alone holds then,
         without that of the imports; and its part of the pages that two such processes share.
compare: the folder opened, so that the index is compared with what is there.
read:    shuffled samples a second after that: opening files, checking hashes, making batches. Tars are links to a few
         small files, so this is the reader's own time, without a disk's.
own:     opening from each shard's own index instead, up to so many samples. Peer: the compacted index, compared.
mapped:  opening and planning so many samples of a compacted index without shards.
follow:  CPU time to take in so many shards of 64 samples, each when it is published, and to plan what can be planned;
         no sample is read.
work:    on paper, of 10⁴ to 10⁹ samples and of 1 to 512 GPUs; `simulate.py` simulates them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from many import SHARD_SIZE, generate, generate_index
from measuring import Results, Row, absolute, beside, figure, own_bytes
from measuring import parser as common

from qie.data.follow import GrowingPlans, GrowingSamples
from qie.data.plan_settings import PlanSettings
from qie.data.stream import Stream
from qie.shards.compact_index import COMPACT_NAME
from qie.shards.shard_set import ShardSet
from qie.stores import LocalFolder

BATCH_SIZE = 8
READ = 2000
"""Batches to read."""


def parser() -> argparse.ArgumentParser:
    made = common(__doc__, runs=3)
    made.add_argument("--samples", type=int, nargs="+", default=[10**4, 10**5, 10**6, 10**7])
    made.add_argument("--mapped", type=int, default=10**8, help="samples to open and plan without shards")
    made.add_argument("--own", type=int, default=10**5, help="most samples to open from the shards' own indexes")
    made.add_argument("--follow", type=int, default=4000, help="shards to follow")
    made.add_argument("--folder", type=Path, help="where to write; by default among temporary files")
    made.add_argument("--only-computed", action="store_true", help="measure nothing")
    made.add_argument("--opening", type=Path, help=argparse.SUPPRESS)
    made.add_argument("--without-shards", action="store_true", help=argparse.SUPPRESS)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.opening:
        print(json.dumps(open_once(options.opening, read=not options.without_shards)), flush=True)
        sys.stdin.read()  # holds what it has until another has looked at what both share
        return
    from paper import on_paper  # and with it all models: the process that opens imports what a reader does

    results = Results(__file__, options, arguments)
    curve = []
    for count in () if options.only_computed else options.samples:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            point, rows = measured(Path(name), count, options)
            curve.append(point)
            results.add(*rows)
    if options.mapped and not options.only_computed:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            curve.append(mapped(Path(name), options))
    if options.follow and not options.only_computed:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            results.add(followed(Path(name), options.follow))
    for table in on_paper(curve):
        results.say(f"\n{table}")
    results.save(curve=curve)


def measured(folder: Path, count: int, options: argparse.Namespace) -> tuple[dict[str, Any], list[Row]]:
    """A point of the curve, and rows of it."""
    own = count <= options.own
    samples = generate(folder / "shards", count, indexes=own)
    compact = folder / "shards" / COMPACT_NAME
    found = [opened(folder / "shards") for _ in range(options.runs)]
    point = {name: statistics.median(one[name] for one in found) for name in found[0]}
    point |= {"samples": samples, "index_bytes": compact.stat().st_size}
    what = f"{samples:,} samples"
    rows = [
        absolute(
            f"open {count}",
            f"{what}: opened by --index, first plan and batch",
            [one["open_s"] + one["plan_s"] + one["batch_s"] for one in found],
            " s",
            detail=f"open {figure(point['open_s'])} s, plan {figure(point['plan_s'])} s, batch "
            f"{figure(point['batch_s'])} s; index {figure(point['index_bytes'] / 1e6)} MB; memory of its own "
            f"{figure(point['own_bytes'] / 1e6)} MB, with half of what two share "
            f"{figure(point['shared_bytes'] / 1e6)} MB",
        ),
        absolute(f"compare {count}", f"{what}: opened by folder", [one["compare_s"] for one in found], " s"),
        absolute(f"read {count}", f"{what}: read, shuffled", [one["read_per_s"] for one in found], " samples/s"),
    ]
    if own:
        compact.unlink()
        alone = [_timed(lambda: ShardSet.open([folder / "shards"])) for _ in range(options.runs)]
        peer, ours = "each shard's own index", [one["compare_s"] for one in found]
        rows.append(beside(f"own {count}", f"{what}: opened from the compacted index", peer, alone, ours))
        point["own_s"] = statistics.median(alone)
    return point, rows


def mapped(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A point of the curve that has no shards to read."""
    samples = generate_index(folder / "shards", options.mapped)
    found = [opened(folder / "shards", "--without-shards") for _ in range(options.runs)]
    point = {name: statistics.median(one[name] for one in found) for name in found[0]}
    return point | {"samples": samples, "index_bytes": (folder / "shards" / COMPACT_NAME).stat().st_size}


def followed(folder: Path, count: int) -> Row:
    """CPU time of following, in one pass: its parts show whether it grows with what is there."""
    generate(folder / "shards", count * SHARD_SIZE, indexes=True)
    (folder / "there").mkdir()
    samples = GrowingSamples(LocalFolder(folder / "there"), count * SHARD_SIZE)
    plans, spent = None, []
    for tar in sorted((folder / "shards").glob("*.tar")):
        for file in (tar, tar.with_suffix(".json")):
            file.rename(folder / "there" / file.name)
        started = time.process_time()
        samples.grow()
        plans = plans or GrowingPlans(samples, PlanSettings(BATCH_SIZE))
        plans.of(0)
        samples.grow()  # a look that finds nothing
        spent.append(time.process_time() - started)
    quarter = -(-count // 4)
    parts = [1000 * statistics.mean(spent[start : start + quarter]) for start in range(0, count, quarter)]
    detail = f"together {figure(sum(spent))} s; quarter by quarter {', '.join(map(figure, parts))} ms a shard"
    return absolute(f"follow {count}", f"{count:,} shards: followed", parts, " ms CPU a shard", detail=detail)


def opened(shards: Path, *more: str) -> dict[str, float]:
    """In a process of its own, beside another that did the same before and still has it open."""
    command = [sys.executable, "-W", "ignore", __file__, "--opening", str(shards), *more]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as first:
        assert first.stdout is not None
        if not first.stdout.readline():
            raise RuntimeError("the process that opens ended")
        second = subprocess.run(command, check=True, input="", stdout=subprocess.PIPE, text=True)
        found: dict[str, float] = json.loads(second.stdout)
        first.communicate("")
    return found


def open_once(shards: Path, read: bool = True) -> dict[str, float]:
    """The index is in the page cache: a process before this one has read it."""
    before, started = own_bytes(), time.perf_counter()
    samples = ShardSet.open(index=shards / COMPACT_NAME)
    opened = time.perf_counter()
    stream = Stream.over(samples, BATCH_SIZE)
    stream.plan[0]  # of millions of samples, plans are made in windows, when they are asked for
    planned = time.perf_counter()
    found = {"open_s": opened - started, "plan_s": planned - opened}
    batches = iter(stream) if read else iter(())
    for _ in islice(batches, 1):
        found["batch_s"] = time.perf_counter() - planned
    own, shared = own_bytes()
    found |= {"own_bytes": own - before[0], "shared_bytes": shared - before[1]}
    reading = time.perf_counter()
    if count := sum(1 for _ in islice(batches, min(READ, len(stream) - 1))):
        found["read_per_s"] = count * BATCH_SIZE / (time.perf_counter() - reading)
        found["compare_s"] = _timed(lambda: ShardSet.open([shards]))
    return found


def _timed(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


assert SHARD_SIZE == 64  # the default of qie-precompute, which the tables name

if __name__ == "__main__":
    main()
