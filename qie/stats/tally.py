"""Counting over indexes, one after the other, each of which may be forgotten when it was counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from qie.errors import QieError
from qie.recipe import Recipe
from qie.shards.index import ShardIndex, Skipped, parse_stem
from qie.shards.shard_set import require_disjoint
from qie.shards.storage import gaps
from qie.stats.summary import LENGTH_BINS, Coverage, Range, Summary, one_line
from qie.stores import File
from qie.types import Shape

_SHARES = {"min": 0.0, "p5": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99, "max": 1.0}


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Half-open ranges in order, those that touch or overlap as one."""
    result: list[Range] = []
    for start, stop in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result


@dataclass
class Tally:
    """What was counted so far. The first three are by folder."""

    ranges: dict[str, list[Range]] = field(default_factory=lambda: defaultdict(list))
    faulty: dict[str, list[Range]] = field(default_factory=lambda: defaultdict(list))
    skipped_in: dict[str, list[Range]] = field(default_factory=lambda: defaultdict(list))
    shards: list[tuple[File, Range]] = field(default_factory=list)
    named: list[File] = field(default_factory=list)
    unhashed: int = 0
    recipes: dict[str, Recipe] = field(default_factory=dict)
    by_recipe: Counter[str] = field(default_factory=Counter)
    records: int = 0
    tar_bytes: int = 0
    keys: list[bytes] = field(default_factory=list)
    skipped: list[tuple[str, Skipped]] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)
    shapes: Counter[Shape] = field(default_factory=Counter)
    tokens: Counter[int] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    tensor_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    clipped: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, file: File, index: ShardIndex) -> None:
        entries = index.samples
        self.shards.append((file, index.rows))
        self.named.append(file)
        self.ranges[file.folder.url].append(index.rows)
        self.unhashed += index.this_sha256 is None
        self.recipes.setdefault(index.recipe.digest, index.recipe)
        self.by_recipe[index.recipe.digest] += 1
        self.records += len(index.files)
        self.tar_bytes += index.filesize
        self.keys += [entry.key[:32].encode() for entry in entries]
        self.skipped_in[file.folder.url] += [(gone.row, gone.row + 1) for gone in index.skipped]
        self.skipped += [(str(file.with_suffix(".tar")), gone) for gone in index.skipped]
        self.sources.update([entry.source for entry in entries])
        self.shapes.update([entry.shape for entry in entries])
        self.tokens.update([entry.tokens for entry in entries])
        self.notes.update([note for entry in entries for note in entry.notes])
        self.clipped += [entry.clipped for entry in entries if entry.clipped]
        for entry in entries:
            for name, size in entry.tensor_bytes.items():
                self.tensor_bytes[name] += size

    def blame(self, file: File, faults: Iterable[str]) -> None:
        """Record what is wrong with a shard, which may be added or not."""
        self.faults += faults
        if rows := parse_stem(file.stem):  # of one that was renamed nothing else may be legible
            self.faulty[file.folder.url].append(rows)
        self.named.append(file)

    def summary(self) -> Summary:
        samples = len(self.keys)
        tensor_bytes = dict(sorted(self.tensor_bytes.items(), key=lambda item: -item[1]))
        buckets: Counter[str] = Counter()
        for shape, count in self.shapes.items():
            buckets[f"{shape.target[1] * 8}×{shape.target[0] * 8}"] += count
        return Summary(
            shards=len(self.shards),
            unhashed=self.unhashed,
            rows=samples + len(self.skipped),
            samples=samples,
            records=self.records,
            duplicates=samples - len(np.unique(np.array(self.keys, "S32"))),
            bytes=self.tar_bytes,
            bytes_per_sample=self.tar_bytes / samples if samples else 0.0,
            recipes=dict(self.by_recipe),
            sources=dict(self.sources.most_common()),
            skipped=dict(Counter(gone.reason for _, gone in self.skipped).most_common()),
            skipped_rows=[(path, gone.row, gone.name, gone.reason) for path, gone in self.skipped],
            shapes={str(shape): count for shape, count in self.shapes.most_common()},
            buckets=dict(buckets.most_common()),
            tokens=_percentiles(self.tokens),
            lengths=_histogram(self.tokens),
            recipe_fields={digest: recipe.to_dict() for digest, recipe in self.recipes.items()},
            coverage=self._coverage(),
            clipped=sum(self.clipped),
            clipped_samples=len(self.clipped),
            notes=dict(self.notes.most_common()),
            ranges=merged(found for ranges in self.ranges.values() for found in ranges),
            missing=list(gaps(self.named)),
            tensor_bytes={name: size / samples for name, size in tensor_bytes.items()},
            tensor_bytes_total=tensor_bytes,
            faults=self.faults + _conflicts(self.shards, list(self.recipes.values())),
        )

    def _coverage(self) -> list[Coverage]:
        folders = {**self.ranges, **self.faulty}
        parts = (self.ranges, self.faulty, self.skipped_in)
        return [Coverage(folder, *(merged(part.get(folder, ())) for part in parts)) for folder in folders]


def _conflicts(shards: Sequence[tuple[File, Range]], recipes: Sequence[Recipe]) -> list[str]:
    faults = []
    try:
        require_disjoint(shards)
    except QieError as error:
        faults.append(one_line(error))
    for other in recipes[1:]:
        first = recipes[0]
        faults.append(f"recipes {first.digest} and {other.digest} are mixed: {'; '.join(first.explain(other))}")
    return faults


def _percentiles(counts: Counter[int]) -> dict[str, int]:
    if not counts:
        return {}
    values = sorted(counts)
    up_to = list(accumulate(counts[value] for value in values))
    places = [round((up_to[-1] - 1) * share) for share in _SHARES.values()]
    found = np.searchsorted(up_to, places, side="right").tolist()
    return {name: values[number] for name, number in zip(_SHARES, found, strict=True)}


def _histogram(counts: Counter[int]) -> list[tuple[int, int, int]]:
    if not counts:
        return []
    low, high = min(counts), max(counts) + 1
    width = -(-(high - low) // LENGTH_BINS)
    bins = Counter[int]()
    for value, count in counts.items():
        bins[(value - low) // width] += count
    edges = [(low + width * number, low + width * (number + 1)) for number in range(max(bins) + 1)]
    return [(start, stop, bins[number]) for number, (start, stop) in enumerate(edges)]
