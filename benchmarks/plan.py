"""The plan of an epoch: how long it takes and how much memory, by number of samples. On the CPU.

    python benchmarks/plan.py [--samples 1000000 10000000] [--shapes 1 40] [--windows 10000000] [--runs 3]

plan:     `qie.data.plan.plan_epoch`, batches of 8, by order. Memory is its peak without the columns.
    Peer: random.shuffle of a list of positions, put into lists by shape in a dict, cut into tuples, which are
    shuffled; without lengths, versions, weights or tails. Each ratio is of two plans in turn, one run after another.
padding:  padding tokens per prompt token, for lengths spread evenly from 10 to 1,400.
windows:  `qie.data.windows.WindowedPlan`, until its first batch, by order. Memory is its peak without the columns. Then
    how far its shuffle is from that of `plan_epoch`: pairs of samples of one shard in a batch, and how many samples of
    the epoch lie between two of a shard, on average.
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

from qie.data.plan import Order, Plan, held_out, plan_epoch
from qie.data.windows import WINDOW, WindowedPlan
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
    made.add_argument("--windows", type=int, default=10**7, help="samples of the plan in windows")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    results = Results(__file__, options, arguments)
    for count in options.samples:
        for shapes in options.shapes:
            results.add(*plans(generated(count, shapes), options.runs))
        results.add(holding_out(count, options.runs))
    results.add(*in_windows(generated(options.windows, 30), options.runs))
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
        single=True,
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


def in_windows(columns: Columns, runs: int) -> list[Row]:
    """A row per order, and one for the distance of shuffles; a plan in windows has eight or more here."""
    count, rows = len(columns), []
    window = min(WINDOW, count // 8)
    orders: tuple[Order, ...] = ("shuffle", "blocks", "sequence")
    for order in orders:

        def first(order: Order = order) -> object:
            plan = WindowedPlan(columns, seed=0, epoch=3, global_batch_size=BATCH_SIZE, order=order, window=window)
            return plan[0]

        taken = [seconds(first) for _ in range(runs)]
        what = f"plan of {count:,} samples in windows of {window:,}, {order}: until its first batch"
        rows.append(absolute(f"windows, {order}", what, taken, " s", detail=f"{figure(peak_bytes(first) / 1e6)} MB"))
    settings: dict[str, Any] = {"seed": 0, "epoch": 0, "global_batch_size": BATCH_SIZE}
    parts = list(WindowedPlan(columns, window=window, **settings).windows())
    ours, ours_apart = neighbours(parts, count)
    whole, whole_apart = neighbours([plan_epoch(columns, **settings)], count)
    told = (
        f"{ours:.6f} beside {whole:.6f}; two of a shard are {ours_apart:,.0f} samples apart, beside {whole_apart:,.0f}"
    )
    what = f"pairs of one shard in a batch of {BATCH_SIZE}, {count:,} samples in windows of {window:,}"
    share = ours / whole
    rows.append(Row("windows, pairs", what, "a shuffle of everything", share, share, share, " times", 1, told))
    return rows


def neighbours(parts: Sequence[Plan], count: int) -> tuple[float, float]:
    """Pairs of samples of one shard in a batch, and places of the epoch between two samples of a shard; both means."""
    pairs, batches, places, place = 0, 0, np.zeros(count, np.int64), 0
    for part in parts:
        shards = part.positions[part.filled == BATCH_SIZE] // SHARD_SIZE
        batches += len(shards)
        pairs += int((shards[:, :, None] == shards[:, None, :]).sum()) - shards.size
        real = part.positions[np.arange(BATCH_SIZE) < part.filled[:, None]]
        places[real] = np.arange(place, place + len(real))
        place += len(real)
    by_shard = places[: count // SHARD_SIZE * SHARD_SIZE].reshape(-1, SHARD_SIZE)
    half = SHARD_SIZE // 2
    return pairs / 2 / batches, float(np.abs(by_shard[:, :half] - by_shard[:, half:]).mean())


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
    columns = generated(count, 1)
    taken = [seconds(lambda: held_out(keys, columns, 100)) for _ in range(runs)]
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
