"""What shards hold, as one value that the table, the JSON and the page of qie-stats all show."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from qie.errors import QieError

LENGTH_BINS = 32

Range = tuple[int, int]


@dataclass(frozen=True)
class Coverage:
    """What is there of the rows of one folder; everything in half-open ranges of row numbers, in order.

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
        shards, rows, samples: counts; `rows` counts each variant of a row, and is samples + skipped.
        unhashed: of the shards, those whose index has no hash of its own, as qie wrote them before there was one.
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
        lengths: prompt lengths as a histogram: (from, below, samples) of bins of equal width, at most `LENGTH_BINS`.
        recipe_fields: recipe digest -> its fields.
        coverage: what is there of the rows of each folder.
        ranges: rows covered, as half-open ranges, merged over all folders.
        missing: (folder, start, stop) of rows that no shard of the folder is of, though one is of later rows.
        tensor_bytes: tensor -> mean bytes per sample, largest first.
        tensor_bytes_total: tensor -> bytes of all samples.
        faults: what is wrong, a line each.
    """

    shards: int
    unhashed: int
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

    def beside(self, rows: int) -> Summary:
        """The same, compared with a source of `rows` rows: what it has behind the last shard is missing, too."""
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


def one_line(error: QieError) -> str:
    return " ".join(str(error).split())
