"""Precompute on this machine: in this process, or in one process for each set of devices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from qie.data.samples import RowEncoder
from qie.data.sources import Source
from qie.errors import UsageError
from qie.precompute.engine import Engine
from qie.precompute.ranges import Range, shard_ranges
from qie.precompute.report import Progress, Report
from qie.precompute.work import Settings
from qie.precompute.workers import Opener, run_workers
from qie.recipe import Recipe
from qie.shards.index import read_index
from qie.shards.shard_set import require_disjoint
from qie.shards.storage import published, rows_of
from qie.shards.writer import remove_abandoned
from qie.stores import File, Folder, LocalFolder, open_folder


def precompute(
    source: Source,
    encoder: RowEncoder,
    output: Folder | str | Path,
    *,
    rows: Range,
    shard_size: int = 64,
    settings: Settings | None = None,
    workers: Sequence[Opener] = (),
    progress: Progress = lambda report: None,
) -> Report:
    """Bring the shards of `rows` in `output` up to date with `source`.

    A published shard whose rows still have their keys is left alone. One of which rows changed is written again, with
    the records of the other rows copied. What is published is complete, so a run that was killed goes on where it was.

    Args:
        source, encoder: the rows, and what makes samples of them.
        output: a folder, by path or URL.
        rows: the half-open range of rows.
        shard_size: rows per shard, on a grid that starts at row 0.
        settings: see `Settings`.
        workers: open source and encoder again in processes of their own, which do the work; none for this process.
        progress: called with the report as it grows.

    Raises:
        RecipeMismatchError: the output holds shards of another recipe.
        RowError: a row cannot be encoded and `on_error` is "stop".
        ShardError, StoreError: a shard cannot be read or written, or, in a store without locks, another run has
            published some of the same rows meanwhile. What is published stays.
    """
    output = open_folder(output)
    settings = settings or Settings()
    shards = plan_shards(output, encoder.recipe, rows, shard_size, len(source))
    if workers:
        report = run_workers(workers, partial(_engine, output, settings, encoder.recipe), shards, progress)
    else:
        report = Engine(source, encoder, output, settings, progress).run(shards)
    require_disjoint((index, rows_of(index)) for index in published(output))
    return report


def plan_shards(output: Folder, recipe: Recipe, rows: Range, shard_size: int, source_rows: int) -> list[Range]:
    """The shards of a run, and the output ready for them: what killed runs left is removed.

    Of the shards that are there one is opened, to see that its recipe is ours; the others are when they are worked on.
    """
    _make(output)
    there = check_output(output, recipe, source_rows)
    remove_abandoned(output, rows)
    return shard_ranges(*rows, shard_size, map(rows_of, there))


def check_output(output: Folder, recipe: Recipe, source_rows: int) -> list[File]:
    """The shards that are there, known to be of our recipe by one of them, and of rows that the source has.

    Raises:
        RecipeMismatchError: the output holds shards of another recipe.
        ShardError: two of them hold the same rows.
        UsageError: it holds rows that the source no longer has.
    """
    there = published(output)
    require_disjoint((index, rows_of(index)) for index in there)
    if there:
        recipe.require_equal(
            read_index(there[0]).recipe, there[0], "write to another folder, or delete the shards in this one"
        )
        if rows_of(there[-1])[1] > source_rows:
            raise UsageError(
                "the output holds rows that the source no longer has",
                where=there[-1],
                expected=f"rows below {source_rows}",
                hint="write to another folder, or delete this shard and its index",
            )
    return there


def _engine(
    output: Folder, settings: Settings, recipe: Recipe, source: Source, encoder: RowEncoder, progress: Progress
) -> Engine:
    recipe.require_equal(encoder.recipe, "a worker", "name devices of one kind, or set cache.compute_dtype")
    return Engine(source, encoder, output, settings, progress)


def _make(output: Folder) -> None:
    if not isinstance(output, LocalFolder):
        return
    try:
        output.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            "the output is no folder and cannot be made one",
            where=output,
            found=error.strerror,
            hint="correct --output, or cache.cache_dir",
        ) from error
