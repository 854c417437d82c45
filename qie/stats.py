"""What shards hold, as one value that the table and the JSON of qie-stats both print. Reads indexes only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from qie.errors import QieError
from qie.shards.parts import require_disjoint
from qie.shards.reader import Shard
from qie.stores import File


@dataclass(frozen=True)
class Summary:
    """Everything known about a set of shards without opening their tars.

    Attributes:
        shards, rows, samples: counts; rows = samples + skipped, and samples of equal content share one record.
        records: distinct records.
        bytes: size of all tars.
        recipes: recipe digest -> number of shards.
        skipped: reason -> number of rows.
        skipped_rows: (shard, row, name, reason) of each.
        shapes: shape in pixels -> number of samples.
        tokens: prompt lengths: minimum, median, 95th percentile, maximum.
        clipped: values clipped to FP16's range.
        notes: what encoding did to rows -> number of samples.
        ranges: rows covered, as half-open ranges, merged.
        tensor_bytes: tensor -> mean bytes per sample, largest first.
        faults: what is wrong, a line each.
    """

    shards: int
    rows: int
    samples: int
    records: int
    bytes: int
    recipes: dict[str, int]
    skipped: dict[str, int]
    skipped_rows: list[tuple[str, int, str, str]]
    shapes: dict[str, int]
    tokens: dict[str, int]
    clipped: int
    notes: dict[str, int]
    ranges: list[tuple[int, int]]
    tensor_bytes: dict[str, float]
    faults: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(
    indexes: Sequence[File], *, verify: bool = False, progress: Callable[[int], object] = lambda done: None
) -> Summary:
    """Summarise the shards of `indexes`; with `verify` every tar is rehashed, too.

    A shard that cannot be read is a fault in the summary; the others are still summarised.
    """
    shards, faults = [], []
    with ThreadPoolExecutor() as pool:
        for done, (shard, wrong) in enumerate(pool.map(lambda path: _open(path, verify), indexes), start=1):
            faults += wrong
            if shard is not None:
                shards.append(shard)
            progress(done)
    faults += _conflicts(shards)
    entries = [entry for shard in shards for entry in shard.index.samples]
    skipped = [(str(shard.file), gone) for shard in shards for gone in shard.index.skipped]
    return Summary(
        shards=len(shards),
        rows=len(entries) + len(skipped),
        samples=len(entries),
        records=sum(len(shard.index.files) for shard in shards),
        bytes=sum(shard.index.filesize for shard in shards),
        recipes=dict(Counter(shard.index.recipe.digest for shard in shards)),
        skipped=dict(Counter(gone.reason for _, gone in skipped).most_common()),
        skipped_rows=[(path, gone.row, gone.name, gone.reason) for path, gone in skipped],
        shapes={str(shape): count for shape, count in Counter(entry.shape for entry in entries).most_common()},
        tokens=_percentiles([entry.tokens for entry in entries]),
        clipped=sum(entry.clipped for entry in entries),
        notes=dict(Counter(note for entry in entries for note in entry.notes).most_common()),
        ranges=_merged((shard.index.start, shard.index.stop) for shard in shards),
        tensor_bytes=_tensor_bytes(shards),
        faults=faults,
    )


def _open(path: File, verify: bool) -> tuple[Shard | None, list[str]]:
    try:
        shard = Shard(path)
        return shard, list(shard.verify()) if verify else []
    except QieError as error:
        return None, [" ".join(str(error).split())]


def _conflicts(shards: Iterable[Shard]) -> list[str]:
    shards = list(shards)
    faults = []
    try:
        require_disjoint([shard.file for shard in shards])
    except QieError as error:
        faults.append(" ".join(str(error).split()))
    recipes = {shard.index.recipe.digest: shard.index.recipe for shard in shards}
    first, *others = recipes.values() or [None]
    for other in others:
        assert first is not None and other is not None
        faults.append(f"recipes {first.digest} and {other.digest} are mixed: {'; '.join(first.explain(other))}")
    return faults


def _percentiles(values: Iterable[int]) -> dict[str, int]:
    ordered = sorted(values)
    if not ordered:
        return {}
    last = len(ordered) - 1
    return {
        name: ordered[round(last * share)] for name, share in (("min", 0), ("median", 0.5), ("p95", 0.95), ("max", 1))
    }


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _tensor_bytes(shards: Iterable[Shard]) -> dict[str, float]:
    """Mean over samples."""
    totals: Counter[str] = Counter()
    entries = [entry for shard in shards for entry in shard.index.samples]
    for entry in entries:
        totals.update(entry.tensor_bytes)
    return {name: total / len(entries) for name, total in totals.most_common()}
