"""Precompute in one process: for each shard, read its rows, encode what is not there yet, publish."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from qie.data.sources import Source
from qie.data.stream import RowEncoder
from qie.errors import RowError, UsageError
from qie.precompute.ranges import Range, shard_ranges
from qie.recipe import Recipe
from qie.shards.index import Entry, ShardIndex, Skipped, parse_stem, read_index
from qie.shards.reader import Shard
from qie.shards.record import encode
from qie.shards.storage import published
from qie.shards.writer import ShardBusyError, ShardWriter
from qie.types import Row

OnError = Literal["skip", "stop"]
Progress = Callable[["Report"], object]


@dataclass
class Report:
    """What a run did, as it goes. `encoded + reused + skipped` is the number of rows done."""

    encoded: int = 0
    reused: int = 0
    shards_written: int = 0
    shards_kept: int = 0
    shards_busy: int = 0
    bytes_written: int = 0
    clipped: int = 0
    skipped: list[Skipped] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return self.encoded + self.reused + len(self.skipped)


def precompute(
    source: Source,
    encoder: RowEncoder,
    directory: Path,
    *,
    rows: Range,
    shard_size: int = 64,
    on_error: OnError = "skip",
    progress: Progress = lambda report: None,
) -> Report:
    """Bring the shards of `rows` in `directory` up to date with `source`.

    A published shard whose rows still have their keys is left alone. One of which rows changed is written again, with
    the records of the other rows copied. What is published is complete, so a run that was killed goes on where it was.

    Raises:
        RecipeMismatchError: the directory holds shards of another recipe.
        RowError: a row cannot be encoded and `on_error` is "stop".
    """
    recipe = encoder.recipe
    there = _published(directory, recipe, rows, len(source))
    report = Report()
    work = _Work(source, encoder, recipe, report, on_error, progress)
    for first, last in shard_ranges(*rows, shard_size, there):
        try:
            if (first, last) in there:
                work.refresh(Shard(there[first, last]), directory)
            else:
                work.write(directory, first, last, reusable=None)
        except ShardBusyError:
            report.shards_busy += 1
    return report


def _published(directory: Path, recipe: Recipe, rows: Range, source_rows: int) -> dict[Range, Path]:
    """Shards of the directory that overlap `rows`. Of all others only one is opened, to see that its recipe is ours."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            "the output is no folder and cannot be made one",
            where=directory,
            found=error.strerror,
            hint="correct --output, or cache.cache_dir",
        ) from error
    there: dict[Range, Path] = {}
    for position, path in enumerate(published(directory)):
        stem = parse_stem(path.stem)
        assert stem is not None
        overlaps = stem[0] < rows[1] and stem[1] > rows[0]
        if position == 0 or overlaps:
            recipe.require_equal(
                read_index(path).recipe, path, "write to another folder, or delete the shards in this one"
            )
        if stem[1] > source_rows:
            raise UsageError(
                "the output holds rows that the source no longer has",
                where=path,
                expected=f"rows below {source_rows}",
                hint="write to another folder, or delete this shard and its index",
            )
        if overlaps:
            there[stem] = path
    return there


@dataclass(frozen=True)
class _Work:
    source: Source
    encoder: RowEncoder
    recipe: Recipe
    report: Report
    on_error: OnError
    progress: Progress

    def refresh(self, shard: Shard, directory: Path) -> None:
        """Leave a published shard alone if its rows are what they were, else write it again."""
        index = shard.index
        known = {entry.row: entry.key for entry in index.samples} | {gone.row: gone.key for gone in index.skipped}
        if all(self._key(number) == known[number] for number in range(index.start, index.stop)):
            self.report.shards_kept += 1
            self.report.reused += len(index.samples)
            self.report.skipped += index.skipped
            self.progress(self.report)
            return
        self.write(directory, index.start, index.stop, reusable=shard)

    def write(self, directory: Path, first: int, last: int, *, reusable: Shard | None) -> None:
        """Write and publish the shard of rows [first, last), copying records that `reusable` holds already."""
        with ShardWriter(directory, first, last, self.recipe) as shard:
            for done in self._iter_rows(range(first, last), reusable):
                if isinstance(done, Skipped):
                    shard.skip(done)
                    self.report.skipped.append(done)
                else:
                    shard.add(*done)
                    self.report.clipped += done[0].clipped
                self.progress(self.report)
            index: ShardIndex = shard.publish()
        self.report.shards_written += 1
        self.report.bytes_written += index.filesize

    def _iter_rows(self, rows: range, reusable: Shard | None) -> Iterator[tuple[Entry, bytes] | Skipped]:
        old = {entry.key: entry for entry in reusable.index.samples} if reusable else {}
        for start in range(0, len(rows), self.recipe.batch_size):
            yield from self._together(rows[start : start + self.recipe.batch_size], reusable, old)

    def _together(
        self, rows: range, reusable: Shard | None, old: dict[str, Entry]
    ) -> Iterator[tuple[Entry, bytes] | Skipped]:
        """What becomes of some rows, in their order; those that have to be encoded are, together.

        `old` are the entries of `reusable` by key.
        """
        done: dict[int, tuple[Entry, bytes] | Skipped] = {}
        fresh: list[Row] = []
        for number in rows:
            try:
                row = self.source.read(number)
            except RowError as error:
                done[number] = self._skipped(error, number, None)
                continue
            # Without a shard to copy from no key is asked for here: it hashes every byte of the row.
            if reusable and (key := self.recipe.key(row)) in old:
                done[number] = replace(old[key], row=number, name=row.name), reusable.verified_record(old[key])
                self.report.reused += 1
            else:
                fresh.append(row)
        for row, sample in zip(fresh, self.encoder.encode_together(fresh), strict=True):
            if isinstance(sample, RowError):
                done[row.index] = self._skipped(sample, row.index, self.recipe.key(row))
            else:
                done[row.index] = Entry.of(sample, row.index, row.name), encode(sample, self.recipe.digest)
                self.report.encoded += 1
        yield from (done[number] for number in rows)

    def _skipped(self, error: RowError, number: int, key: str | None) -> Skipped:
        if self.on_error == "stop":
            raise _located(error, number, self.source.name(number)) from error
        return Skipped(number, self.source.name(number), error.what, key)

    def _key(self, number: int) -> str | None:
        try:
            return self.recipe.key(self.source.read(number))
        except RowError:
            return None


def _located(error: RowError, number: int, name: str) -> RowError:
    where = f"row {number} ({name})" + (f", {error.where}" if error.where and error.where != name else "")
    return RowError(
        error.what,
        where=where,
        expected=error.expected,
        found=error.found,
        hint=error.hint or "--on-error skip goes on",
    )
