"""What travels through the engine, and how it is counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from qie.data.variants import Variants
from qie.errors import RowError
from qie.precompute.report import Report
from qie.shards.index import Entry, ShardIndex, Skipped
from qie.shards.reader import Shard
from qie.shards.writer import ShardWriter
from qie.types import Row

OnError = Literal["skip", "stop"]


@dataclass(frozen=True)
class Settings:
    """How a run goes about its rows. None of it changes what is in a sample.

    Attributes:
        on_error: rows that cannot be encoded are skipped and listed, or stop the run.
        retry_skipped: shards with skipped rows are written again.
        trust_published: shards that are there are kept without comparing their rows with the source.
        reuse: shards of older runs, from which records are copied.
        variants: which variants of a row are stored.
    """

    on_error: OnError = "skip"
    retry_skipped: bool = False
    trust_published: bool = False
    reuse: tuple[str, ...] = ()
    variants: Variants = field(default_factory=Variants)


@dataclass(eq=False)
class OpenShard:
    """A shard that is being written: its writer, and its older self, if there is one."""

    writer: ShardWriter
    older: Shard | None
    seen: set[str] = field(default_factory=set)
    entries: dict[str, Entry] = field(default_factory=dict)


@dataclass(eq=False)
class Group:
    """Some rows of a shard on their way. What becomes of each of their variants stands in `done`, in order.

    Attributes:
        numbers: which rows; the last of a shard's groups is `last`.
        done: an entry with its record; a skipped row; a row with the content of an earlier one of this shard; or None
            for one that is being encoded: the next one of `values`.
        values: what the encoder's stages make of the rows that are encoded.
    """

    shard: OpenShard
    numbers: range
    last: bool
    done: list[tuple[Entry, bytes] | Skipped | Row | None] = field(default_factory=list)
    fresh: list[Row] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    index: ShardIndex | None = None


@dataclass(frozen=True)
class Kept:
    """A shard that is left as it is."""

    rows: int
    index: ShardIndex


@dataclass(frozen=True)
class Waiting:
    """Nothing is left to do but shards that another run is writing."""

    shards: int


Item = Group | Kept | Waiting


def rows_in(item: Item) -> int:
    """The rows of a group. What passes through without work counts as none: it would make every stage look fast."""
    return len(item.numbers) if isinstance(item, Group) else 0


def fresh_in(item: Item) -> int:
    """The samples of a group that are encoded."""
    return len(item.fresh) if isinstance(item, Group) else 0


def count(report: Report, item: Item) -> None:
    """Enter an item that left the last stage in the report."""
    if isinstance(item, Waiting):
        report.shards_busy = item.shards
        return
    if isinstance(item, Kept):
        report.rows += item.rows
        report.shards_kept += 1
        report.reused += len(item.index.samples)
        report.skipped += item.index.skipped
        return
    report.rows += len(item.numbers)
    skipped = [done for done in item.done if isinstance(done, Skipped)]
    encoded = sum(not isinstance(value, Skipped) for value in item.values)
    report.skipped += skipped
    report.encoded += encoded
    report.reused += len(item.done) - len(skipped) - encoded
    report.clipped += sum(value[0].clipped for value in item.values if not isinstance(value, Skipped))
    if item.index is not None:
        report.shards_written += 1
        report.bytes_written += item.index.filesize


def located(error: RowError, number: int, name: str) -> RowError:
    """The error of a row that ends a run, with the row's number and name."""
    where = f"row {number} ({name})" + (f", {error.where}" if error.where and error.where != name else "")
    return RowError(
        error.what,
        where=where,
        expected=error.expected,
        found=error.found,
        hint=error.hint or "--on-error skip goes on",
    )
