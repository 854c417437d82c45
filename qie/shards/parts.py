"""From index files to what is read from: by a folder's compacted index where it is right, else one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import TypeVar

from qie.errors import ShardError
from qie.recipe import Recipe
from qie.shards.cache import ShardCache
from qie.shards.compact import COMPACT_NAME, Compact, CompactShard, read_compact
from qie.shards.index import Skipped
from qie.shards.reader import Shard, Tar
from qie.shards.storage import published, rows_of
from qie.shards.table import Table
from qie.stores import File, Folder, StoreError

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Part:
    """Shards of one recipe. `table` numbers them as they stand in `tars`."""

    recipe: Recipe
    tars: tuple[Tar, ...]
    table: Table
    skipped: tuple[Skipped, ...]


Blame = Callable[[File, ShardError], object]
"""Told of an index that cannot be used, and why."""


def open_parts(indexes: Sequence[File], cache: ShardCache | None = None, blame: Blame | None = None) -> Iterator[Part]:
    """All shards of `indexes`, in their order; with `blame`, which is told of the others, those that can be opened.

    Raises:
        ShardError: an index is damaged, or a tar is missing or of another size than its index says.
    """
    for _, files in groupby(indexes, key=lambda index: index.folder.url):
        group = list(files)
        compact = _blamed(blame, File(group[0].folder, COMPACT_NAME), partial(_current, group[0].folder))
        for compacted, run in groupby(group, key=lambda index: compact is not None and index.stem in compact[1]):
            if compacted:
                assert compact is not None
                yield _from_compact(*compact, list(run), cache)
            else:
                for index in run:
                    if part := _blamed(blame, index, partial(_from_index, index, cache)):
                        yield part


def _blamed(blame: Blame | None, index: File, opened: Callable[[], T]) -> T | None:
    try:
        return opened()
    except ShardError as error:
        if blame is None:
            raise
        blame(index, error)
        return None


def compacted(folder: Folder) -> Compact:
    """What the indexes of a folder say, as its compacted index holds it.

    Raises:
        ShardError: the folder holds no shards, or one of them is damaged, of another recipe, or of another's rows.
    """
    stamps = folder.stamps()
    indexes = [index for index in published(folder) if index.name in stamps]  # others came just now
    require_disjoint(indexes)
    shards = [Shard(index) for index in indexes]
    if not shards:
        raise ShardError("no shards found", where=folder)
    recipe = shards[0].index.recipe
    for shard in shards:
        recipe.require_equal(shard.index.recipe, shard.file, "shards of two recipes belong into two folders")
    return Compact(
        recipe,
        tuple(
            CompactShard(
                stem=file.stem,
                filesize=shard.index.filesize,
                sha256=shard.index.sha256,
                stamp=stamps[file.name],
                skipped=shard.index.skipped,
            )
            for file, shard in zip(indexes, shards, strict=True)
        ),
        Table.joined([Table.of(shard.index, shard.file) for shard in shards]),
    )


def require_disjoint(files: Sequence[File]) -> None:
    """Raise ShardError when two shards of one folder hold the same rows."""
    for first, second in pairwise(sorted(files, key=lambda file: (file.folder.url, rows_of(file)))):
        if first.folder.url == second.folder.url and rows_of(second)[0] < rows_of(first)[1]:
            raise ShardError(
                "two shards hold the same rows",
                where=second,
                found=f"rows [{rows_of(second)[0]}, {rows_of(first)[1]}) are in {first.name}, too",
                hint="delete one of the two with its index; qie-precompute writes what is then missing",
            )


def _current(folder: Folder) -> tuple[Compact, dict[str, int]] | None:
    """A folder's compacted index, and the numbers in it of the shards that are still what they were, by stem."""
    try:
        stamps = folder.stamps()
    except StoreError:  # a web server lists nothing, so nothing could be compared
        return None
    compact = read_compact(folder) if COMPACT_NAME in stamps else None
    if compact is None:
        return None
    return compact, {
        shard.stem: number
        for number, shard in enumerate(compact.shards)
        if stamps.get(f"{shard.stem}.json") == shard.stamp
        and stamps.get(f"{shard.stem}.tar", "").partition(" ")[0] == str(shard.filesize)
    }


def _from_compact(compact: Compact, numbers: dict[str, int], indexes: list[File], cache: ShardCache | None) -> Part:
    chosen = [numbers[index.stem] for index in indexes]
    shards = [compact.shards[number] for number in chosen]
    tars = [
        Tar(index.with_suffix(".tar"), shard.filesize, shard.sha256, cache)
        for index, shard in zip(indexes, shards, strict=True)
    ]
    everything = chosen == list(range(len(compact.shards)))
    table = compact.table if everything else compact.table.of_shards(chosen)
    return Part(compact.recipe, tuple(tars), table, tuple(gone for shard in shards for gone in shard.skipped))


def _from_index(index: File, cache: ShardCache | None) -> Part:
    shard = Shard(index)
    tar = Tar(shard.file, shard.index.filesize, shard.index.sha256, cache)
    return Part(shard.index.recipe, (tar,), Table.of(shard.index, shard.file), shard.index.skipped)
