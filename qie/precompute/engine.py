"""The engine: shards of rows through overlapping stages, each shard published as soon as it is complete.

    work ─> read ─> merge ─> the encoder's stages ─> record ─> write ─> publish ─> report
            n threads         prepare, VAE, text                          tar, then index

Every stage has a thread of its own and a short queue before it. So the slowest one sets the time, VAE and text encoder
work at once on different rows, and memory does not grow with the dataset.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import Literal

from qie.data.live import RowEncoder
from qie.data.sources import Source, source_name
from qie.data.variants import Variants
from qie.errors import RowError
from qie.precompute.counts import OnReport, Report
from qie.precompute.heartbeat import beating
from qie.precompute.progress import PrecomputeRun
from qie.precompute.reuse import Records
from qie.shards.discovery import published, rows_of
from qie.shards.grid import Range, shard_ranges
from qie.shards.index import Entry, ShardIndex, Skipped, row_inputs, shard_stem
from qie.shards.reader import Shard
from qie.shards.record import encode
from qie.shards.writer import ShardBusyError, ShardOverlapError, ShardWriter
from qie.stages import Pipeline, Stage, Stages
from qie.stores import File, Folder
from qie.threads import pause
from qie.types import PAIR_WARNINGS, Row, Sample

READERS = 8
DEPTH = 4
"""How many groups may wait before each stage: tens of megabytes each, before and after the encoders."""

LOOK_AGAIN_S = 1.0
"""Seconds between looks at shards that another run is writing, once all other work is done."""


@dataclass(frozen=True)
class Settings:
    """How a run treats its rows. No setting changes the content of a sample.

    Attributes:
        on_error: skip and list rows that cannot be encoded, or stop the run.
        retry_skipped: write shards with skipped rows again.
        trust_published: keep published shards without comparing their rows with the source.
        reuse: shards of older runs, to copy records from.
        variants: which variants of a row are stored.
    """

    on_error: Literal["skip", "stop"] = "skip"
    retry_skipped: bool = False
    trust_published: bool = False
    reuse: tuple[str, ...] = ()
    variants: Variants = field(default_factory=Variants)


@dataclass(frozen=True, eq=False)
class Fresh:
    """A row that has to be encoded."""

    row: Row


@dataclass(frozen=True, eq=False)
class Encoded:
    """A row that this run has encoded."""

    entry: Entry
    record: bytes
    pictures: bytes | None


@dataclass(frozen=True, eq=False)
class Reused:
    """A row whose record a published shard has."""

    entry: Entry
    record: bytes
    pictures: bytes | None


@dataclass(frozen=True, eq=False)
class Duplicate:
    """A row with the content of an earlier one of its shard."""

    row: Row


RowOutcome = Encoded | Reused | Duplicate | Skipped
"""What becomes of a row, or of each of its variants."""


@dataclass(eq=False)
class OpenShard:
    """A shard in progress.

    Attributes:
        older: the published shard that it replaces, if there is one.
        keys: of the rows that are encoded for it.
        entries: the entries so far, by key.
    """

    writer: ShardWriter
    older: Shard | None
    keys: set[str] = field(default_factory=set)
    entries: dict[str, Entry] = field(default_factory=dict)


@dataclass(eq=False)
class Group:
    """Some rows of a shard on their way through the stages.

    Attributes:
        numbers: which rows; the group with the shard's last row is `last`.
        rows: their variants, in order.
        index: the index of the shard, when the last group has published it.
    """

    shard: OpenShard
    numbers: range
    last: bool
    rows: list[Fresh | RowOutcome] = field(default_factory=list)
    index: ShardIndex | None = None


@dataclass(frozen=True)
class Kept:
    """A published shard that is left as it is."""

    rows: int
    index: ShardIndex


@dataclass(frozen=True)
class Waiting:
    """All that is left are shards that another run is writing."""

    shards: int


@dataclass(frozen=True)
class Finished:
    """Every row of a shard that the run was given has been counted."""

    shard: Range


Work = Group | Kept | Waiting | Finished


class Engine:
    """Encodes shards of a source into a folder.

    Args:
        source, encoder: the rows, and the encoder that makes samples of them.
        output: where the shards go.
        settings: see `Settings`.
        progress: called with the report after each group of rows.
        finished: called with each shard of `run` when the report holds all its rows, maybe never with one that another
            run was writing in parts.
        told: the run that is told of in the output's folder `progress`; None for nothing to be told.
    """

    def __init__(
        self,
        source: Source,
        encoder: RowEncoder,
        output: Folder,
        settings: Settings,
        progress: OnReport = lambda report: None,
        finished: Callable[[Range], object] = lambda shard: None,
        told: PrecomputeRun | None = None,
    ) -> None:
        self.source, self.encoder, self.output, self.settings = source, encoder, output, settings
        self._told = told
        self._recipe, self._progress, self._finished = encoder.recipe, progress, finished
        self._records = Records(output, settings.reuse, search_output=not settings.trust_published)
        self._writers: set[ShardWriter] = set()

    def run(self, shards: Iterable[Range]) -> Report:
        """Bring `shards` up to date, in their order.

        Raises:
            RowError: a row cannot be encoded and `on_error` is "stop".
            ShardError, StoreError: a shard cannot be read or written. Published shards stay.
        """
        report, started = Report(), time.monotonic()
        pipeline = Pipeline(self._stages(), DEPTH)
        try:
            with ExitStack() as stack:
                tell = stack.enter_context(beating(self.output, self._told))
                pool = stack.enter_context(ThreadPoolExecutor(READERS, thread_name_prefix="qie-compare"))
                for done in stack.enter_context(closing(pipeline.run(self._iter_work(shards, pool)))):
                    if isinstance(done, Finished):
                        self._finished(done.shard)
                        continue
                    _count(report, done)
                    report.loads, report.seconds = dict(pipeline.loads), time.monotonic() - started
                    tell(report, done.index if isinstance(done, Group) else None)
                    self._progress(report)
        finally:
            for writer in tuple(self._writers):  # a second signal leaves threads behind that still add some
                writer.close()
        report.loads, report.seconds, report.shards_busy = dict(pipeline.loads), time.monotonic() - started, 0
        return report

    def _stages(self) -> Stages[Work, Work]:
        def through(stage: Callable[[Group], None]) -> Callable[[Work], Work]:
            def worked(work: Work) -> Work:
                if isinstance(work, Group):
                    stage(work)
                return work

            return worked

        encoding: Stages[tuple[Work, Sequence[Row]], tuple[Work, list[Sample | RowError]]]
        encoding = self.encoder.stages.beside(size=len)
        return (
            Stages.of(Stage("read", through(self._read), READERS, _rows_in))
            .then(Stage("merge", self._merge, size=_rows_in))
            .then(encoding)
            .then(Stage("record", self._record, size=lambda pair: len(pair[1])))
            .then(Stage("write", through(self._write), size=_rows_in))
            .then(Stage("publish", through(self._publish), size=_rows_in))
        )

    def _iter_work(self, shards: Iterable[Range], pool: ThreadPoolExecutor) -> Iterator[Work]:
        """All shards; at the end those of another run, which publishes them, or dies and leaves them to this one."""
        while True:
            busy: list[Range] = []
            for first, last in shards:
                before = len(busy)
                yield from self._iter_shard(first, last, pool, busy)
                if len(busy) == before:
                    yield Finished((first, last))
            if not busy:
                return
            yield Waiting(len(busy))
            pause(LOOK_AGAIN_S)
            shards = busy

    def _iter_shard(self, first: int, last: int, pool: ThreadPoolExecutor, busy: list[Range]) -> Iterator[Work]:
        place = File(self.output, f"{shard_stem(first, last)}.json")
        older = self._published(place)
        if older and self._is_current(older.index, pool):
            yield Kept(last - first, older.index)
            return
        try:
            writer = ShardWriter(self.output, first, last, self._recipe).__enter__()
        except ShardBusyError:
            busy.append((first, last))
            return
        except ShardOverlapError:  # a run of other ranges has published it since the shards were planned
            for part in shard_ranges(first, last, last, map(rows_of, published(self.output))):
                yield from self._iter_shard(*part, pool, busy)
            return
        self._writers.add(writer)
        now = self._published(place)
        if now and (older is None or now.index != older.index):
            # Another run published it between our look and our lock: look again.
            writer.close()
            self._writers.discard(writer)
            yield from self._iter_shard(first, last, pool, busy)
            return
        shard = OpenShard(writer, older)
        if older is not None:
            self._records.keep(older)
        step = self._recipe.batch_size
        for start in range(first, last, step):
            numbers = range(start, min(start + step, last))
            yield Group(shard, numbers, last=numbers.stop == last)

    def _published(self, place: File) -> Shard | None:
        shard = Shard.published(place)
        if shard is not None:
            self._recipe.require_equal(
                shard.index.recipe, place, "write to another folder, or delete the shards in this one"
            )
        return shard

    def _is_current(self, index: ShardIndex, pool: ThreadPoolExecutor) -> bool:
        """Whether the rows of a published shard are unchanged."""
        if self.settings.retry_skipped and index.skipped:
            return False
        if self.settings.trust_published:
            return True
        known: dict[int, list[str | None]] = {number: [] for number in range(index.start, index.stop)}
        for one in index.accounts:
            known[one.row].append(one.key)
        return all(pool.map(lambda number: self._keys(number) == known[number], known))

    def _keys(self, number: int) -> list[str | None]:
        try:
            return [self._recipe.key(row) for row in self.settings.variants.of(self.source.read(number))]
        except RowError:
            return [None]

    def _read(self, group: Group) -> None:
        """Read rows, and find records of the same keys."""
        for number in group.numbers:
            try:
                rows = self.settings.variants.of(self.source.read(number))
            except RowError as error:
                group.rows.append(self._skipped(error, number))
                continue
            group.rows += [self._found(row, group.shard.older) or Fresh(row) for row in rows]

    def _found(self, row: Row, older: Shard | None) -> Reused | None:
        key = self._recipe.key(row)
        if older and (entry := older.by_key.get(key)):
            return Reused(_renamed(entry, row), older.verified_record(entry), older.pictures_jpeg(entry))
        if (found := self._records.find(key)) is None:
            return None
        entry, record, pictures = found
        return Reused(_renamed(entry, row), record, pictures)

    def _merge(self, work: Work) -> tuple[Work, Sequence[Row]]:
        """The rows to encode: of several with one content, the first."""
        rows: list[Row] = []
        if isinstance(work, Group):
            keys = work.shard.keys
            for position, one in enumerate(work.rows):
                match one:
                    case Fresh(row) if (key := self._recipe.key(row)) in keys:
                        work.rows[position] = Duplicate(row)
                    case Fresh(row):
                        keys.add(key)
                        rows.append(row)
        return work, rows

    def _record(self, encoded: tuple[Work, list[Sample | RowError]]) -> Work:
        work, samples = encoded
        if isinstance(work, Group):
            fresh = [(position, one.row) for position, one in enumerate(work.rows) if isinstance(one, Fresh)]
            for (position, row), sample in zip(fresh, samples, strict=True):
                work.rows[position] = self._outcome(row, sample)
        return work

    def _outcome(self, row: Row, sample: Sample | RowError) -> Encoded | Skipped:
        if isinstance(sample, RowError):
            return self._skipped(sample, row.index, self._recipe.key(row), row.variant)
        return Encoded(Entry.of(sample, row), encode(sample, self._recipe.digest), sample.pictures)

    def _write(self, group: Group) -> None:
        """Append to the tar, in the order of rows."""
        shard = group.shard
        for position, one in enumerate(group.rows):
            match one:
                case Encoded(entry, record, pictures) | Reused(entry, record, pictures):
                    shard.writer.add(entry, record, pictures)
                    shard.entries[entry.key] = entry
                case Duplicate(row) if (first := shard.entries.get(self._recipe.key(row))) is not None:
                    shard.writer.add(_renamed(first, row), b"")
                case Duplicate(row):
                    group.rows[position] = skipped = self._skipped_again(shard, row)
                    shard.writer.skip(skipped)
                case Skipped():
                    shard.writer.skip(one)
                case Fresh():
                    raise AssertionError("a row was not encoded")

    def _skipped_again(self, shard: OpenShard, row: Row) -> Skipped:
        """A row with the content of an earlier one, which was skipped."""
        key = self._recipe.key(row)
        reason = next(gone.reason for gone in shard.writer.skipped if gone.key == key)
        return Skipped(row.index, row.name, reason, key, row.source, row.variant)

    def _publish(self, group: Group) -> None:
        if not group.last:
            return
        shard = group.shard
        group.index = shard.writer.publish()
        self._writers.discard(shard.writer)
        shard.writer.close()
        self._records.add(group.index, shard.writer.index_file)

    def _skipped(self, error: RowError, number: int, key: str | None = None, variant: int = 0) -> Skipped:
        name, part = self.source.name(number), source_name(self.source, number)
        if self.settings.on_error == "stop":
            raise _located(error, number, name) from error
        return Skipped(number, name, error.what, key, part, variant)


def _rows_in(work: Work) -> int:
    """The rows of a group. Work that only passes through counts as none: it would make every stage look fast."""
    return len(work.numbers) if isinstance(work, Group) else 0


def _count(report: Report, work: Work) -> None:
    """Enter work that has left the last stage in the report."""
    match work:
        case Waiting(shards):
            report.shards_busy = shards
        case Kept(rows, index):
            report.rows += rows
            report.shards_kept += 1
            report.reused += len(index.samples)
            report.skipped += index.skipped
        case Group():
            report.rows += len(work.numbers)
            for one in work.rows:
                _count_row(report, one)
            if work.index is not None:
                report.shards_written += 1
                report.bytes_written += work.index.filesize


def _count_row(report: Report, one: Fresh | RowOutcome) -> None:
    match one:
        case Encoded(entry):
            report.encoded += 1
            report.clipped += entry.clipped
            report.notes.update(entry.notes)
            if entry.pair and entry.pair.warning:
                report.notes[f"{PAIR_WARNINGS[entry.pair.warning]}: qie-stats names the rows"] += 1
        case Reused() | Duplicate():
            report.reused += 1
        case Skipped():
            report.skipped.append(one)


def _renamed(entry: Entry, row: Row) -> Entry:
    """The entry of another row with the same content."""
    return replace(entry, row=row.index, name=row.name, source=row.source, variant=row.variant, inputs=row_inputs(row))


def _located(error: RowError, number: int, name: str) -> RowError:
    """The error of a row that ends a run, with the row's number and name."""
    where = f"row {number} ({name})" + (f", {error.where}" if error.where and error.where != name else "")
    return RowError(
        error.what,
        where=where,
        expected=error.expected,
        found=error.found,
        hint=error.hint or "to skip such rows, use --on-error skip",
    )
