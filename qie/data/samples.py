"""What a stream reads from: samples in shards (`qie.shards.ShardSet`), or rows that are encoded when asked for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qie.data.sources import Source
from qie.data.variants import Versions
from qie.errors import QieError, RowError
from qie.recipe import Recipe
from qie.shards.index import Skipped
from qie.shards.shard_set import ShardSet
from qie.shards.table import Columns, numbered
from qie.stages import Pipeline, Stage
from qie.types import Facts, Row, Sample


class Samples(Protocol):
    """What a stream reads from: samples by position, with what a plan needs of them known beforehand."""

    @property
    def columns(self) -> Columns: ...

    @property
    def digests(self) -> NDArray[np.uint8]:
        """[N, 32]: the keys."""

    @property
    def recipe(self) -> Recipe: ...

    @property
    def skipped(self) -> Sequence[Skipped]:
        """Rows that are not among the samples, and why."""

    @property
    def masked(self) -> bool:
        """Whether a sample has a loss mask."""

    def fetch(self, position: int) -> Sample:
        """The sample at a position; called from several threads. Its prompt may be missing."""


class RowEncoder(Protocol):
    """What turns rows into samples. `qie.encode.Encoder` is one; a stream is given it and never makes it."""

    @property
    def recipe(self) -> Recipe: ...

    @property
    def stages(self) -> Sequence[Stage]:
        """What `encode_together` consists of, to be overlapped. Each takes a list and gives one of the same length, in
        which a RowError stands for a row that failed."""

    def inspect(self, row: Row) -> Facts:
        """What is known without encoding. Raises RowError when the row cannot be encoded."""

    def encode(self, row: Row) -> Sample:
        """The row's sample. Raises RowError when it has none."""

    def encode_together(self, rows: Sequence[Row]) -> list[Sample | RowError]:
        """Each row's sample, or why it has none."""


@dataclass(frozen=True)
class LiveSamples:
    """Rows of a source that are encoded each time they are asked for.

    Attributes:
        source, encoder, versions: the rows, what encodes them, and which versions of them there are.
        rows, numbers: of each sample, its row and which version of it.
        facts: of each sample.
        parts: of each sample, the name of its source in a mixture.
        skipped: rows that are not among them.
        stored: shards in which samples are looked for before they are encoded. A key names its recipe, too, so what is
            found is what would be encoded.
    """

    source: Source
    encoder: RowEncoder
    versions: Versions
    rows: tuple[int, ...]
    numbers: tuple[int, ...]
    facts: tuple[Facts, ...]
    parts: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    stored: ShardSet | None = None

    @classmethod
    def scan(
        cls,
        source: Source,
        encoder: RowEncoder,
        versions: Versions | None = None,
        progress: Callable[[int], object] = lambda done: None,
        stored: ShardSet | None = None,
    ) -> LiveSamples:
        """Read and decode every row once, in threads, so that unusable rows and all sizes are known before training."""
        versions = versions or Versions()
        found: list[tuple[int, int, Facts]] = []
        skipped: list[Skipped] = []

        def inspect(index: int) -> list[Facts | RowError]:
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
                    found.append((index, number, look))
        rows, numbers, facts = zip(*found, strict=True) if found else ((), (), ())
        parts = tuple(source.part(row) for row in rows)
        return cls(source, encoder, versions, rows, numbers, facts, parts, tuple(skipped), stored)

    @property
    def recipe(self) -> Recipe:
        return self.encoder.recipe

    @cached_property
    def _gates(self) -> list[threading.Semaphore]:
        return [threading.Semaphore(stage.workers) for stage in self.encoder.stages]

    def _encode(self, row: Row) -> Sample:
        """The row through the encoder's stages. Threads that fetch batches side by side overlap them: while one is in
        the text encoder, another may be in the VAE."""
        item: list[Any] = [row]
        for stage, gate in zip(self.encoder.stages, self._gates, strict=True):
            with gate:
                item = stage.work(item)
        if isinstance(item[0], RowError):
            raise item[0]
        sample: Sample = item[0]
        return sample

    @cached_property
    def columns(self) -> Columns:
        shapes = [facts.shape for facts in self.facts]
        return Columns(
            *numbered(shapes),
            rows=np.array(self.rows, np.int64),
            lengths=np.array([facts.tokens for facts in self.facts], np.int32),
            sources=numbered(self.parts)[0],
            blocks=np.zeros(len(self.rows), np.int32),
            source_names=numbered(self.parts)[1] or ("",),
        )

    @cached_property
    def digests(self) -> NDArray[np.uint8]:
        return np.frombuffer(bytes.fromhex("".join(self.keys)), np.uint8).reshape(-1, 32)

    @property
    def masked(self) -> bool:
        return any(facts.masked for facts in self.facts)

    @property
    def keys(self) -> list[str]:
        return [facts.key for facts in self.facts]

    @cached_property
    def _stored_at(self) -> dict[str, int]:
        """Where samples lie in `stored`, by key."""
        wanted = set(self.keys)
        keys = self.stored.keys if self.stored else []
        return {key: position for position, key in enumerate(keys) if key in wanted}

    def fetch(self, position: int) -> Sample:
        there = self._stored_at.get(self.facts[position].key)
        if there is not None and self.stored is not None:
            return self.stored.fetch(there)
        versions = self.versions.of(self.source.read(self.rows[position]))
        number = self.numbers[position]
        sample = self._encode(versions[number]) if number < len(versions) else None
        if sample is None or sample.key != self.facts[position].key:
            name = self.source.name(self.rows[position])
            raise QieError(
                "a row changed while it was trained on",
                where=name,
                hint="start again: keys and plan are of the old row",
            )
        return sample


def _inspected(encoder: RowEncoder, row: Row) -> Facts | RowError:
    try:
        return encoder.inspect(row)
    except RowError as error:
        return error
