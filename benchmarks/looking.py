"""Inspecting shards: the cost of a summary of many indexes, and of a check of every byte.

    python benchmarks/looking.py [--shards 10000] [--samples 60] [--runs 3]

summary: `qie-stats` over so many indexes of 64 samples, in one process. Peer: json.loads of the same files.
verify:  `qie-stats --verify` over so many samples of 11 MB, on one core. Peer: SHA-256 of the same tars by hashlib.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from many import SHARD_SIZE, generate
from measuring import Results, Row, absolute, beside, in_turn
from measuring import parser as common
from samples import IMAGE_TOKENS, TAIL, exhaust, write_shards

from qie.shards.discovery import find_indexes
from qie.stats import summarise


def parser() -> argparse.ArgumentParser:
    made = common(__doc__, runs=3)
    made.add_argument("--shards", type=int, default=10_000, help="to summarise")
    made.add_argument("--samples", type=int, default=60, help="to verify")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    results = Results(__file__, options, arguments)
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder) / "many", options.shards * SHARD_SIZE, indexes=True)
        results.add(*summary(Path(folder) / "many", options.runs))
    with tempfile.TemporaryDirectory() as folder:
        exhaust(write_shards(Path(folder), options.samples, IMAGE_TOKENS + TAIL, 10))
        results.add(*verify(Path(folder), options.runs))
    results.save()


def summary(folder: Path, runs: int) -> list[Row]:
    files = sorted(folder.glob("*-*.json"))

    def ours() -> None:
        assert summarise(find_indexes([str(folder)])).shards == len(files)

    taken = in_turn({"peer": partial(_each, files, json.loads), "ours": ours}, runs)
    name = f"a summary of {len(files):,} indexes"
    return [
        absolute("summary", name, taken["ours"], " s"),
        beside("summary beside", name, "json.loads of each", taken["peer"], taken["ours"]),
    ]


def verify(folder: Path, runs: int) -> list[Row]:
    tars = sorted(folder.glob("*.tar"))
    gigabytes = sum(tar.stat().st_size for tar in tars) / 1e9

    def ours() -> None:
        assert not summarise(find_indexes([str(folder)]), verify=True).faults

    with _on_one_core():
        taken = in_turn({"peer": partial(_each, tars, hashlib.sha256), "ours": ours}, runs)
    name = "every byte verified, on one core"
    return [
        absolute("verify", name, [gigabytes / spent for spent in taken["ours"]], " GB/s"),
        beside("verify beside", name, "SHA-256 of the same tars by hashlib", taken["peer"], taken["ours"]),
    ]


def _each(files: Sequence[Path], look: Callable[[bytes], object]) -> None:
    for file in files:
        look(file.read_bytes())


@contextmanager
def _on_one_core() -> Iterator[None]:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


if __name__ == "__main__":
    main()
