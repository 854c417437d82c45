"""The content of shards, counted from their indexes, many at a time. Tars are read only to be verified.

The table, the JSON and the page of qie-stats all show the same Summary.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from qie.errors import QieError, one_line
from qie.quantities import human_bytes, human_count
from qie.recipe import Recipe
from qie.shards.compact_index import Compact
from qie.shards.discovery import find_indexes, gaps
from qie.shards.excluded import read_excluded
from qie.shards.grid import Range, merged_ranges
from qie.shards.index import Entry, ShardIndex, Skipped, member_name, parse_stem, pictures_name, read_index
from qie.shards.reader import Shard
from qie.shards.shard_set import current_compact, require_disjoint
from qie.shards.verify import compact_faults, lonely_tars, shard_faults
from qie.stages import Pipeline, Stage
from qie.stats.pairs import Pairs, PairTally
from qie.stores import File, Folder, StoreError
from qie.types import Shape

REMOTE_READERS = 64
LOCAL_READERS = 1
"""More would only wait for one another: parsing an index holds Python's lock."""
_SHARES = {"min": 0.0, "p5": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99, "max": 1.0}
LENGTH_BINS = 32


@dataclass(frozen=True)
class Coverage:
    """The rows of one folder, all in half-open ranges of row numbers, in order.

    Attributes:
        folder: its path or URL.
        ranges: accounted for by shards whose index can be read.
        faulty: of shards that cannot be read, or have another fault of their own.
        skipped: rows that have no sample, or a variant that has none.
    """

    folder: str
    ranges: list[Range]
    faulty: list[Range]
    skipped: list[Range]


@dataclass(frozen=True)
class Summary:
    """Everything known about a set of shards without opening their tars.

    Attributes:
        shards, rows, samples: counts; `rows` counts each variant of a row, and is samples + excluded + skipped.
        excluded: samples on the exclude lists beside the shards. Nothing else but the tars' bytes counts them.
        unhashed: of the shards, those whose index has no hash of its own, as qie wrote them before there was one.
        records: distinct records, counted in each shard: within one, samples of equal content share a record.
        duplicates: samples whose content another one has, in whichever shard.
        with_rejected: samples that have a rejected target.
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
        lengths: prompt lengths as a histogram: (from, below, samples) of bins of equal width, at most `LENGTH_BINS`.
        recipe_fields: recipe digest -> its fields.
        coverage: what is there of the rows of each folder.
        ranges: rows covered, as half-open ranges, merged over all folders.
        missing: (folder, start, stop) of rows that no shard of the folder is of, though one is of later rows.
        tensor_bytes: tensor, or `pictures` -> mean bytes per sample, largest first.
        tensor_bytes_total: the same -> bytes of all samples.
        faults: what is wrong, a line each.
        pairs: how targets lie on their controls, and how captions repeat.
    """

    shards: int
    unhashed: int
    rows: int
    samples: int
    excluded: int
    records: int
    duplicates: int
    with_rejected: int
    bytes: int
    bytes_per_sample: float
    recipes: dict[str, int]
    sources: dict[str, int]
    skipped: dict[str, int]
    skipped_rows: list[tuple[str, int, str, str]]
    shapes: dict[str, int]
    buckets: dict[str, int]
    tokens: dict[str, int]
    lengths: list[tuple[int, int, int]]
    recipe_fields: dict[str, dict[str, Any]]
    coverage: list[Coverage]
    clipped: int
    clipped_samples: int
    notes: dict[str, int]
    ranges: list[tuple[int, int]]
    missing: list[tuple[str, int, int]]
    tensor_bytes: dict[str, float]
    tensor_bytes_total: dict[str, int]
    faults: list[str]
    pairs: Pairs = field(default_factory=Pairs)

    @classmethod
    def of(cls, places: str | Path | Iterable[str | Path], *, verify: bool = False) -> Summary:
        """The summary of the shards in one or several folders, globs or brace patterns, paths or URLs.

        Args:
            places: of the shards.
            verify: whether all that they hold is read and rehashed.

        Raises:
            UsageError: there are none.
            StoreError: a store cannot be reached.
        """
        return summarise(find_indexes(places), verify=verify)

    def __repr__(self) -> str:
        samples, rows = human_count(self.samples, "sample"), human_count(self.rows, "row")
        counts = f"{samples} of {rows} in {human_count(self.shards, 'shard')}, {human_bytes(self.bytes)}"
        faults = human_count(len(self.faults), "fault")
        left_out = f"{self.excluded:,} excluded, {len(self.skipped_rows):,} skipped, {faults}"
        return f"<Summary: {counts}; {left_out}>"

    def _repr_html_(self) -> str:
        from qie.html_report.notebook import summary_html

        return summary_html(self)

    def beside(self, rows: int) -> Summary:
        """The same, compared with a source of `rows` rows: its rows after the last shard are missing, too."""
        ends = {one.folder: max(stop for _, stop in [*one.ranges, *one.faulty]) for one in self.coverage}
        folder = max(ends, key=lambda name: ends[name])
        if ends[folder] < rows:
            return replace(self, missing=[*self.missing, (folder, ends[folder], rows)])
        if ends[folder] > rows:
            fault = f"shards hold rows up to {ends[folder]} in {folder}, and the source has only {rows}"
            return replace(self, faults=[*self.faults, fault])
        return self

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(
    indexes: Sequence[File], *, verify: bool = False, progress: Callable[[int], object] = lambda done: None
) -> Summary:
    """Summarise the shards of `indexes`; with `verify` all that they hold is read, as for training, and rehashed.

    A shard that cannot be read is a fault in the summary; the others are still summarised.
    """
    sizes = _sizes(indexes)
    remote = any(file.path is None for file in indexes)
    readers = REMOTE_READERS if remote else (os.cpu_count() or 1) if verify else LOCAL_READERS
    tally = Tally()
    tally.listed = excluded_in(indexes, tally.faults)
    compacts = _compacts(indexes, tally.faults) if verify else {}

    def opened(file: File) -> tuple[ShardIndex | None, list[str]]:
        if verify:
            return _verify(file, compacts.get(file.folder.url))
        return _open(file, sizes[file.folder.url])

    # Not a pool's `map`: that would hold all indexes that nobody has counted yet.
    found = map(opened, indexes) if readers == 1 else Pipeline(Stage("open", opened, readers)).run(indexes)
    for done, (file, (index, faults)) in enumerate(zip(indexes, found, strict=True), start=1):
        if faults:
            tally.blame(file, faults)
        if index is not None:
            tally.add(file, index)
        progress(done)
    return tally.summary()


def _folders(indexes: Sequence[File]) -> list[Folder]:
    return list({file.folder.url: file.folder for file in indexes}.values())


def excluded_in(indexes: Sequence[File], faults: list[str]) -> frozenset[str]:
    """The keys on the exclude lists beside some shards; a list that cannot be read is added to the faults."""
    keys: set[str] = set()
    for folder in _folders(indexes):
        try:
            keys.update(read_excluded(folder))
        except QieError as error:
            faults.append(one_line(error))
    return frozenset(keys)


def _sizes(indexes: Sequence[File]) -> dict[str, dict[str, int]]:
    """The files of each folder, by its URL, in one request each; a web server lists none."""
    sizes: dict[str, dict[str, int]] = {}
    for folder in _folders(indexes):
        try:
            sizes[folder.url] = folder.listing()
        except StoreError:
            sizes[folder.url] = {}
    return sizes


def _open(file: File, sizes: Mapping[str, int]) -> tuple[ShardIndex | None, list[str]]:
    try:
        index = read_index(file)
        if sizes.get(file.with_suffix(".tar").name) != index.filesize:
            Shard(file)  # looks at the tar itself, and says what is wrong
        return index, []
    except QieError as error:
        return None, [one_line(error)]


_Current = tuple[Compact, dict[str, int]]


def _compacts(indexes: Sequence[File], faults: list[str]) -> dict[str, _Current]:
    """The compacted index of each folder that has one, by the folder's URL; and the faults of folders."""
    compacts: dict[str, _Current] = {}
    for folder in _folders(indexes):
        try:
            faults.extend(map(one_line, lonely_tars(folder, indexes)))
            if compact := current_compact(folder):
                compact[0].require_all()
                compacts[folder.url] = compact
        except QieError as error:
            faults.append(one_line(error))
    return compacts


def _verify(file: File, compact: _Current | None) -> tuple[ShardIndex | None, list[str]]:
    index: ShardIndex | None = None
    faults: list[str] = []
    try:
        shard = Shard(file)
        index = shard.index
        faults.extend(map(one_line, shard_faults(shard)))
        if compact and file.stem in compact[1]:
            faults.extend(map(one_line, compact_faults(compact[0], compact[1][file.stem], shard)))
    except QieError as error:
        faults.append(one_line(error))
    return index, faults


@dataclass
class Tally:
    """The counts so far, without samples whose key is `listed`. The first three are by folder."""

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
    shapes: Counter[tuple[Shape, int]] = field(default_factory=Counter)  # with pixels per latent pixel
    tokens: Counter[int] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    tensor_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    clipped: list[int] = field(default_factory=list)
    with_rejected: int = 0
    pairs: PairTally = field(default_factory=PairTally)
    listed: frozenset[str] = frozenset()
    excluded: int = 0
    excluded_bytes: int = 0
    faults: list[str] = field(default_factory=list)

    def add(self, file: File, index: ShardIndex) -> None:
        entries = self._kept(index) if self.listed else index.samples
        self.shards.append((file, index.rows))
        self.named.append(file)
        self.ranges[file.folder.url].append(index.rows)
        self.unhashed += index.this_sha256 is None
        self.recipes.setdefault(index.recipe.digest, index.recipe)
        self.by_recipe[index.recipe.digest] += 1
        self.records += len({entry.key for entry in entries}) if self.listed else len(index.files)
        self.tar_bytes += index.filesize
        self.keys += [entry.key[:32].encode() for entry in entries]
        self.skipped_in[file.folder.url] += [(gone.row, gone.row + 1) for gone in index.skipped]
        self.skipped += [(str(file.with_suffix(".tar")), gone) for gone in index.skipped]
        self.sources.update([entry.source for entry in entries])
        self.shapes.update([(entry.shape, index.recipe.latent_scale) for entry in entries])
        self.tokens.update([entry.tokens for entry in entries])
        self.notes.update([note for entry in entries for note in entry.notes])
        self.clipped += [entry.clipped for entry in entries if entry.clipped]
        self.with_rejected += sum("rejected_latent" in entry.tensor_bytes for entry in entries)
        self.pairs.add(file, entries)
        for entry in entries:
            for name, size in entry.tensor_bytes.items():
                self.tensor_bytes[name] += size
            if place := index.pictures.get(pictures_name(entry.key)):
                self.tensor_bytes["pictures"] += place.size

    def _kept(self, index: ShardIndex) -> tuple[Entry, ...]:
        """The samples of a shard that are not excluded; the others are counted."""
        kept = tuple(entry for entry in index.samples if entry.key not in self.listed)
        gone = {entry.key for entry in index.samples} & self.listed
        self.excluded += len(index.samples) - len(kept)
        self.excluded_bytes += sum(512 - (-index.files[member_name(key)].size // 512) * 512 for key in gone)
        return kept

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
        shapes: Counter[str] = Counter()
        for (shape, scale), count in self.shapes.items():
            buckets[f"{shape.target[1] * scale}×{shape.target[0] * scale}"] += count
            shapes[shape.in_pixels(scale)] += count
        return Summary(
            shards=len(self.shards),
            unhashed=self.unhashed,
            rows=samples + self.excluded + len(self.skipped),
            samples=samples,
            excluded=self.excluded,
            records=self.records,
            duplicates=samples - len(np.unique(np.array(self.keys, "S32"))),
            with_rejected=self.with_rejected,
            bytes=self.tar_bytes,
            bytes_per_sample=(self.tar_bytes - self.excluded_bytes) / samples if samples else 0.0,
            recipes=dict(self.by_recipe),
            sources=dict(self.sources.most_common()),
            skipped=dict(Counter(gone.reason for _, gone in self.skipped).most_common()),
            skipped_rows=[(path, gone.row, gone.name, gone.reason) for path, gone in self.skipped],
            shapes=dict(shapes.most_common()),
            buckets=dict(buckets.most_common()),
            tokens=_percentiles(self.tokens),
            lengths=_histogram(self.tokens),
            recipe_fields={digest: recipe.to_dict() for digest, recipe in self.recipes.items()},
            coverage=self._coverage(),
            clipped=sum(self.clipped),
            clipped_samples=len(self.clipped),
            notes=dict(self.notes.most_common()),
            ranges=merged_ranges(found for ranges in self.ranges.values() for found in ranges),
            missing=list(gaps(self.named)),
            tensor_bytes={name: size / samples for name, size in tensor_bytes.items()},
            tensor_bytes_total=tensor_bytes,
            faults=self.faults + _conflicts(self.shards, list(self.recipes.values())),
            pairs=self.pairs.pairs(),
        )

    def _coverage(self) -> list[Coverage]:
        folders = {**self.ranges, **self.faulty}
        parts = (self.ranges, self.faulty, self.skipped_in)
        return [Coverage(folder, *(merged_ranges(part.get(folder, ())) for part in parts)) for folder in folders]


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
