"""Which shards there are: in folders, by file names, globs and braces, on local disks and in other stores.

Nothing here runs a program: a `pipe:` URL is refused, whatever it says.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

import numpy as np

from qie.errors import ShardError, UsageError
from qie.shards.compact_index import ManifestFolder
from qie.shards.grid import Range, missing_rows
from qie.shards.index import parse_stem, read_index
from qie.stores import (
    File,
    Folder,
    LocalFolder,
    ObjectFolder,
    StoreError,
    UnlistedError,
    glob_files,
    is_glob,
    open_folder,
    spelled_out,
)

Gap = tuple[str, int, int]
"""A folder, and rows [start, stop) of which none of its shards is, though one is of later rows."""


def find_indexes(places: str | Path | Iterable[str | Path], *, or_none: bool = False) -> list[File]:
    """The index files of all shards in `places`, in the order of their rows within each place.

    Args:
        places: one or several folders, tar files, globs, or patterns with braces such as `{part-1,part-2}/*.tar`; paths
            or URLs. In URLs, a glob may stand in the last part only. A name that is spelled out has to be there; a glob
            matches what it matches.
        or_none: a folder that is there, or a glob, may hold no shards.

    Raises:
        ShardError: in a place are tars of shards, but no index of one.
        UsageError: a place is of a kind that is not read, or nothing was found in it; says what is there.
        StoreError: a store cannot be reached, or not be listed.
    """
    indexes: list[File] = []
    for place in [places] if isinstance(places, (str, Path)) else places:
        names = spelled_out(str(place))
        found = {name: _expand(name) for name in names}
        lacking = [name for name in names if not found[name] and not is_glob(name)]
        if or_none:
            lacking = [name for name in lacking if not _may_be_empty(name)]
        if lacking or not (or_none or any(found.values())):
            for name in lacking or names:
                _refuse_lonely(name)
            raise UsageError(
                "no shards found",
                where=lacking[0] if lacking and len(names) > 1 else place,
                expected="tars with an index beside each, such as 00000000-00000064.tar and .json",
                found=_what_is_there(lacking[0] if lacking else str(place)),
                hint="correct the path, or write shards with qie-precompute",
            )
        indexes += [index for name in names for index in found[name]]
    roots: dict[Path, str] = {}
    return list({_identity(index, roots): index for index in indexes}.values())


def _identity(index: File, roots: dict[Path, str]) -> tuple[str, str]:
    """Equal for files that are the same, by whatever links. Folders that were followed are noted in `roots`."""
    folder = index.folder
    if not isinstance(folder, LocalFolder):
        return folder.url, index.name
    if os.path.islink(f"{folder.root}/{index.name}"):  # noqa: PTH114 - a million Path objects take long
        path = folder.path(index.name).resolve()
        return str(path.parent), path.name
    if folder.root not in roots:
        roots[folder.root] = str(folder.root.resolve())
    return roots[folder.root], index.name


def indexes_in(folder: Folder | str | Path) -> list[File]:
    """Index files of the shards in a folder, in the order of their rows; shards that somebody renamed last, by name.

    An empty or missing folder has none. A web server's has those of its compacted index.
    """
    folder = open_folder(folder)
    try:
        return _listed(folder)
    except UnlistedError:
        if not isinstance(folder, ObjectFolder):
            raise
        manifest = folder if isinstance(folder, ManifestFolder) else ManifestFolder.of(folder)
        return [File(manifest, f"{stem}.json") for stem in manifest.compact.stems()]


def _listed(folder: Folder) -> list[File]:
    return [File(folder, name) for name in index_names(folder.listing())]


def index_names(names: Collection[str]) -> list[str]:
    """The indexes of shards among the files of a folder, in the order of `indexes_in`."""
    found = [name for name in names if name.endswith(".json")]
    renamed = [name for name in found if not parse_stem(name[: -len(".json")])]
    if renamed:
        there = set(names)
        odd = {name for name in renamed if f"{name[: -len('.json')]}.tar" not in there}
        found = [name for name in found if name not in odd]
    # A listing mostly is in this order already. To sort a million names by their rows takes 200 MB.
    ordered = all(before <= after for before, after in pairwise(map(_order, found)))
    return found if ordered else sorted(found, key=_order)


def published(folder: Folder | str | Path) -> list[File]:
    """The same, of shards that are named as qie-precompute names them: after their rows."""
    return [index for index in indexes_in(folder) if parse_stem(index.stem)]


def rows_of(index: File) -> Range:
    """The rows [start, stop) that a shard's name says, or its index where somebody renamed it."""
    rows = parse_stem(index.stem)
    if rows is None:
        found = read_index(index)
        rows = found.start, found.stop
    return rows


def gaps(indexes: Iterable[File]) -> Iterator[Gap]:
    """The gaps in the folders of `indexes`: rows that no shard is of, though a later one is. Of a folder that cannot be
    listed only `indexes` are known; of a renamed shard whose index cannot be read nothing is."""
    folders: dict[str, list[File]] = defaultdict(list)
    for index in indexes:
        folders[index.folder.url].append(index)
    for url, known in folders.items():
        with suppress(StoreError):
            known = _listed(known[0].folder)
        rows = []
        for index in known:
            with suppress(ShardError):
                rows.append(rows_of(index))
        for start, stop in missing_rows(np.array(rows, np.int64).reshape(-1, 2)):
            yield url, start, stop


def lonely(folder: Folder) -> list[File]:
    """The tars of a folder that are named as shards are, and have no index beside them. Raises UnlistedError."""
    names = folder.listing()
    tars = [File(folder, name) for name in names if name.endswith(".tar") and parse_stem(name[:-4])]
    # Its writer may have published the index since the folder was listed.
    return [tar for tar in tars if (index := tar.with_suffix(".json")).name not in names and index.size() is None]


def _refuse_lonely(place: str) -> None:
    """Raise ShardError for a place without an index, where tars of shards are."""
    folder, matching = open_folder(place), "*"
    if place.endswith((".tar", ".json")):
        file = File.at(place)
        folder, matching = file.folder, f"{file.stem}.tar"
    try:
        tars = [tar for tar in lonely(folder) if fnmatchcase(tar.name, matching)]
    except (StoreError, UsageError):  # a folder that is not there, or a glob of some
        return
    if tars:
        more = f", … ({len(tars)} tars)" if len(tars) > 6 else ""
        raise ShardError(
            "tars have no index, and are no shards without it",
            where=folder,
            expected=f"{tars[0].stem}.json beside {tars[0].name}, and so on",
            found=", ".join(tar.name for tar in tars[:6]) + more,
            hint="put the indexes back, or run qie-precompute again, which writes the shards again",
        )


def _may_be_empty(name: str) -> bool:
    folder = open_folder(name)
    if isinstance(folder, LocalFolder):
        return folder.root.is_dir()
    return not name.endswith((".tar", ".json"))


def _order(name: str) -> tuple[bool, Range, str]:
    rows = parse_stem(name[: -len(".json")])
    return rows is None, rows or (0, 0), name


def _expand(pattern: str) -> list[File]:
    folder = open_folder(pattern)
    if not isinstance(folder, LocalFolder):
        return _expand_url(pattern)
    path = folder.root
    if path.is_dir():
        return indexes_in(folder)
    if path.suffix not in (".tar", ".json"):
        return []
    found = {file.with_suffix(".json") for file in glob_files(str(path))}
    there = [index for index in found if index.size() is not None and _is_named(index)]
    return sorted(there, key=lambda index: (index.folder.url, _order(index.name)))


def _is_named(index: File) -> bool:
    """Whether a JSON file is an index by its name, or by the tar beside it."""
    return parse_stem(index.stem) is not None or index.with_suffix(".tar").size() is not None


def _expand_url(pattern: str) -> list[File]:
    base, _, last = pattern.rpartition("/")
    shards = last.endswith((".tar", ".json"))
    if is_glob(base if shards else pattern):
        raise UsageError(
            "a glob in a URL may stand in a shard's name only",
            where=pattern,
            expected="such as s3://bucket/shards/*.tar",
        )
    if not shards:
        return indexes_in(pattern)
    file = File.at(pattern).with_suffix(".json")
    if not is_glob(last):
        return [file] if file.size() is not None else []
    return [index for index in indexes_in(file.folder) if fnmatchcase(index.name, file.name)]


def _what_is_there(place: str) -> str:
    folder = open_folder(place)
    if not isinstance(folder, LocalFolder):
        return "nothing that matches"
    path = folder.root
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        return (
            ", ".join(names[:6]) + (f", … ({len(names)} files)" if len(names) > 6 else "")
            if names
            else "an empty folder"
        )
    return "nothing that matches" if path.parent.is_dir() else f"no folder {path.parent}"
