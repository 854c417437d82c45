"""Rows that are encoded when a stream asks for them, unless shards hold their samples."""

from __future__ import annotations

import hashlib
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qie.data.plan_settings import AT_ONCE
from qie.data.sources import Source, source_name
from qie.data.variants import Variants
from qie.errors import QieError, RowError, ShardError
from qie.recipe import Recipe
from qie.shards.cache import ShardCache
from qie.shards.grid import SHARD_ROWS
from qie.shards.index import Skipped
from qie.shards.reader import Tar
from qie.shards.sample_table import Columns, ends_of, numbered
from qie.shards.shard_set import ShardSet
from qie.stages import Pipeline, Stage, Stages
from qie.types import Facts, Row, Sample


class RowEncoder(Protocol):
    """Turns rows into samples. `qie.encode.Encoder` is one; a stream is given it and never makes it."""

    @property
    def recipe(self) -> Recipe: ...

    @property
    def stages(self) -> Stages[Sequence[Row], list[Sample | RowError]]:
        """The steps from rows to the sample of each, or to why it has none: to be overlapped."""

    def inspect(self, row: Row) -> Facts:
        """The facts known without encoding. Raises RowError when the row cannot be encoded."""


@dataclass(frozen=True)
class RowFacts:
    """The facts about the rows of a source, known before training, in the order of rows.

    Attributes:
        rows, numbers: for each sample, its row and the number of its variant.
        facts: for each sample.
        parts: for each sample, the name of its source in a mixture.
        skipped: rows that are not among the samples.
    """

    rows: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    facts: tuple[Facts, ...] = ()
    parts: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    @classmethod
    def merged(cls, shares: Sequence[RowFacts]) -> RowFacts:
        """The shares of several processes, in the order of rows."""
        samples = [
            one for share in shares for one in zip(share.rows, share.numbers, share.facts, share.parts, strict=True)
        ]
        skipped = sorted(
            (gone for share in shares for gone in share.skipped), key=lambda gone: (gone.row, gone.variant)
        )
        return cls.of(sorted(samples, key=itemgetter(0, 1)), skipped)

    @classmethod
    def of(cls, samples: Sequence[tuple[int, int, Facts, str]], skipped: Sequence[Skipped]) -> RowFacts:
        """The same, of each sample together."""
        if not samples:
            return cls(skipped=tuple(skipped))
        rows, numbers, facts, parts = zip(*samples, strict=True)
        return cls(rows, numbers, facts, parts, tuple(skipped))


def look_at_rows(
    source: Source,
    encoder: RowEncoder,
    variants: Variants | None = None,
    progress: Callable[[int], object] = lambda done: None,
    stored: ShardSet | None = None,
    share: slice = slice(None),
) -> RowFacts:
    """Read every row once, in threads, so that unusable rows and all sizes are known before training.

    Only rows that `stored` does not have are decoded. One that could not be encoded when `stored` was written cannot be
    encoded now: its content and the recipe are the same.

    Args:
        progress: called with the number of rows looked at.
        share: which rows to look at, where several processes share the work.
    """
    variants = variants or Variants()
    known = {} if stored is None else {key: position for position, key in enumerate(stored.keys)}
    refused = {gone.key: gone.reason for gone in stored.skipped} if stored else {}
    found: list[tuple[int, int, Facts, str]] = []
    skipped: list[Skipped] = []

    def look(row: Row) -> Facts | RowError:
        key = encoder.recipe.key(row)
        if stored is not None and key in known:
            return stored.facts(known[key])
        if key in refused:
            return RowError(refused[key])
        try:
            return encoder.inspect(row)
        except RowError as error:
            return error

    def inspect(index: int) -> list[Facts | RowError]:
        try:
            return [look(row) for row in variants.of(source.read(index))]
        except RowError as error:
            return [error]

    rows = range(len(source))[share]
    looking = Pipeline(Stage("inspect", inspect, os.cpu_count() or 1))
    for done, (index, of_row) in enumerate(zip(rows, looking.run(rows), strict=True), start=1):
        progress(done)
        for number, facts in enumerate(of_row):
            name, part = source.name(index), source_name(source, index)
            if isinstance(facts, RowError):
                skipped.append(Skipped(index, name, facts.what, source=part, variant=number))
            else:
                found.append((index, number, facts, part))
    return RowFacts.of(found, skipped)


@dataclass(frozen=True, eq=False)
class LiveSamples:
    """Rows of a source that are encoded each time they are asked for, unless shards hold them.

    Attributes:
        source, encoder, variants: the rows, what encodes them, and which variants of them there are.
        known: their facts, see `look_at_rows`.
        stored: shards in which samples are looked for before they are encoded. A key names its recipe, too, so what is
            found is what would be encoded. A record that turns out to be damaged is encoded instead.
        shard_rows: rows per shard, if the order is to be that of shards of all rows; see `Columns.ends`. Without,
            where so many rows are planned in windows of shards, as many as `qie-precompute` takes by default.
        say: told, once for each shard, of damaged records.
    """

    source: Source
    encoder: RowEncoder
    variants: Variants
    known: RowFacts
    stored: ShardSet | None = None
    shard_rows: int | None = None
    say: Callable[[str], object] = warnings.warn
    _told: set[int] = field(default_factory=set, repr=False)

    @property
    def recipe(self) -> Recipe:
        return self.encoder.recipe

    @property
    def skipped(self) -> Sequence[Skipped]:
        return self.known.skipped

    @property
    def excluded(self) -> frozenset[bytes]:
        """What the shards' lists leave out, wherever its samples would come from."""
        return self.stored.excluded if self.stored else frozenset()

    @cached_property
    def lacking(self) -> tuple[int, ...]:
        """The rows of samples that no shard holds."""
        pairs = zip(self.known.rows, self.known.facts, strict=True)
        return tuple(row for row, facts in pairs if facts.key not in self._stored_at)

    def load_encoder(self) -> None:
        """Have the encoder load its weights now, by a row that no shard holds, if others are in shards.

        Libraries change torch for the whole process while they build a model: it is not to be beside training. Without
        shards, the first batch waits for the weights.
        """
        lacking = (position for position, facts in enumerate(self.known.facts) if facts.key not in self._stored_at)
        first = next(lacking, None)
        if first is not None and self._stored_at:
            with suppress(RowError):  # which is told when the row is needed
                self._fetch_live(first)

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
        known, rows = self.known, np.array(self.known.rows, np.int64)
        shard_rows = self.shard_rows or (SHARD_ROWS if len(rows) > AT_ONCE else None)
        sources, source_names = numbered(known.parts)
        return Columns(
            *numbered([facts.shape for facts in known.facts]),
            rows=rows,
            lengths=np.array([facts.tokens for facts in known.facts], np.int32),
            sources=sources,
            ends=ends_of(rows // shard_rows if shard_rows else np.zeros(len(rows), np.int64)),
            source_names=source_names or ("",),
            latent_scale=self.recipe.latent_scale,
        )

    @cached_property
    def digests(self) -> NDArray[np.uint8]:
        return np.frombuffer(bytes.fromhex("".join(self.keys)), np.uint8).reshape(-1, 32)

    @property
    def digest(self) -> str:
        return hashlib.sha256(bytes.fromhex("".join(self.keys))).hexdigest()

    @property
    def keys(self) -> list[str]:
        return [facts.key for facts in self.known.facts]

    @property
    def masked(self) -> bool:
        return any(facts.masked for facts in self.known.facts)

    @property
    def paired(self) -> NDArray[np.bool_]:
        return np.array([facts.paired for facts in self.known.facts], np.bool_)

    @property
    def distant(self) -> bool:
        return False

    @property
    def copies(self) -> ShardCache | None:
        return self.stored.copies if self.stored else None

    def copied_tar(self, position: int) -> Tar | None:
        there = self._stored_at.get(self.known.facts[position].key)
        return self.stored.copied_tar(there) if self.stored and there is not None else None

    @cached_property
    def _stored_at(self) -> dict[str, int]:
        """Where samples lie in `stored`, by key."""
        wanted = set(self.keys)
        keys = self.stored.keys if self.stored else []
        return {key: position for position, key in enumerate(keys) if key in wanted}

    def fetch(self, position: int, *, own: bool = False) -> Sample:
        there = self._stored_at.get(self.known.facts[position].key)
        if there is None or self.stored is None:
            return self._fetch_live(position)
        try:
            return self.stored.fetch(there, own=own)
        except ShardError as error:
            shard = self.stored.table.shard_of(there)
            if shard not in self._told:
                self._told.add(shard)
                self.say(f"{error.what} in {error.where}: its row is encoded live, and others of this shard likewise")
        return self._fetch_live(position)

    def _fetch_live(self, position: int) -> Sample:
        index, number = self.known.rows[position], self.known.numbers[position]
        variants = self.variants.of(self.source.read(index))
        sample = self._encode(variants[number]) if number < len(variants) else None
        if sample is None or sample.key != self.known.facts[position].key:
            raise QieError(
                "a row changed during training",
                where=self.source.name(index),
                hint="start again: the plan was made for the old row",
            )
        return sample
