"""What shards hold, as one value that the table and the JSON of qie-stats both print. Reads indexes only."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from qie.errors import QieError
from qie.recipe import Recipe
from qie.shards.index import ShardIndex, Skipped, read_index
from qie.shards.parts import require_disjoint
from qie.shards.reader import Shard
from qie.stages import Pipeline, Stage
from qie.stores import File, StoreError
from qie.types import Shape

REMOTE_READERS = 64
LOCAL_READERS = 1
"""More would only wait for one another: parsing an index holds Python's lock."""

_SHARES = {"min": 0.0, "p5": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True)
class Summary:
    """Everything known about a set of shards without opening their tars.

    Attributes:
        shards, rows, samples: counts; `rows` counts each version of a row, and is samples + skipped.
        records: distinct records, counted in each shard: within one, samples of equal content share a record.
        duplicates: samples whose content another one has, in whichever shard.
        bytes: size of all tars.
        bytes_per_sample: the same, over the samples.
        recipes: recipe digest -> number of shards.
        sources: name of the source -> number of samples; a source alone has an empty name.
        skipped: reason -> number of rows.
        skipped_rows: (shard, row, name, reason) of each.
        shapes: shape in pixels -> number of samples.
        buckets: size of the target in pixels -> number of samples.
        tokens: prompt lengths: percentiles, by their names.
        clipped, clipped_samples: values clipped to FP16's range, and samples that have any.
        notes: what encoding did to rows -> number of samples.
        ranges: rows covered, as half-open ranges, merged over all folders.
        missing: (folder, start, stop) of rows that no shard of the folder covers, though one covers later rows.
        tensor_bytes: tensor -> mean bytes per sample, largest first.
        tensor_bytes_total: tensor -> bytes of all samples.
        faults: what is wrong, a line each.
    """

    shards: int
    rows: int
    samples: int
    records: int
    duplicates: int
    bytes: int
    bytes_per_sample: float
    recipes: dict[str, int]
    sources: dict[str, int]
    skipped: dict[str, int]
    skipped_rows: list[tuple[str, int, str, str]]
    shapes: dict[str, int]
    buckets: dict[str, int]
    tokens: dict[str, int]
    clipped: int
    clipped_samples: int
    notes: dict[str, int]
    ranges: list[tuple[int, int]]
    missing: list[tuple[str, int, int]]
    tensor_bytes: dict[str, float]
    tensor_bytes_total: dict[str, int]
    faults: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(
    indexes: Sequence[File], *, verify: bool = False, progress: Callable[[int], object] = lambda done: None
) -> Summary:
    """Summarise the shards of `indexes`; with `verify` every tar is rehashed, too.

    A shard that cannot be read is a fault in the summary; the others are still summarised.
    """
    sizes = _sizes(indexes)
    remote = any(file.path is None for file in indexes)
    readers = REMOTE_READERS if remote else (os.cpu_count() or 1) if verify else LOCAL_READERS
    tally = _Tally()

    def opened(file: File) -> tuple[ShardIndex | None, list[str]]:
        return _open(file, sizes[file.folder.url], verify)

    # Not a pool's `map`: that would hold all indexes that nobody has counted yet.
    found = map(opened, indexes) if readers == 1 else Pipeline([Stage("open", opened, readers)]).run(indexes)
    for done, (file, (index, faults)) in enumerate(zip(indexes, found, strict=True), start=1):
        tally.faults += faults
        if index is not None:
            tally.add(file, index)
        progress(done)
    return tally.summary()


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Half-open ranges in order, those that touch or overlap as one."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result


def one_line(error: QieError) -> str:
    return " ".join(str(error).split())


@dataclass
class _Tally:
    """Counts over indexes, each of which may be forgotten when it was added."""

    ranges: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    files: list[File] = field(default_factory=list)
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
        self.files.append(file)
        self.ranges[file.folder.url].append((index.start, index.stop))
        self.recipes.setdefault(index.recipe.digest, index.recipe)
        self.by_recipe[index.recipe.digest] += 1
        self.records += len(index.files)
        self.tar_bytes += index.filesize
        self.keys += [entry.key[:32].encode() for entry in entries]
        self.skipped += [(str(file.with_suffix(".tar")), gone) for gone in index.skipped]
        self.sources.update([entry.source for entry in entries])
        self.shapes.update([entry.shape for entry in entries])
        self.tokens.update([entry.tokens for entry in entries])
        self.notes.update([note for entry in entries for note in entry.notes])
        self.clipped += [entry.clipped for entry in entries if entry.clipped]
        for entry in entries:
            for name, size in entry.tensor_bytes.items():
                self.tensor_bytes[name] += size

    def summary(self) -> Summary:
        samples = len(self.keys)
        tensor_bytes = dict(sorted(self.tensor_bytes.items(), key=lambda item: -item[1]))
        buckets: Counter[str] = Counter()
        for shape, count in self.shapes.items():
            buckets[f"{shape.target[1] * 8}×{shape.target[0] * 8}"] += count
        return Summary(
            shards=len(self.files),
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
            clipped=sum(self.clipped),
            clipped_samples=len(self.clipped),
            notes=dict(self.notes.most_common()),
            ranges=merged(found for ranges in self.ranges.values() for found in ranges),
            missing=list(_missing(self.ranges)),
            tensor_bytes={name: size / samples for name, size in tensor_bytes.items()},
            tensor_bytes_total=tensor_bytes,
            faults=self.faults + _conflicts(self.files, list(self.recipes.values())),
        )


def _sizes(indexes: Sequence[File]) -> dict[str, dict[str, int]]:
    """The files of each folder, by its URL, in one request each; a web server lists none."""
    sizes: dict[str, dict[str, int]] = {}
    for folder in {file.folder.url: file.folder for file in indexes}.values():
        try:
            sizes[folder.url] = folder.listing()
        except StoreError:
            sizes[folder.url] = {}
    return sizes


def _open(file: File, sizes: Mapping[str, int], verify: bool) -> tuple[ShardIndex | None, list[str]]:
    try:
        if verify:
            shard = Shard(file)
            return shard.index, list(shard.verify())
        index = read_index(file)
        if sizes.get(file.with_suffix(".tar").name) != index.filesize:
            Shard(file)  # looks at the tar itself, and says what is wrong
        return index, []
    except QieError as error:
        return None, [one_line(error)]


def _conflicts(files: Sequence[File], recipes: Sequence[Recipe]) -> list[str]:
    faults = []
    try:
        require_disjoint(files)
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


def _missing(ranges: Mapping[str, Iterable[tuple[int, int]]]) -> Iterator[tuple[str, int, int]]:
    for folder, covered in ranges.items():
        end = 0
        for start, stop in merged(covered):
            if start > end:
                yield folder, end, start
            end = stop
