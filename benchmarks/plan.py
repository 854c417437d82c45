"""The plan of an epoch: how long it takes and how much memory, by number of samples. On the CPU.

    python benchmarks/plan.py [--samples 1000000 10000000] [--shapes 1 40] [--runs 3]

plan:     `qie.data.epoch.plan_epoch`, batches of 8, by order. Memory is what it takes at most beside the columns.
    Beside: random.shuffle of a list of positions, put into lists by shape in a dict, cut into tuples, which are
    shuffled; without lengths, versions, weights or tails. Each ratio is of two plans in turn, one run after another.
padding:  tokens that stand for nothing, per prompt token, of lengths evenly from 10 to 1,400.
held_out: 100 rows for validation.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from qie.data.epoch import Columns, Plan, held_out, plan_epoch
from qie.types import Shape

BATCH_SIZE = 8
SHARD_SIZE = 64
ORDERS: dict[str, dict[str, Any]] = {
    "shuffle": {},
    "shuffle, lengths as they come": {"similar_lengths": 1},
    "shuffle, 3 sources by weight": {"source_weights": (1, 2, 0.5)},
    "blocks": {"order": "blocks"},
    "sequence": {"order": "sequence"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="the plan of an epoch")
    parser.add_argument("--samples", type=int, nargs="+", default=[10**6, 10**7])
    parser.add_argument("--shapes", type=int, nargs="+", default=[1, 40])
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    print(f"numpy {np.__version__}, batches of {BATCH_SIZE}")
    for count in options.samples:
        for shapes in options.shapes:
            print_plans(generated(count, shapes), options.runs)
        print_held_out(count, options.runs)


def generated(count: int, shapes: int) -> Columns:
    draw = np.random.default_rng(0)
    position = np.arange(count, dtype=np.int64)
    return Columns(
        draw.integers(0, shapes, count, dtype=np.int32),
        tuple(Shape((4, 4 + number), ((4, 4),)) for number in range(shapes)),
        position,
        draw.integers(10, 1400, count, dtype=np.int32),
        (position * 3 // count).astype(np.int32),
        (position // SHARD_SIZE).astype(np.int32),
    )


def print_plans(columns: Columns, runs: int) -> None:
    """One line an order: time and memory, and the naive plan's as ratios."""
    shapes: list[int] = columns.shapes.tolist()
    naive_bytes = peak_bytes(lambda: naive_plan(shapes))
    for name, settings in ORDERS.items():

        def plan(settings: dict[str, Any] = settings) -> Plan:
            return plan_epoch(columns, seed=0, epoch=3, global_batch_size=BATCH_SIZE, **settings)

        ours, naive = [], []
        for _ in range(runs):
            ours.append(seconds(plan))
            naive.append(seconds(lambda: naive_plan(shapes)))
        ratios = [theirs / mine for mine, theirs in zip(ours, naive, strict=True)]
        mine_bytes = peak_bytes(plan)
        print(
            f"plan, {len(columns):,} samples of {len(columns.shape_names)} shapes, {name}: "
            f"{statistics.median(ours):.2f} s ({min(ours):.2f}–{max(ours):.2f}), {mine_bytes / 1e6:.0f} MB; "
            f"naive {statistics.median(naive):.2f} s: {statistics.median(ratios):.1f}× as long "
            f"({min(ratios):.1f}–{max(ratios):.1f}), {naive_bytes / 1e6:.0f} MB: {naive_bytes / mine_bytes:.1f}×; "
            f"padding {padding(plan(), columns):.3f}",
            flush=True,
        )


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


def print_held_out(count: int, runs: int) -> None:
    keys = np.random.default_rng(0).integers(0, 256, (count, 32), dtype=np.uint8)
    rows = np.arange(count)
    taken = [seconds(lambda: held_out(keys, rows, 100)) for _ in range(runs)]
    print(f"held_out, {count:,} samples: {statistics.median(taken):.2f} s ({min(taken):.2f}–{max(taken):.2f})")


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    main()
