"""From index files to what is read from: by a folder's compacted index where it is right, else one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import TypeVar

from qie.errors import ShardError
from qie.recipe import Recipe
from qie.shards.cache import ShardCache
from qie.shards.compact import COMPACT_NAME, Compact, CompactShard, ManifestFolder, read_compact
from qie.shards.index import Skipped
from qie.shards.reader import Shard, Tar
from qie.shards.storage import indexes_in
from qie.shards.table import Table
from qie.stores import File, Folder, StoreError

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Part:
    """Shards of one recipe, and the rows [start, stop) of each. `table` numbers them as they stand in `tars`."""

    recipe: Recipe
    tars: tuple[Tar, ...]
    rows: tuple[tuple[int, int], ...]
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
        compact = _blamed(blame, File(group[0].folder, COMPACT_NAME), partial(current_compact, group[0].folder))
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
    indexes = [index for index in indexes_in(folder) if index.name in stamps]  # others came just now
    shards = [Shard(index) for index in indexes]
    require_disjoint([(shard.file, shard.index.rows) for shard in shards])
    if not shards:
        raise ShardError("no shards found", where=folder)
    recipe = shards[0].index.recipe
    for shard in shards:
        recipe.require_equal(shard.index.recipe, shard.file, "shards of two recipes belong into two folders")
    return Compact(
        recipe,
        tuple(
            CompactShard.of(file.stem, shard.index, stamps[file.name])
            for file, shard in zip(indexes, shards, strict=True)
        ),
        Table.joined([Table.of(shard.index, shard.file) for shard in shards]),
    )


def require_disjoint(shards: Iterable[tuple[File, tuple[int, int]]]) -> None:
    """Raise ShardError when two shards of one folder, given by a file of each and its rows, hold the same rows."""
    for (first, mine), (second, theirs) in pairwise(sorted(shards, key=lambda one: (one[0].folder.url, one[1]))):
        if first.folder.url == second.folder.url and theirs[0] < mine[1]:
            raise ShardError(
                "two shards hold the same rows",
                where=second,
                found=f"rows [{theirs[0]}, {mine[1]}) are in {first.name}, too",
                hint="delete one of the two with its index; qie-precompute writes what is then missing",
            )


def current_compact(folder: Folder) -> tuple[Compact, dict[str, int]] | None:
    """A folder's compacted index, and the numbers in it of the shards that are still what they were, by stem.

    None without one. A web server lists nothing to compare it with: there it counts where shards were found by it, and
    only there.

    Raises:
        ShardError: it is damaged.
    """
    if isinstance(folder, ManifestFolder):
        return folder.compact, {shard.stem: number for number, shard in enumerate(folder.compact.shards)}
    try:
        stamps = folder.stamps()
    except StoreError:
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
    skipped = tuple(gone for shard in shards for gone in shard.skipped)
    return Part(compact.recipe, tuple(tars), tuple(shard.rows for shard in shards), table, skipped)


def _from_index(index: File, cache: ShardCache | None) -> Part:
    shard = Shard(index)
    return part_of(shard, Tar(shard.file, shard.index.filesize, shard.index.sha256, cache))


def part_of(shard: Shard, tar: Tar) -> Part:
    """One shard by its own index, read through `tar`. Raises ShardError when sizes in the index do not fit."""
    index = shard.index
    return Part(index.recipe, (tar,), (index.rows,), Table.of(index, shard.file), index.skipped)
