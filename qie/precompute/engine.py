"""The engine: shards of rows through overlapping stages, each shard published as soon as it is complete.

    items ─> read ─> merge ─> the encoder's stages ─> record ─> write ─> publish ─> report
             n threads         prepare, VAE, text                          tar, then index

Every stage has a thread of its own and a short queue before it. So the time is that of the slowest one, VAE and text
encoder work at once on different rows, and memory does not grow with the dataset.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

from qie.data.samples import RowEncoder
from qie.data.sources import Source, source_name
from qie.errors import RowError
from qie.precompute.ranges import Range, shard_ranges
from qie.precompute.report import Progress, Report
from qie.precompute.reuse import Records
from qie.precompute.work import Group, Item, Kept, OpenShard, Settings, Waiting, count, fresh_in, located, rows_in
from qie.shards.index import Entry, ShardIndex, Skipped, row_inputs, shard_stem
from qie.shards.reader import Shard
from qie.shards.record import encode
from qie.shards.storage import published, rows_of
from qie.shards.writer import ShardBusyError, ShardOverlapError, ShardWriter
from qie.stages import Pipeline, Stage
from qie.stores import File, Folder
from qie.threads import pause
from qie.types import Row, Sample

READERS = 8
DEPTH = 4
"""How many rows may wait before each stage: tens of megabytes each, before and behind the encoders."""

LOOK_AGAIN_S = 1.0
"""How often shards that another run is writing are looked at, once there is nothing else to do."""


class Engine:
    """Encodes shards of a source into a folder.

    Args:
        source, encoder: the rows, and what makes samples of them.
        output: where the shards go.
        settings: see `Settings`.
        progress: called with the report after each group of rows.
    """

    def __init__(
        self,
        source: Source,
        encoder: RowEncoder,
        output: Folder,
        settings: Settings,
        progress: Progress = lambda report: None,
    ) -> None:
        self.source, self.encoder, self.output, self.settings = source, encoder, output, settings
        self._recipe, self._progress = encoder.recipe, progress
        self._records = Records(output, settings.reuse, search_output=not settings.trust_published)
        self._writers: set[ShardWriter] = set()

    def run(self, shards: Iterable[Range]) -> Report:
        """Bring `shards` up to date, in their order.

        Raises:
            RowError: a row cannot be encoded and `on_error` is "stop".
            ShardError, StoreError: a shard cannot be read or written. What is published stays.
        """
        report, started = Report(), time.monotonic()
        pipeline = Pipeline(self._stages(), DEPTH)
        try:
            with ExitStack() as stack:
                pool = stack.enter_context(ThreadPoolExecutor(READERS, thread_name_prefix="qie-compare"))
                items = stack.enter_context(closing(pipeline.run(self._iter_items(shards, pool))))
                for item in items:
                    count(report, item)
                    report.loads, report.seconds = dict(pipeline.loads), time.monotonic() - started
                    self._progress(report)
        finally:
            for writer in self._writers:
                writer.close()
        report.loads, report.seconds, report.shards_busy = dict(pipeline.loads), time.monotonic() - started, 0
        return report

    def _stages(self) -> list[Stage]:
        def through(work: Callable[[Any], Any], group: Group) -> None:
            group.values = work(group.values) if group.values else []

        encoding = [(one.name, partial(through, one.work), one.workers, fresh_in) for one in self.encoder.stages]
        stages: list[tuple[str, Callable[[Group], None], int, Callable[[Item], int]]] = [
            ("read", self._read, READERS, rows_in),
            ("merge", self._merge, 1, rows_in),
            *encoding,
            ("record", self._record, 1, fresh_in),
            ("write", self._write, 1, rows_in),
            ("publish", self._publish, 1, rows_in),
        ]
        return [Stage(name, partial(_of_groups, work), workers, size) for name, work, workers, size in stages]

    def _iter_items(self, shards: Iterable[Range], pool: ThreadPoolExecutor) -> Iterator[Item]:
        """All shards; last, those that another run writes: it publishes them, or dies and leaves them to this one."""
        while True:
            busy: list[Range] = []
            for first, last in shards:
                yield from self._iter_shard(first, last, pool, busy)
            if not busy:
                return
            yield Waiting(len(busy))
            pause(LOOK_AGAIN_S)
            shards = busy

    def _iter_shard(self, first: int, last: int, pool: ThreadPoolExecutor, busy: list[Range]) -> Iterator[Item]:
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
            # Another run published it between our looking and our lock: look again.
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
        if place.size() is None:
            return None
        shard = Shard(place)
        self._recipe.require_equal(
            shard.index.recipe, place, "write to another folder, or delete the shards in this one"
        )
        return shard

    def _is_current(self, index: ShardIndex, pool: ThreadPoolExecutor) -> bool:
        """Whether the rows of a published shard are what they were."""
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
        """Read rows, and look for records of the same keys."""
        older = group.shard.older
        for number in group.numbers:
            try:
                rows = self.settings.variants.of(self.source.read(number))
            except RowError as error:
                group.done.append(self._skipped(error, number))
                continue
            for row in rows:
                key = self._recipe.key(row)
                if older and (entry := older.by_key.get(key)):
                    found: tuple[Entry, bytes] | None = (entry, older.verified_record(entry))
                else:
                    found = self._records.find(key)
                group.done.append(row if found is None else (_renamed(found[0], row), found[1]))

    def _merge(self, group: Group) -> None:
        """Encode only the first of rows with one content."""
        for position, row in enumerate(group.done):
            if isinstance(row, Row) and (key := self._recipe.key(row)) not in group.shard.seen:
                group.shard.seen.add(key)
                group.fresh.append(row)
                group.done[position] = None
        group.values = list(group.fresh)

    def _record(self, group: Group) -> None:
        def recorded(row: Row, sample: Sample | RowError) -> tuple[Entry, bytes] | Skipped:
            if isinstance(sample, RowError):
                return self._skipped(sample, row.index, self._recipe.key(row), row.variant)
            return Entry.of(sample, row), encode(sample, self._recipe.digest)

        group.values = [recorded(row, sample) for row, sample in zip(group.fresh, group.values, strict=True)]

    def _write(self, group: Group) -> None:
        """Append to the tar, in the order of rows."""
        shard, values = group.shard, iter(group.values)
        for position, done in enumerate(group.done):
            result = next(values) if done is None else done
            if isinstance(result, Row):
                result = self._repeated(shard, result)
            if isinstance(result, Skipped):
                shard.writer.skip(result)
            else:
                entry, record = result
                shard.writer.add(entry, record)
                shard.entries[entry.key] = entry
            group.done[position] = result

    def _repeated(self, shard: OpenShard, row: Row) -> tuple[Entry, bytes] | Skipped:
        """A row whose content an earlier one of its shard had."""
        key = self._recipe.key(row)
        entry = shard.entries.get(key)
        if entry is None:
            reason = next(gone.reason for gone in shard.writer.skipped if gone.key == key)
            return Skipped(row.index, row.name, reason, key, row.source, row.variant)
        return _renamed(entry, row), b""

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
            raise located(error, number, name) from error
        return Skipped(number, name, error.what, key, part, variant)


def _of_groups(work: Callable[[Group], None], item: Item) -> Item:
    if isinstance(item, Group):
        work(item)
    return item


def _renamed(entry: Entry, row: Row) -> Entry:
    """The entry of another row with the same content."""
    return replace(entry, row=row.index, name=row.name, source=row.source, variant=row.variant, inputs=row_inputs(row))
