"""Resharding: shards merged, split, filtered or moved to another store, without encoding or decoding.

Records are copied byte for byte, each checked against its hash, through the shard writer. Rows keep their numbers, so
the new files are those that qie-precompute writes with that shard size. A row that a filter leaves out becomes a
skipped row with its reason: the counts still add up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice, pairwise, takewhile

from qie.errors import ShardError, UsageError
from qie.recipe import Recipe
from qie.shards.discovery import published, rows_of
from qie.shards.grid import SHARD_ROWS, Range, merged_ranges, shard_ranges
from qie.shards.index import Entry, Skipped, member_name, pictures_name, read_index, shard_stem
from qie.shards.reader import Shard
from qie.shards.writer import ShardWriter
from qie.stores import File, Folder, LocalFolder

_One = Entry | Skipped
Account = tuple[Shard, _One]
"""The entry of a row's variant, or its skipped row, under its new number, with its shard."""

_OPEN_SHARDS = 8


@dataclass(frozen=True)
class SampleChoice:
    """Which rows and samples are copied; by default all.

    Attributes:
        rows: [start, stop), by their new numbers; other rows are not in the new shards at all.
        source: name of the source whose samples are copied; the others' become skipped rows.
        dropped: keys of samples that become skipped rows.
    """

    rows: Range | None = None
    source: str | None = None
    dropped: frozenset[str] = frozenset()

    def applied(self, one: _One) -> _One:
        """An account as it is copied."""
        if isinstance(one, Skipped):
            return one
        reason = None
        if self.source is not None and one.source != self.source:
            reason = f"left out: its source is not {self.source}"
        elif one.key in self.dropped:
            reason = "left out: its key was to be dropped"
        return one if reason is None else Skipped(one.row, one.name, reason, one.key, one.source, one.variant)


EVERYTHING = SampleChoice()


@dataclass
class Resharded:
    """The outcome of resharding.

    Attributes:
        shards, present: all shards of the output, and those that a run before had written.
        samples, skipped: variants of rows in them, and those that were skipped before.
        left_out: variants of rows that the choice left out.
        dropped: keys to drop that were found.
    """

    shards: int = 0
    present: int = 0
    samples: int = 0
    skipped: int = 0
    left_out: int = 0
    dropped: set[str] = field(default_factory=set)

    def count(self, before: Sequence[_One], after: Sequence[_One], dropped: frozenset[str]) -> None:
        """Count the accounts of a shard before and after the choice."""
        samples = sum(isinstance(one, Entry) for one in after)
        skipped = sum(isinstance(one, Skipped) for one in before)
        self.samples, self.skipped = self.samples + samples, self.skipped + skipped
        self.left_out += len(after) - samples - skipped
        self.dropped |= {one.key for one in before if one.key in dropped}


@dataclass(frozen=True)
class _Origin:
    """A shard to copy from; its rows' numbers grow by `shift`."""

    index: File
    shift: int = 0

    @property
    def rows(self) -> Range:
        start, stop = rows_of(self.index)
        return start + self.shift, stop + self.shift


def reshard(
    places: Sequence[Sequence[File]],
    output: Folder,
    *,
    shard_size: int = SHARD_ROWS,
    choice: SampleChoice = EVERYTHING,
    renumber: bool = False,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Resharded:
    """Copy shards into `output`, cut on a grid of `shard_size` rows. Finished shards of a run before stay.

    Args:
        places: the index files of each place, see `qie.shards.discovery.find_indexes`.
        output: another folder than those, empty or written to by the same call before.
        choice: which rows and samples are copied.
        renumber: let the rows of each place continue the numbers of the place before: for places of different sources.
        progress: called with the shards done and their total.

    Raises:
        UsageError: two places hold the same rows, there is no row to copy, or `output` holds other shards.
        RecipeMismatchError: the shards are of several recipes, or those in `output` of another one.
        ShardError, StoreError: a shard is damaged or busy, or a store refuses. Published shards stay.
    """
    origins = _placed(places, renumber)
    recipe = _common_recipe(origins)
    ranges = list(_ranges(origins, shard_size, choice.rows))
    _require_apart(output, origins)
    require_own(output, ranges)
    report, opened = Resharded(), lru_cache(_OPEN_SHARDS)(Shard)
    for rows in ranges:
        accounts = list(_accounts(origins, rows, opened))
        chosen = [(shard, choice.applied(one)) for shard, one in accounts]
        report.count([one for _, one in accounts], [one for _, one in chosen], choice.dropped)
        if _is_there(output, rows, recipe, chosen):
            report.present += 1
        else:
            _write(output, rows, recipe, chosen)
        report.shards += 1
        progress(report.shards, len(ranges))
    return report


def require_own(output: Folder, ranges: Collection[Range]) -> None:
    """Raise UsageError when a folder holds shards of other rows than `ranges`: they would overlap or mix."""
    own = set(ranges)
    foreign = [index for index in published(output) if rows_of(index) not in own]
    if foreign:
        raise UsageError(
            "the output holds other shards",
            where=foreign[0],
            found=f"{len(foreign)} shards that are not among those to be written",
            hint="name an empty folder",
        )


def _require_apart(output: Folder, origins: Iterable[_Origin]) -> None:
    if _root(output) in {_root(origin.index.folder) for origin in origins}:
        raise UsageError(
            "shards cannot be resharded into their own folder", where=output.url, hint="name another output"
        )


def _root(folder: Folder) -> str:
    """One name for a folder, however it is written."""
    return str(folder.root.resolve()) if isinstance(folder, LocalFolder) else folder.url


def _placed(places: Iterable[Sequence[File]], renumber: bool) -> list[_Origin]:
    """All shards in the order of their new rows."""
    origins: list[_Origin] = []
    for indexes in places:
        end = max((origin.rows[1] for origin in origins), default=0)
        first = min(rows_of(index)[0] for index in indexes)
        origins += [_Origin(index, end - first if renumber else 0) for index in indexes]
    origins.sort(key=lambda origin: origin.rows)
    for one, other in pairwise(origins):
        if other.rows[0] < one.rows[1]:
            raise UsageError(
                "two shards hold the same rows",
                where=other.index,
                found=f"rows [{other.rows[0]}, {min(one.rows[1], other.rows[1])}) are in {one.index}, too",
                hint="if they are rows of different sources, renumber them (--renumber)",
            )
    return origins


def _common_recipe(origins: Sequence[_Origin]) -> Recipe:
    with ThreadPoolExecutor() as pool:
        recipes = pool.map(lambda origin: read_index(origin.index).recipe, origins)
        recipe = next(recipes)
        for origin, other in zip(origins[1:], recipes, strict=True):
            recipe.require_equal(other, origin.index, f"copy one recipe at a time; {origins[0].index} differs")
    return recipe


def _ranges(origins: Iterable[_Origin], shard_size: int, chosen: Range | None) -> Iterator[Range]:
    """The shards to write: the covered rows, cut as qie-precompute does."""
    if shard_size < 1:
        raise UsageError("a shard holds at least one row", where="shard size", expected="≥ 1", found=shard_size)
    covered = merged_ranges(origin.rows for origin in origins)
    first, last = chosen or (covered[0][0], covered[-1][1])
    within = [(max(start, first), min(stop, last)) for start, stop in covered if start < last and stop > first]
    if first >= last or not within:
        raise UsageError("no such rows", expected=f"rows of {covered}", found=f"[{first}, {last})")
    for start, stop in within:
        yield from shard_ranges(start, stop, shard_size, ())


def _accounts(origins: Sequence[_Origin], rows: Range, opened: Callable[[File], Shard]) -> Iterator[Account]:
    """The accounts of rows [start, stop), in the order of rows and variants."""
    start, stop = rows
    first = bisect_right(origins, start, key=lambda origin: origin.rows[1])
    for origin in takewhile(lambda origin: origin.rows[0] < stop, islice(origins, first, None)):
        shard = opened(origin.index)
        for one in shard.index.accounts:
            if start <= one.row + origin.shift < stop:
                yield shard, replace(one, row=one.row + origin.shift)


def _is_there(output: Folder, rows: Range, recipe: Recipe, accounts: Sequence[Account]) -> bool:
    """Whether the shard is published with exactly this content. Raises RecipeMismatchError for another recipe."""
    file = File(output, f"{shard_stem(*rows)}.json")
    if file.size() is None:
        return False
    try:
        index = Shard(file).index
    except ShardError:  # half gone, or damaged: it is written again
        return False
    recipe.require_equal(index.recipe, file, "name an empty folder")
    hashes: dict[str, str] = {}
    pictures: dict[str, int] = {}
    for shard, one in accounts:
        if isinstance(one, Entry) and (name := member_name(one.key)) not in hashes:
            hashes[name] = shard.index.files[name].sha256
            if place := shard.index.pictures.get(pictures_name(one.key)):
                pictures[pictures_name(one.key)] = place.size
    same = index.accounts == [one for _, one in accounts]
    same = same and {name: place.size for name, place in index.pictures.items()} == pictures
    return same and {name: member.sha256 for name, member in index.files.items()} == hashes


def _write(output: Folder, rows: Range, recipe: Recipe, accounts: Iterable[Account]) -> None:
    with ShardWriter(output, *rows, recipe) as writer:
        for shard, one in accounts:
            if isinstance(one, Skipped):
                writer.skip(one)
            else:
                writer.add(one, shard.verified_record(one), shard.pictures_jpeg(one))
        writer.publish()
