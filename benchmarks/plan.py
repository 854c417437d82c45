"""The plan of an epoch: how long it takes and how much memory, by number of samples. On the CPU.

    python benchmarks/plan.py [--samples 1000000 10000000] [--shapes 1 40] [--runs 3]

plan:     `qie.data.plan.plan_epoch`, batches of 8, by order. Memory is its peak without the columns.
    Peer: random.shuffle of a list of positions, put into lists by shape in a dict, cut into tuples, which are
    shuffled; without lengths, versions, weights or tails. Each ratio is of two plans in turn, one run after another.
padding:  padding tokens per prompt token, for lengths spread evenly from 10 to 1,400.
held_out: 100 rows for validation.
"""

from __future__ import annotations

import argparse
import random
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from measuring import Results, Row, absolute, beside, figure, in_turn, seconds
from measuring import parser as common

from qie.data.plan import Plan, held_out, plan_epoch
from qie.shards.sample_table import Columns, ends_of
from qie.types import Shape

BATCH_SIZE = 8
SHARD_SIZE = 64
ORDERS: dict[str, dict[str, Any]] = {
    "shuffle": {},
    "shuffle, prompt lengths unsorted": {"similar_lengths": 1},
    "shuffle, 3 sources by weight": {"source_weights": (1, 2, 0.5)},
    "blocks": {"order": "blocks"},
    "sequence": {"order": "sequence"},
}


def parser() -> argparse.ArgumentParser:
    made = common(__doc__, runs=3)
    made.add_argument("--samples", type=int, nargs="+", default=[10**6, 10**7])
    made.add_argument("--shapes", type=int, nargs="+", default=[1, 40])
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    results = Results(__file__, options, arguments)
    for count in options.samples:
        for shapes in options.shapes:
            results.add(*plans(generated(count, shapes), options.runs))
        results.add(holding_out(count, options.runs))
    results.save()


def generated(count: int, shapes: int) -> Columns:
    draw = np.random.default_rng(0)
    position = np.arange(count, dtype=np.int64)
    return Columns(
        draw.integers(0, shapes, count, dtype=np.int32),
        tuple(Shape((4, 4 + number), ((4, 4),)) for number in range(shapes)),
        position,
        draw.integers(10, 1400, count, dtype=np.int32),
        (position * 3 // count).astype(np.int32),
        ends_of(position // SHARD_SIZE),
    )


def plans(columns: Columns, runs: int) -> list[Row]:
    """Two rows per order: time and memory, compared with the naive plan's."""
    shapes: list[int] = columns.shapes.tolist()
    naive_bytes = peak_bytes(lambda: naive_plan(shapes))
    rows = []
    for name, settings in ORDERS.items():

        def plan(settings: dict[str, Any] = settings) -> Plan:
            return plan_epoch(columns, seed=0, epoch=3, global_batch_size=BATCH_SIZE, **settings)

        took = in_turn({"naive": lambda: naive_plan(shapes), "ours": plan}, runs, warm_up=False)
        ours_bytes = peak_bytes(plan)
        key = f"{name}, {len(columns)}, {len(columns.shape_names)}"
        what = f"plan of {len(columns):,} samples, {len(columns.shape_names)} shapes, {name}"
        peer = "random.shuffle and lists by shape"
        padded = f"padding {padding(plan(), columns):.3f} a token"
        rows.append(beside(key, what, peer, took["naive"], took["ours"], more=padded))
        share = ours_bytes / naive_bytes
        told = f"{figure(ours_bytes / 1e6)} MB, peer {figure(naive_bytes / 1e6)} MB"
        rows.append(Row(f"{key}, memory", what, peer, share, share, share, " of its memory", 1, told))
    return rows


def naive_plan(shapes: list[int]) -> list[tuple[int, ...]]:
    order = list(range(len(shapes)))
    shuffle = random.Random(0).shuffle
    shuffle(order)
    buckets: dict[int, list[int]] = {}
    for position in order:
        buckets.setdefault(shapes[position], []).append(position)
    batches = [
        tuple(bucket[start : start + BATCH_SIZE])
        for _, bucket in sorted(buckets.items())
        for start in range(0, len(bucket), BATCH_SIZE)
    ]
    shuffle(batches)
    return batches


def padding(plan: Plan, columns: Columns) -> float:
    lengths = columns.lengths[plan.positions]
    return float(lengths.max(axis=1).sum() * lengths.shape[1] / lengths.sum() - 1)


def holding_out(count: int, runs: int) -> Row:
    keys = np.random.default_rng(0).integers(0, 256, (count, 32), dtype=np.uint8)
    rows = np.arange(count)
    taken = [seconds(lambda: held_out(keys, rows, 100)) for _ in range(runs)]
    return absolute(f"held_out, {count}", f"100 of {count:,} rows kept for validation", taken, " s")


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    main()
