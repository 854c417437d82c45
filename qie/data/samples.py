"""What a stream reads from: samples in shards (`qie.shards.ShardSet`), or rows that are encoded when asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from qie.data.sources import Source
from qie.data.variants import Versions
from qie.errors import QieError, RowError
from qie.recipe import Recipe
from qie.shards.index import Skipped
from qie.stages import Pipeline, Stage
from qie.types import Row, Sample, Shape


class Samples(Protocol):
    """What a stream reads from: samples by position, their shapes and keys known beforehand."""

    @property
    def shapes(self) -> Sequence[Shape]: ...

    @property
    def keys(self) -> Sequence[str]: ...

    @property
    def rows(self) -> Sequence[int]:
        """A number for the row of each sample: versions of one row, which stand together, have the same."""

    @property
    def recipe(self) -> Recipe: ...

    @property
    def skipped(self) -> Sequence[Skipped]:
        """Rows that are not among the samples, and why."""

    def load(self, position: int) -> Sample: ...


class RowEncoder(Protocol):
    """What turns rows into samples. `qie.encode.Encoder` is one; a stream is given it and never makes it."""

    @property
    def recipe(self) -> Recipe: ...

    @property
    def stages(self) -> Sequence[Stage]:
        """What `encode_together` consists of, to be overlapped. Each takes a list and gives one of the same length, in
        which a RowError stands for a row that failed."""

    def inspect(self, row: Row) -> tuple[str, Shape]:
        """Key and shape without encoding. Raises RowError when the row cannot be encoded."""

    def encode(self, row: Row) -> Sample:
        """The row's sample. Raises RowError when it has none."""

    def encode_together(self, rows: Sequence[Row]) -> list[Sample | RowError]:
        """Each row's sample, or why it has none."""


@dataclass(frozen=True)
class LiveSamples:
    """Rows of a source that are encoded each time they are asked for."""

    source: Source
    encoder: RowEncoder
    rows: tuple[int, ...]
    versions: Versions
    numbers: tuple[int, ...]
    keys: tuple[str, ...]
    shapes: tuple[Shape, ...]
    skipped: tuple[Skipped, ...]

    @classmethod
    def scan(
        cls,
        source: Source,
        encoder: RowEncoder,
        versions: Versions | None = None,
        progress: Callable[[int], object] = lambda done: None,
    ) -> LiveSamples:
        """Read and decode every row once, in threads, so that unusable rows and all sizes are known before training."""
        versions = versions or Versions()
        found: list[tuple[int, int, str, Shape]] = []
        skipped: list[Skipped] = []

        def inspect(index: int) -> list[tuple[str, Shape] | RowError]:
            try:
                return [_inspected(encoder, row) for row in versions.of(source.read(index))]
            except RowError as error:
                return [error]

        looking = Pipeline([Stage("inspect", inspect, os.cpu_count() or 1)])
        for index, looks in enumerate(looking.run(range(len(source)))):
            progress(index + 1)
            for number, look in enumerate(looks):
                if isinstance(look, RowError):
                    name, part = source.name(index), source.part(index)
                    skipped.append(Skipped(index, name, look.what, source=part, variant=number))
                else:
                    found.append((index, number, *look))
        rows, numbers, keys, shapes = zip(*found, strict=True) if found else ((), (), (), ())
        return cls(source, encoder, rows, versions, numbers, keys, shapes, tuple(skipped))

    @property
    def recipe(self) -> Recipe:
        return self.encoder.recipe

    def load(self, position: int) -> Sample:
        versions = self.versions.of(self.source.read(self.rows[position]))
        number = self.numbers[position]
        sample = self.encoder.encode(versions[number]) if number < len(versions) else None
        if sample is None or sample.key != self.keys[position]:
            name = self.source.name(self.rows[position])
            raise QieError(
                "a row changed while it was trained on",
                where=name,
                hint="start again: keys and plan are of the old row",
            )
        return sample


def _inspected(encoder: RowEncoder, row: Row) -> tuple[str, Shape] | RowError:
    try:
        return encoder.inspect(row)
    except RowError as error:
        return error
