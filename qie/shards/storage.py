"""Where shards lie: folders, files, globs and {000..999} braces, on local disks and in other stores.

Nothing here runs a program: a `pipe:` URL is refused, whatever it says.
"""

from __future__ import annotations

import glob
from collections import defaultdict
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from qie.errors import UsageError
from qie.shards.index import parse_stem
from qie.stores import File, Folder, LocalFolder, StoreError, is_glob, open_folder, spelled_out

Gap = tuple[str, int, int]
"""A folder, and rows [start, stop) of which none of its shards is, though one is of later rows."""


def find_indexes(places: str | Path | Iterable[str | Path], *, or_none: bool = False) -> list[File]:
    """The index files of all shards in `places`, in the order of their rows within each place.

    Args:
        places: one or several folders, tar files, globs, or patterns with braces such as
            `shards/{00000000..00000640}*.tar`; paths or URLs. In URLs, a glob may stand in the last part only. A name
            that is spelled out has to be there; a glob matches what it matches.
        or_none: a folder that is there, or a glob, may hold no shards.

    Raises:
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
            raise UsageError(
                "no shards found",
                where=lacking[0] if lacking and len(names) > 1 else place,
                expected="tars with an index beside each, such as 00000000-00000064.tar and .json",
                found=_what_is_there(lacking[0] if lacking else str(place)),
                hint="correct the path, or write shards with qie-precompute",
            )
        indexes += [index for name in names for index in found[name]]
    return list({str(index.path.resolve() if index.path else index): index for index in indexes}.values())


def published(folder: Folder | str | Path) -> list[File]:
    """Index files in a folder, in the order of their rows. An empty or missing folder has none."""
    folder = open_folder(folder)
    names = [name for name in folder.listing() if name.endswith(".json")]
    found = [(parsed, name) for name in names if (parsed := parse_stem(name.removesuffix(".json")))]
    return [File(folder, name) for _, name in sorted(found)]


def rows_of(index: File) -> tuple[int, int]:
    """The rows [start, stop) that a shard's name says."""
    rows = parse_stem(index.stem)
    assert rows is not None
    return rows


def gaps(indexes: Iterable[File]) -> Iterator[Gap]:
    """The gaps in the folders of `indexes`, by the names of their shards: rows that no shard is of, though a later one
    is. Of a folder that cannot be listed only `indexes` are known."""
    folders: dict[str, list[File]] = defaultdict(list)
    for index in indexes:
        folders[index.folder.url].append(index)
    for url, known in folders.items():
        try:
            known = published(known[0].folder)
        except StoreError:
            known.sort(key=rows_of)
        end = 0
        for start, stop in map(rows_of, known):
            if start > end:
                yield url, end, start
            end = max(end, stop)


def _may_be_empty(name: str) -> bool:
    folder = open_folder(name)
    if isinstance(folder, LocalFolder):
        return folder.root.is_dir()
    return not name.endswith((".tar", ".json"))


def _expand(pattern: str) -> list[File]:
    folder = open_folder(pattern)
    if not isinstance(folder, LocalFolder):
        return _expand_url(pattern)
    path = folder.root
    if path.is_dir():
        return published(folder)
    if path.suffix not in (".tar", ".json"):
        return []
    matches = [Path(match) for match in glob.glob(str(path))]  # noqa: PTH207 - Path.glob takes no absolute pattern
    found = {(match.parent, rows, match.with_suffix(".json")) for match in matches if (rows := parse_stem(match.stem))}
    return [File(LocalFolder(index.parent), index.name) for _, _, index in sorted(found) if index.is_file()]


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
        return published(pattern)
    file = File.at(pattern).with_suffix(".json")
    if not is_glob(last):
        return [file] if parse_stem(file.stem) and file.size() is not None else []
    return [index for index in published(file.folder) if fnmatchcase(index.name, file.name)]


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
