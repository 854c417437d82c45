"""Scaling on paper: what 10⁴ to 10⁹ samples and 1 to 512 GPUs need, by arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from many import SHARD_SIZE
from measuring import figure
from work import encoding, prompt_tokens, record_bytes, training

from qie.shards.cache import PART_BYTES as GET_BYTES
from qie.stores.objects import PART_BYTES as PUT_BYTES

NODE = 8
"""GPUs of a machine, a process each."""
PEAK = 788e12
"""FLOP/s in bfloat16 that an H200 was seen to reach in large matrix products."""
REACHED = 0.5
"""Share of that peak that training and encoding are taken to reach."""
S3_GETS = 5500
"""A second and prefix, at least: AWS, "Best practices design patterns: optimizing Amazon S3 performance"."""


@dataclass(frozen=True)
class Prices:
    """In US dollars. Of S3: list prices of S3 Standard in us-east-1, aws.amazon.com/s3/pricing, listed in March 2026,
    first 50 TB; from machines in its region, transfer is free. Of the GPU: a round number, and nobody's offer."""

    storage_gb_month: float = 0.023
    put: float = 0.005 / 1000
    get: float = 0.0004 / 1000
    gpu_hour: float = 3.0


@dataclass(frozen=True)
class Table:
    """A Markdown table with a name."""

    key: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, key: str, lines: Sequence[Sequence[str]]) -> Table:
        """Of a head and rows."""
        head, *rows = map(tuple, lines)
        return cls(key, head, tuple(rows))

    def __str__(self) -> str:
        lines = [self.head, ("---",) + ("---:",) * (len(self.head) - 1), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def on_paper(curve: Sequence[Mapping[str, Any]], prices: Prices | None = None) -> list[Table]:
    """All tables, and a measured curve, if there is one."""
    tables = [measured(curve)] if curve else []
    return [*tables, network(), shard_sizes(), costs(prices or Prices())]


def measured(curve: Sequence[Mapping[str, Any]]) -> Table:
    """The curve; of the largest point nothing is read."""
    head = (
        "samples",
        "index",
        "open by `--index`",
        "first plan",
        "first batch",
        "memory of its own",
        "with its part of what two share",
        "open by folder",
        "read, shuffled",
    )
    rows = [
        (
            f"{point['samples']:,}",
            _bytes(point["index_bytes"]),
            _seconds(point["open_s"]),
            _seconds(point["plan_s"]),
            _seconds(point["batch_s"]) if "batch_s" in point else "",
            _bytes(point["own_bytes"]),
            _bytes(point["shared_bytes"]),
            _seconds(point["compare_s"]) if "compare_s" in point else "",
            f"{figure(point['read_per_s'])}/s" if "read_per_s" in point else "",
        )
        for point in curve
    ]
    return Table("measured", head, tuple(rows))


def network() -> Table:
    """What a store has to give, by GPUs: a sample of 1024² each, a step at the GPU's peak being the most it may ask."""
    head = ("GPUs", "samples/s", "GB/s", "Gbit/s a machine", "GETs/s by ranges", "of one S3 prefix", "encoding GPUs")
    step = training(1024, checkpointing=True)
    step_s = (step.model + step.recomputed) / PEAK
    share = encoding(1024).ours / (step.model + step.recomputed)
    rows = []
    for power in range(10):
        gpus = 2**power
        rate = gpus / step_s
        bytes_s = rate * record_bytes()
        rows.append(
            (
                f"{gpus}",
                figure(rate),
                figure(bytes_s / 1e9),
                figure(8 * bytes_s * min(gpus, NODE) / gpus / 1e9),
                figure(rate),
                f"{figure(100 * rate / S3_GETS)} %",
                f"{-(-gpus * share // 1):.0f}",
            )
        )
    return Table("network", head, tuple(rows))


def shard_sizes() -> Table:
    """Trade-offs of `--shard-size`, samples of 1024²."""
    head = (
        "rows per shard",
        "bytes",
        "shards for 10⁶",
        "PUTs for 10⁶",
        "GETs for whole shards",
        "lost by a kill, at most",
    )
    row_s = encoding(1024).ours / PEAK / REACHED
    rows = []
    for size in (1, 16, 64, 256, 1024):
        shard = size * record_bytes()
        parts, gets = -(-shard // PUT_BYTES), -(-shard // GET_BYTES)
        shards = -(-(10**6) // size)
        # A multipart upload is a request to begin, one a part, and one to end; then the index.
        puts = shards * (parts + 2 if parts > 1 else 1) + shards
        rows.append(
            (
                f"{size:,}",
                _bytes(shard),
                f"{shards:,}",
                f"{figure(puts / 1e6)} M",
                f"{figure(shards * gets / 1e6)} M",
                _seconds(size * row_s),
            )
        )
    return Table("shards", head, tuple(rows))


def costs(prices: Prices) -> Table:
    """Of a million rows of 1024²."""
    rows, kept = 10**6, 10**6 * record_bytes()
    shards, shard = -(-rows // SHARD_SIZE), SHARD_SIZE * record_bytes()
    step, row = training(1024, checkpointing=True), encoding(1024)
    hours = {name: rows * flops / PEAK / REACHED / 3600 for name, flops in _flops(step, row).items()}
    months = prices.storage_gb_month * kept / 1e9
    puts, gets, whole = shards * (-(-shard // PUT_BYTES) + 3), rows, shards * -(-shard // GET_BYTES)
    lines = [
        ("encoding once", f"{figure(hours['encode'])} GPU hours", prices.gpu_hour * hours["encode"]),
        (
            "encoding with plain diffusers, each epoch",
            f"{figure(hours['plain'])} GPU hours",
            prices.gpu_hour * hours["plain"],
        ),
        ("training, one epoch", f"{figure(hours['train'])} GPU hours", prices.gpu_hour * hours["train"]),
        ("storage, one month", f"{figure(kept / 1e12)} TB", months),
        ("writing", f"{figure(puts / 1e6)} M PUTs", prices.put * puts),
        ("reading one epoch by ranges", f"{figure(gets / 1e6)} M GETs", prices.get * gets),
        ("reading one epoch by whole shards, one machine", f"{figure(whole / 1e6)} M GETs", prices.get * whole),
    ]
    told = [(name, what, f"${dollars:,.2f}" if dollars < 10 else f"${dollars:,.0f}") for name, what, dollars in lines]
    again = months / (prices.gpu_hour * hours["encode"])
    told.append(("one month of storage costs as much as", f"encoding {figure(again)} times", ""))
    return Table("costs", ("for 10⁶ rows", "quantity", "cost"), tuple(told))


def _flops(step: Any, row: Any) -> dict[str, float]:
    return {"encode": row.ours, "plain": row.plain, "train": step.model + step.recomputed}


def _bytes(count: float) -> str:
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{figure(count / size)} {unit}"
    return f"{figure(count / 1e3)} kB"


def _seconds(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{figure(seconds / size)} {unit}"
    return f"{figure(seconds)} s" if seconds >= 1 else f"{figure(1000 * seconds)} ms"


assert prompt_tokens(1024) == 1399
