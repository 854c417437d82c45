"""Many shards of one recipe as one sequence of samples, ready to be planned and read a million at a time.

A folder's shards are opened by its compacted index where that is right, else by the index of each.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar, overload

import numpy as np
import xxhash
from numpy.typing import NDArray

from qie.errors import QieError, ShardError, UsageError
from qie.quantities import human_count
from qie.recipe import Recipe
from qie.shards.cache import ShardCache
from qie.shards.compact_index import COMPACT_NAME, Compact, CompactShard, ManifestFolder, read_compact, write_compact
from qie.shards.discovery import find_indexes, index_names, rows_of
from qie.shards.excluded import excluded_keys
from qie.shards.grid import Range, missing_rows, overlapping
from qie.shards.hashes import NONE, missed
from qie.shards.index import Entry, Skipped
from qie.shards.reader import Shard, Tar, checked_sample
from qie.shards.sample_table import Columns, GrowingTable, Table
from qie.stages import Pipeline, Stage
from qie.stores import File, Folder, StoreError, is_glob, open_folder
from qie.types import Facts, Sample

T = TypeVar("T")

Verify = Literal["off", "first", "always"]

READ_AT_ONCE = 16
"""Indexes that are asked of a store at once."""


@dataclass(frozen=True, eq=False)
class OpenShards:
    """Shards of one recipe in one folder.

    Attributes:
        tars: of the shards; made when they are asked for where there are many.
        rows: [shards, 2]: [start, stop) of each.
        table: their samples.
        skipped: rows that are not among them.
        compact: whose table it is, which is looked at when it is used; None of a table that is sound.
    """

    recipe: Recipe
    tars: Sequence[Tar]
    rows: NDArray[np.int64]
    table: Table
    skipped: Callable[[], Iterable[Skipped]]
    compact: Compact | None = None


Blame = Callable[[File, ShardError], object]
"""Told of an index that cannot be used, and why."""


class ShardSet:
    """Samples by position, in the order of shards and rows.

    Attributes:
        recipe: of all shards.
        table: what their indexes say of the samples.
        verify: when a record's hash is checked: never, when it is first read, or always. Its header is checked in any
            case.
        both_hashes: whether its SHA-256 is then checked, too, where the index has a faster hash.

    Raises:
        RecipeMismatchError: the shards are of several recipes; says which and how they differ.
        ShardError: two shards claim the same row, or there is no sample at all.
    """

    def __init__(self, parts: Iterable[OpenShards], verify: Verify = "first", *, both_hashes: bool = False) -> None:
        parts = list(parts)
        if len(parts) > 1:
            _require_parts_disjoint(parts)
        filled = [part for part in parts if len(part.table)]
        if not filled:
            raise ShardError("the shards hold no samples", hint="see their skipped rows with qie-stats")
        self.recipe: Recipe = filled[0].recipe
        self.table = filled[0].table
        self.verify: Verify = verify
        self.both_hashes = both_hashes
        self._parts: list[OpenShards] = []
        self._tars = _Chain()
        self._seen = bytearray()  # a bit for each sample
        self._growing: GrowingTable | None = None
        self._last_shard: Shard | None = None
        self.append(parts)

    def append(self, parts: Iterable[OpenShards]) -> None:
        """Take in further shards, of rows behind all others in their folder: costs what these hold, not what is there.

        Other threads may read meanwhile. What was checked is not checked again.
        """
        parts = list(parts)
        filled = [part for part in parts if len(part.table)]
        for part in filled:
            first = self._tars[0] if len(self._tars) else filled[0].tars[0]
            self.recipe.require_equal(
                part.recipe, part.tars[0].file, f"train on one recipe at a time; {first.file} differs"
            )
        self._parts += parts
        for part in filled:
            self._tars.append(part.tars)
        tables = [part.table for part in filled]
        if self._growing is None:
            self._growing = GrowingTable(Table.joined(tables))
        elif tables:
            self._growing.append(tables)
        self._seen += bytes(len(self._growing.table) // 8 + 1 - len(self._seen))
        self.table = self._growing.table
        # Computed when first asked for:
        for known in ("keys", "entries", "distant", "copies", "columns", "skipped", "digest"):
            self.__dict__.pop(known, None)

    @classmethod
    def open(
        cls,
        places: str | Path | Iterable[str | Path] = (),
        *,
        index: str | Path | None = None,
        verify: Verify = "first",
        cache: ShardCache | None = None,
    ) -> ShardSet:
        """The shards in one or several folders, globs or brace patterns.

        Args:
            places: paths or URLs.
            index: a compacted index that is taken at its word: nothing is listed or compared. Its shards lie beside it,
                or in the one folder of `places`.
            verify: see `ShardSet`.
            cache: where remote shards are kept on the local disk; without one, each sample is a request.
        """
        if index is not None:
            return cls([open_named(index, places, cache)], verify)
        return cls(open_shards(find_indexes(places), cache), verify)

    def __len__(self) -> int:
        return len(self.table)

    def __repr__(self) -> str:
        folders = list(dict.fromkeys(str(part.tars[0].file.folder) for part in self._parts if len(part.tars)))
        places = ", ".join(folders[:3]) + (f" and {len(folders) - 3} more" if len(folders) > 3 else "")
        recipe = f"{self.recipe.family}, recipe {self.recipe.digest}"
        samples, shards = human_count(len(self), "sample"), human_count(len(self._tars), "shard")
        return f"<ShardSet of {samples} in {shards}, {recipe}, {places}>"

    @cached_property
    def columns(self) -> Columns:
        """What a plan needs. Raises ShardError when it is damaged."""
        for compact in self._compacts:
            compact.require_planned()
        return replace(self.table.columns, latent_scale=self.recipe.latent_scale)

    @property
    def _compacts(self) -> list[Compact]:
        return [part.compact for part in self._parts if part.compact]

    @cached_property
    def skipped(self) -> list[Skipped]:
        """Rows that are not among the samples."""
        return [gone for part in self._parts for gone in part.skipped()]

    @cached_property
    def excluded(self) -> frozenset[bytes]:
        """Keys on the exclude lists beside the shards, as they were when this was first asked for."""
        folders = {part.tars[0].file.folder.url: part.tars[0].file.folder for part in self._parts if len(part.tars)}
        return excluded_keys(folders.values())

    @property
    def digests(self) -> NDArray[np.uint8]:
        """[N, 32]: the keys."""
        return self.table.keys

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the keys."""
        if len(self._compacts) == 1 and len(self._compacts[0].table) == len(self):
            return self._compacts[0].digest
        return hashlib.sha256(np.ascontiguousarray(self.table.keys).data).hexdigest()

    @property
    def masked(self) -> bool:
        """Whether a sample has a loss mask."""
        return bool(self.table.masked.any())

    @property
    def paired(self) -> NDArray[np.bool_]:
        """[N]: whether a sample has a rejected target."""
        return self.table.paired

    @cached_property
    def distant(self) -> bool:
        """Whether samples are requests to a store, which wait more than they work."""
        return any(tars[0].distant for tars in self._tars.parts)

    @cached_property
    def copies(self) -> ShardCache | None:
        """Where shards are copied to from a store; None if all are read where they are."""
        return next((tars[0].cache for tars in self._tars.parts if tars[0].copied), None)

    def copied_tar(self, position: int) -> Tar | None:
        """The tar that is copied from a store for the sample at a position; None if it is read where it is, or if what
        the index says of it is damaged: who reads the sample meets that."""
        try:
            tar, _, _ = self._place(position)
        except ShardError:
            return None
        return tar if tar.copied else None

    @cached_property
    def keys(self) -> list[str]:
        return [self.table.key(position) for position in range(len(self))]

    def facts(self, position: int) -> Facts:
        """What its index says of a sample."""
        shape = self.table.shape(position)
        masked, paired = bool(self.table.masked[position]), bool(self.table.paired[position])
        return Facts(self.table.key(position), shape, int(self.table.tokens[position]), masked, paired)

    @cached_property
    def entries(self) -> list[Entry]:
        """What the indexes say, whole: read again, and large."""
        shards = [Shard(tar.file.with_suffix(".json")) for tar in self._tars]
        return [entry for shard in shards for entry in shard.index.samples]

    def load(self, position: int) -> Sample:
        """The sample at a position, 0 to len - 1, its record checked by `verify`, its header and sizes in any case.

        From a local disk it comes with its small pictures, if the shard has any. Elsewhere these are two more requests.

        Raises:
            ShardError: the record is damaged or another sample's; names shard, key and offset.
            StoreError: it cannot be fetched.
        """
        sample, tar = self._read(position, check=self.verify != "off"), self._tars[self.table.shard_of(position)]
        return sample if tar.path is None else replace(sample, pictures=self._pictures(tar.file, position))

    def fetch(self, position: int, *, own: bool = False) -> Sample:
        """The same, for training: with `verify="first"`, the record is checked the first time alone.

        `own` asks for a sample whose tensors' memory is its own: a copy, hashed while it is made.
        """
        seen = self._seen[position >> 3] >> (position & 7) & 1
        return self._read(position, check=self.verify == "always" or (self.verify == "first" and not seen), own=own)

    def _pictures(self, file: File, position: int) -> bytes | None:
        """The JPEG of a sample's pictures, which no table holds: the index of the last shard asked for is kept."""
        key = self.table.key(position)
        with suppress(QieError):  # of a sample that is sound they are no part
            shard = self._last_shard
            if shard is None or shard.file.path != file.path:
                shard = self._last_shard = Shard(file.with_suffix(".json"))
            return shard.pictures_jpeg(shard.by_key[key]) if key in shard.by_key else None
        return None

    def _read(self, position: int, *, check: bool, own: bool = False) -> Sample:
        try:
            sample = self._checked(position, check=check, own=own)
        except ShardError:
            for compact in self._compacts:
                compact.require_all()  # if it is at fault, the record is not
            raise
        self._seen[position >> 3] |= 1 << (position & 7)  # of two threads at once, one may be lost: it is checked again
        return sample

    def _checked(self, position: int, *, check: bool, own: bool) -> Sample:
        tar, start, stop = self._place(position)
        key, table = self.table.key(position), self.table
        where = f"{tar.name}, {key}, at {start}"
        record = self._record(position, tar, start, stop, where, check=check, own=own)
        sizes = table.sizes_of(position, self.recipe)
        return checked_sample(record, key, table.shape(position), where, sizes, own=own)

    def _place(self, position: int) -> tuple[Tar, int, int]:
        table, tar = self.table, self._tars[self.table.shard_of(position)]
        start, size = int(table.offsets[position]), int(table.sizes[position])
        if not (0 <= start < start + size <= tar.size):
            raise ShardError(
                "the index says that a record lies outside its shard",
                where=f"{tar.name}, {table.key(position)}",
                expected=f"within {tar.size} bytes",
                found=f"[{start}, {start + size})",
                hint="rebuild the compacted index with qie-stats --compact",
            )
        return tar, start, start + size

    def _record(
        self, position: int, tar: Tar, start: int, stop: int, where: str, *, check: bool, own: bool
    ) -> memoryview:
        sha256, xxh3 = (bytes(hashes[position]) for hashes in (self.table.hashes, self.table.xxh3_128))
        hashed = xxhash.xxh3_128() if own and check and xxh3 != NONE else None
        record = tar.read_own(start, stop, hashed and hashed.update) if own else tar.read(start, stop)
        if not check:
            return record
        lacking = missed(record, sha256, xxh3, both=self.both_hashes, found=hashed and hashed.digest())
        if lacking and tar.forget_copy():
            record = tar.read(start, stop)  # once more: the copy on this disk may be at fault
            lacking = missed(record, sha256, xxh3, both=self.both_hashes)
        if lacking:
            raise ShardError(
                "a record is damaged",
                where=where,
                expected=lacking,
                hint="copy the shard again, or delete it with its index and run qie-precompute again",
            )
        return record


def open_shards(
    indexes: Sequence[File], cache: ShardCache | None = None, blame: Blame | None = None
) -> Iterator[OpenShards]:
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
                    if part := _blamed(blame, index, partial(open_by_index, index, cache)):
                        yield part


def _blamed(blame: Blame | None, index: File, opened: Callable[[], T]) -> T | None:
    try:
        return opened()
    except ShardError as error:
        if blame is None:
            raise
        blame(index, error)
        return None


class Compacted(NamedTuple):
    """A compacted index that was written.

    Attributes:
        file: where.
        shards, samples: how many it tells of.
        missing: rows [start, stop) that no shard is of, though one is of later rows.
    """

    file: File
    shards: int
    samples: int
    missing: list[Range]


def compact_folder(
    folder: Folder,
    begin: Callable[[int, int], object] = lambda done, total: None,
    progress: Callable[[int], object] = lambda done: None,
) -> Compacted:
    """Write the compacted index of a folder, in memory that does not grow with the samples.

    Args:
        folder: of the shards.
        begin: told 0, and how many shards there are.
        progress: told how many were read.

    Raises:
        ShardError: the folder holds no shards, or one of them is damaged, of another recipe, or of another's rows.
    """
    # A listing of a store has all stamps; a disk is asked for each: those of two million files take half a gigabyte.
    stamps = None if folder.path(COMPACT_NAME) else folder.stamps()
    names = index_names(folder.names() if stamps is None else stamps)
    missing = missing_rows(_disjoint_rows(folder, names))
    begin(0, len(names))

    def looked_at(file: File) -> tuple[CompactShard, Table, Recipe] | None:
        stamp = folder.stamp(file.name) if stamps is None else stamps.get(file.name)
        if stamp is None:  # it came, or went, just now
            return None
        shard = Shard(file)
        return CompactShard.of(file.stem, shard.index, stamp), Table.of(shard.index, shard.file), shard.index.recipe

    stage = Stage("index", looked_at, workers=1 if stamps is None else READ_AT_ONCE)
    found = (one for one in Pipeline(stage).run(_taken(folder, names)) if one is not None)
    first = next(found, None)
    if first is None:
        raise ShardError("no shards found", where=folder)
    recipe = first[2]

    def parts() -> Iterator[tuple[list[CompactShard], Table]]:
        for number, (facts, table, theirs) in enumerate(chain([first], found), start=1):
            where = File(folder, f"{facts.stem}.tar")
            recipe.require_equal(theirs, where, "shards of two recipes belong into two folders")
            yield [facts], table
            progress(number)

    with closing(found):
        return Compacted(*write_compact(folder, recipe, parts()), missing)


def _taken(folder: Folder, names: list[str]) -> Iterator[File]:
    """Files by their names, which are taken from the list: of a million, the path of each would stay in memory."""
    names.reverse()
    while names:
        yield File(folder, names.pop())


def _disjoint_rows(folder: Folder, names: Sequence[str]) -> NDArray[np.int64]:
    """[shards, 2]: the rows of each. Raises ShardError when two hold the same rows."""
    rows = np.fromiter((row for name in names for row in rows_of(File(folder, name))), np.int64).reshape(-1, 2)
    if pair := overlapping(rows):
        shards = [(File(folder, names[number]), (int(rows[number, 0]), int(rows[number, 1]))) for number in pair]
        require_disjoint(shards)
    return rows


def _require_parts_disjoint(parts: Iterable[OpenShards]) -> None:
    """Raise ShardError when two shards of one folder hold the same rows."""
    folders: dict[str, list[OpenShards]] = defaultdict(list)
    for part in parts:
        folders[part.tars[0].file.folder.url].append(part)
    for same in folders.values():
        pair = overlapping(np.concatenate([part.rows for part in same]))
        if pair and len(same) > 1:
            tars, rows = [tar for part in same for tar in part.tars], np.concatenate([part.rows for part in same])
            require_disjoint([(tars[number].file, (int(rows[number, 0]), int(rows[number, 1]))) for number in pair])


def require_disjoint(shards: Iterable[tuple[File, Range]]) -> None:
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
        return folder.compact, {stem: number for number, stem in enumerate(folder.compact.stems())}
    try:
        stamps = folder.stamps()
    except StoreError:
        return None
    compact = read_compact(folder) if COMPACT_NAME in stamps else None
    if compact is None:
        return None
    sizes = compact.filesizes.tolist()
    return compact, {
        stem: number
        for number, (stem, stamp, size) in enumerate(zip(compact.stems(), compact.stamps(), sizes, strict=True))
        if stamps.get(f"{stem}.json") == stamp and stamps.get(f"{stem}.tar", "").partition(" ")[0] == str(size)
    }


def open_named(
    index: str | Path, places: str | Path | Iterable[str | Path] = (), cache: ShardCache | None = None
) -> OpenShards:
    """The shards of a compacted index, which is taken at its word: see `ShardSet.open`.

    Raises:
        ShardError: it is damaged.
        UsageError: there is no such file, or `places` are not one folder.
        StoreError: it cannot be fetched.
    """
    file, named = File.at(index), [places] if isinstance(places, (str, Path)) else list(places)
    if len(named) > 1 or any(str(place).endswith((".tar", ".json")) or is_glob(str(place)) for place in named):
        raise UsageError(
            "a compacted index that is named goes with one folder of shards",
            where=index,
            expected="none for that in which it lies, or one folder",
            found=", ".join(map(str, named)),
        )
    compact = read_compact(file)
    if compact is None:
        raise UsageError("no such compacted index", where=file, hint="write it with qie-stats --compact")
    folder = open_folder(named[0]) if named else file.folder
    return _whole(compact, _Tars(compact, folder, cache))


def _from_compact(
    compact: Compact, numbers: dict[str, int], indexes: list[File], cache: ShardCache | None
) -> OpenShards:
    chosen = [numbers[index.stem] for index in indexes]
    if chosen == list(range(len(compact))):
        return _whole(compact, _Tars(compact, indexes[0].folder, cache))
    compact.require_all()
    shards = [compact.shard(number) for number in chosen]
    tars = [
        Tar(index.with_suffix(".tar"), shard.filesize, shard.sha256, cache)
        for index, shard in zip(indexes, shards, strict=True)
    ]
    skipped = tuple(gone for shard in shards for gone in shard.skipped)
    return OpenShards(compact.recipe, tars, compact.rows[chosen], compact.table.of_shards(chosen), lambda: skipped)


def _whole(compact: Compact, tars: Sequence[Tar]) -> OpenShards:
    return OpenShards(compact.recipe, tars, compact.rows, compact.table, compact.skipped, compact)


def open_by_index(index: File, cache: ShardCache | None) -> OpenShards:
    """One shard by its own index; raises what `open_shards` does."""
    shard = Shard(index)
    return open_shard(shard, Tar(shard.file, shard.index.filesize, shard.index.sha256, cache))


def open_shard(shard: Shard, tar: Tar) -> OpenShards:
    """One shard by its own index, read through `tar`. Raises ShardError when sizes in the index do not fit."""
    index, skipped = shard.index, shard.index.skipped
    rows = np.array([index.rows], np.int64)
    return OpenShards(index.recipe, [tar], rows, Table.of(index, shard.file), lambda: skipped)  # the index may go


@dataclass(frozen=True, eq=False)
class _Tars(Sequence[Tar]):
    """The tars of a compacted index, each made when it is first asked for: of a million, most are not."""

    compact: Compact
    folder: Folder
    cache: ShardCache | None
    _made: dict[int, Tar] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.compact)

    @overload
    def __getitem__(self, number: int) -> Tar: ...

    @overload
    def __getitem__(self, number: slice) -> list[Tar]: ...

    def __getitem__(self, number: int | slice) -> Tar | list[Tar]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(number)
        tar = self._made.get(number)
        if tar is None:
            shard = self.compact.shard(number)
            tar = Tar(File(self.folder, f"{shard.stem}.tar"), shard.filesize, shard.sha256, self.cache)
            tar = self._made.setdefault(number, tar)  # of two threads', one
        return tar


class _Chain:
    """Tars of several parts, one after the other."""

    def __init__(self) -> None:
        self.parts: list[Sequence[Tar]] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def append(self, tars: Sequence[Tar]) -> None:
        self.parts.append(tars)
        self._ends.append(len(self) + len(tars))

    def __getitem__(self, number: int) -> Tar:
        part = bisect_right(self._ends, number)
        return self.parts[part][number - (self._ends[part - 1] if part else 0)]

    def __iter__(self) -> Iterator[Tar]:
        return chain.from_iterable(self.parts)
