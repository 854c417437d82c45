"""A dry run: how much a run would encode, copy, skip and write, and how long it would take."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from qie.data.live import RowEncoder
from qie.data.sources import Source
from qie.errors import RowError
from qie.precompute.engine import READERS, Settings
from qie.precompute.local import check_output
from qie.precompute.reuse import Records
from qie.shards.grid import Range
from qie.shards.index import Entry, Skipped
from qie.shards.record import encode
from qie.stages import Pipeline, Stage
from qie.stores import Folder
from qie.types import Row, Shape

TIMED = 6
"""Samples to encode for a measure of time. The first does not count, because it loads the weights."""

_Found = tuple[Row, Shape | RowError, str, Entry | None]


@dataclass
class PrecomputeEstimate:
    """The outcome of a run, before it runs.

    Attributes:
        rows: how many were checked.
        shapes: samples of the shards, by shape.
        fresh: samples to encode, by shape; records of the others exist.
        with_rejected: samples of the shards that have a rejected target.
        skipped: rows, or variants of rows, that cannot be encoded.
        bytes: about the size of all records; None if no sample could be measured.
        encoding_s: about the seconds to encode `fresh`; None if no sample could be timed.
    """

    rows: int = 0
    shapes: Counter[Shape] = field(default_factory=Counter)
    fresh: Counter[Shape] = field(default_factory=Counter)
    with_rejected: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    bytes: int | None = None
    encoding_s: float | None = None


def estimate_precompute(
    source: Source,
    encoder: RowEncoder,
    output: Folder,
    *,
    rows: Range,
    settings: Settings,
    progress: Callable[[int], object] = lambda done: None,
) -> PrecomputeEstimate:
    """Read and check every row of a range, look for its records, and time a few. Writes nothing."""
    check_output(output, encoder.recipe, len(source))
    records = Records(output, settings.reuse)
    result, timed, known, seen = PrecomputeEstimate(), dict[Shape, list[Row]](), dict[Shape, int](), set[str]()

    def look(number: int) -> list[_Found] | RowError:
        try:
            variants = settings.variants.of(source.read(number))
        except RowError as error:
            return error
        return [_look(row, encoder, records) for row in variants]

    looking = Pipeline(Stage("look", look, READERS))
    for number, found in zip(range(*rows), looking.run(range(*rows)), strict=True):
        result.rows += 1
        progress(result.rows)
        if isinstance(found, RowError):
            result.skipped.append(Skipped(number, source.name(number), found.what))
            continue
        for row, shape, key, entry in found:
            if isinstance(shape, RowError):
                result.skipped.append(Skipped(number, row.name, shape.what, variant=row.variant))
                continue
            result.shapes[shape] += 1
            result.with_rejected += row.rejected is not None
            if entry is not None:
                known[shape] = sum(entry.tensor_bytes.values())
            elif key not in seen:
                seen.add(key)
                result.fresh[shape] += 1
                if (shape in timed or len(timed) < TIMED) and len(timed.setdefault(shape, [])) < TIMED:
                    timed[shape].append(row)
    # One of each shape, then further ones.
    places = [(place, row) for some in timed.values() for place, row in enumerate(some)]
    _time(result, [row for _, row in sorted(places, key=lambda one: one[0])][:TIMED], known, encoder)
    return result


def _look(row: Row, encoder: RowEncoder, records: Records) -> _Found:
    try:
        facts = encoder.inspect(row)
    except RowError as error:
        return row, error, "", None
    return row, facts.shape, facts.key, records.entry(facts.key)


def _time(result: PrecomputeEstimate, rows: list[Row], known: dict[Shape, int], encoder: RowEncoder) -> None:
    """Encode `rows`, of different shapes if possible, and scale to all samples; `known` has bytes by shape."""
    measured = dict(known)
    started = None
    for (sample,) in Pipeline(encoder.stages).run([row] for row in rows):
        started = started or time.perf_counter()
        if not isinstance(sample, RowError):
            measured[sample.shape] = len(encode(sample, encoder.recipe.digest)) + len(sample.pictures or b"")
    if not measured:
        return
    per_pixel = sum(measured.values()) / sum(map(_pixels, measured))
    result.bytes = round(
        sum(count * measured.get(shape, per_pixel * _pixels(shape)) for shape, count in result.shapes.items())
    )
    if started is not None and len(rows) > 1:
        result.encoding_s = (time.perf_counter() - started) / (len(rows) - 1) * result.fresh.total()


def _pixels(shape: Shape) -> int:
    """Latent pixels of target and controls; time and bytes are about proportional to them."""
    return sum(height * width for height, width in (shape.target, *shape.controls))
