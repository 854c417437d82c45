"""All that reading would refuse, named beforehand, and what reading never looks at: the rest of each tar, tars whose
index is gone, and whether a compacted index says what the indexes say.

Each record is read by the code that reads it for training, so what passes here is not refused there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qie.errors import QieError, ShardError
from qie.shards.compact_index import COMPACT_NAME, Compact, CompactShard
from qie.shards.discovery import indexes_in, lonely
from qie.shards.reader import Shard, Tar
from qie.shards.sample_table import Table
from qie.shards.shard_set import OpenShards, ShardSet, open_shard
from qie.stores import File, Folder, UnlistedError

PIECE_BYTES = 8 * 2**20
GAP_BYTES = 4096
"""Between two records stand a header of 512 bytes and less padding: read in one go with the next record."""


def shard_faults(shard: Shard) -> Iterator[QieError]:
    """Read every sample as training does, then the rest of the tar."""
    index = shard.index
    tar = _HashedTar(shard.file, index.filesize, index.sha256)
    try:
        part = open_shard(shard, tar)
    except ShardError as error:
        yield error
    else:
        yield from _record_faults(part)
    found = tar.hash_whole()
    if found != index.sha256:
        yield ShardError(
            "the tar is not the one that its index describes",
            where=shard.file,
            expected=f"SHA-256 {index.sha256}",
            found=found,
            hint="copy the shard again, or delete it with its index and run qie-precompute again",
        )


def _record_faults(part: OpenShards) -> Iterator[ShardError]:
    if not len(part.table):
        return
    samples = ShardSet([part], both_hashes=True)
    for position in np.argsort(part.table.offsets, kind="stable").tolist():
        try:
            samples.fetch(position)
        except ShardError as error:
            yield error


def compact_faults(compact: Compact, number: int, shard: Shard) -> Iterator[QieError]:
    """Compare what a compacted index says of a shard with the shard's own index."""
    try:
        said, index = compact.shard(number), shard.index
    except ShardError as error:
        yield error
        return
    own = CompactShard.of(said.stem, index, said.stamp)
    odd = [name for name in ("filesize", "sha256", "rows", "skipped") if getattr(said, name) != getattr(own, name)]
    odd += compact.table.of_shards([number]).differences(Table.of(index, shard.file))
    if compact.recipe != index.recipe:
        odd.append("recipe")
    if odd:
        yield ShardError(
            "the compacted index disagrees with the shard's own index",
            where=f"{File(shard.file.folder, COMPACT_NAME)}, {said.stem}",
            found=f"other {', '.join(odd)}",
            hint="rebuild it with qie-stats --compact",
        )


def lonely_tars(folder: Folder, indexes: Sequence[File]) -> Iterator[QieError]:
    """Shards of a folder whose tar is there and whose index is not; none where only some of its shards were named."""
    try:
        tars = lonely(folder)
    except UnlistedError:
        return
    if {index.name for index in indexes_in(folder)} - {
        index.name for index in indexes if index.folder.url == folder.url
    }:
        return
    for tar in tars:
        yield ShardError(
            "a tar has no index",
            where=tar,
            expected=f"{tar.stem}.json",
            hint="put its index back, or run qie-precompute again, which writes the shard again",
        )


@dataclass(eq=False)
class _HashedTar(Tar):
    """Hashes what is read in its order, with what lies between, so that each byte is read once."""

    _sha256: Any = field(default_factory=hashlib.sha256, repr=False)
    _at: int = 0

    def read(self, start: int, stop: int) -> memoryview:
        if start < self._at:  # a record of several rows, or one that lies over another
            return super().read(start, stop)
        self._hash_up_to(start - GAP_BYTES)
        before = start - self._at
        content = super().read(self._at, stop)
        self._sha256.update(content)
        self._at = stop
        return content[before:]

    def hash_whole(self) -> str:
        """The SHA-256 of the whole file, the rest of which is read now."""
        self._hash_up_to(self.size)
        return str(self._sha256.hexdigest())

    def _hash_up_to(self, stop: int) -> None:
        while self._at < stop:
            piece = super().read(self._at, min(self._at + PIECE_BYTES, stop))
            self._sha256.update(piece)
            self._at += len(piece)
