"""Summarising shards from their indexes, many at a time; their tars are read only to be verified."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from qie.errors import QieError
from qie.shards.compact import Compact
from qie.shards.index import ShardIndex, read_index
from qie.shards.reader import Shard
from qie.shards.shard_set import current_compact
from qie.shards.verify import compact_faults, lonely_tars, shard_faults
from qie.stages import Pipeline, Stage
from qie.stats.summary import Summary, one_line
from qie.stats.tally import Tally
from qie.stores import File, Folder, StoreError

REMOTE_READERS = 64
LOCAL_READERS = 1
"""More would only wait for one another: parsing an index holds Python's lock."""


def summarise(
    indexes: Sequence[File], *, verify: bool = False, progress: Callable[[int], object] = lambda done: None
) -> Summary:
    """Summarise the shards of `indexes`; with `verify` all that they hold is read, as for training, and rehashed.

    A shard that cannot be read is a fault in the summary; the others are still summarised.
    """
    sizes = _sizes(indexes)
    remote = any(file.path is None for file in indexes)
    readers = REMOTE_READERS if remote else (os.cpu_count() or 1) if verify else LOCAL_READERS
    tally = Tally()
    compacts = _compacts(indexes, tally.faults) if verify else {}

    def opened(file: File) -> tuple[ShardIndex | None, list[str]]:
        if verify:
            return _verify(file, compacts.get(file.folder.url))
        return _open(file, sizes[file.folder.url])

    # Not a pool's `map`: that would hold all indexes that nobody has counted yet.
    found = map(opened, indexes) if readers == 1 else Pipeline(Stage("open", opened, readers)).run(indexes)
    for done, (file, (index, faults)) in enumerate(zip(indexes, found, strict=True), start=1):
        if faults:
            tally.blame(file, faults)
        if index is not None:
            tally.add(file, index)
        progress(done)
    return tally.summary()


def _folders(indexes: Sequence[File]) -> list[Folder]:
    return list({file.folder.url: file.folder for file in indexes}.values())


def _sizes(indexes: Sequence[File]) -> dict[str, dict[str, int]]:
    """The files of each folder, by its URL, in one request each; a web server lists none."""
    sizes: dict[str, dict[str, int]] = {}
    for folder in _folders(indexes):
        try:
            sizes[folder.url] = folder.listing()
        except StoreError:
            sizes[folder.url] = {}
    return sizes


def _open(file: File, sizes: Mapping[str, int]) -> tuple[ShardIndex | None, list[str]]:
    try:
        index = read_index(file)
        if sizes.get(file.with_suffix(".tar").name) != index.filesize:
            Shard(file)  # looks at the tar itself, and says what is wrong
        return index, []
    except QieError as error:
        return None, [one_line(error)]


_Current = tuple[Compact, dict[str, int]]


def _compacts(indexes: Sequence[File], faults: list[str]) -> dict[str, _Current]:
    """The compacted index of each folder that has one, by the folder's URL; and the faults of folders."""
    compacts: dict[str, _Current] = {}
    for folder in _folders(indexes):
        try:
            faults.extend(map(one_line, lonely_tars(folder, indexes)))
            if compact := current_compact(folder):
                compacts[folder.url] = compact
        except QieError as error:
            faults.append(one_line(error))
    return compacts


def _verify(file: File, compact: _Current | None) -> tuple[ShardIndex | None, list[str]]:
    index: ShardIndex | None = None
    faults: list[str] = []
    try:
        shard = Shard(file)
        index = shard.index
        faults.extend(map(one_line, shard_faults(shard)))
        if compact and file.stem in compact[1]:
            faults.extend(map(one_line, compact_faults(compact[0], compact[1][file.stem], shard)))
    except QieError as error:
        faults.append(one_line(error))
    return index, faults
