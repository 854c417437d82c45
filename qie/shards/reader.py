"""Reading samples out of shards, without copying them: one memory map per shard, offsets from its index."""

from __future__ import annotations

import hashlib
import mmap
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path

from qie.errors import ShardError
from qie.recipe import Recipe
from qie.shards.index import Entry, ShardIndex, member_name, read_index
from qie.shards.record import decode
from qie.shards.storage import find_indexes
from qie.types import Sample


class Shard:
    """One published shard. Opening it reads the index and the tar's size; the tar is mapped on first use.

    Raises:
        ShardError: the index is damaged, or the tar is missing or of another size than the index says.
    """

    def __init__(self, index_path: Path) -> None:
        self.index: ShardIndex = read_index(index_path)
        self.path = index_path.with_suffix(".tar")
        self._map: mmap.mmap | None = None
        self._lock = threading.Lock()
        size = self.path.stat().st_size if self.path.is_file() else None
        if size != self.index.filesize:
            raise ShardError(
                "the shard is cut short or is not the one its index describes"
                if size is not None
                else "the shard is missing",
                where=self.path,
                expected=f"{self.index.filesize} bytes",
                found=f"{size} bytes" if size is not None else "no file",
                hint="copy it again, or delete it with its index and run qie-precompute again",
            )

    def load(self, entry: Entry) -> Sample:
        """The sample of an entry; its tensors are views of the mapped file.

        Raises:
            ShardError: the record is malformed or is another sample's.
        """
        where = f"{self.path}, {entry.key}"
        sample = decode(self.record(entry), where)
        if sample.key != entry.key:
            raise ShardError("the record is another sample's", where=where, expected=entry.key, found=sample.key)
        if sample.shape != entry.shape:
            raise ShardError(
                "the record has other sizes than the index", where=where, expected=entry.shape, found=sample.shape
            )
        return sample

    def record(self, entry: Entry) -> memoryview:
        """The bytes of an entry's member."""
        member = self.index.files[member_name(entry.key)]
        return memoryview(self._mapped())[member.offset : member.offset + member.size]

    def verified_record(self, entry: Entry) -> bytes:
        """A copy of an entry's member, checked against its hash. Raises ShardError when it is damaged."""
        record = bytes(self.record(entry))
        if hashlib.sha256(record).hexdigest() != self.index.files[member_name(entry.key)].sha256:
            raise ShardError(
                "a record is damaged",
                where=f"{self.path}, {entry.key}",
                expected="the SHA-256 that the index gives",
                hint="delete the shard and its index and run qie-precompute again",
            )
        return record

    def verify(self) -> Iterator[str]:
        """Rehash the tar and every member; yields a line for each fault."""
        content = memoryview(self._mapped())
        if hashlib.sha256(content).hexdigest() != self.index.sha256:
            yield f"{self.path}: its SHA-256 is not the one in its index"
        for name, member in self.index.files.items():
            found = hashlib.sha256(content[member.offset : member.offset + member.size]).hexdigest()
            if found != member.sha256:
                yield f"{self.path}: {name} is damaged"

    def _mapped(self) -> mmap.mmap:
        with self._lock:
            if self._map is None:
                with self.path.open("rb") as file:
                    # Copy-on-write: torch wants a writable buffer, and nobody's write may reach the file.
                    self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            return self._map


class ShardSet:
    """Many shards of one recipe as one sequence of samples, in the order of their rows.

    Raises:
        RecipeMismatchError: the shards are of several recipes; says which and how they differ.
        ShardError: two shards claim the same row.
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
        shards = list(shards)
        self.shards = [shard for shard in shards if shard.index.samples]
        if not self.shards:
            raise ShardError("the shards hold no samples", hint="see their skipped rows with qie-stats")
        self.recipe: Recipe = self.shards[0].index.recipe
        for shard in self.shards[1:]:
            self.recipe.require_equal(
                shard.index.recipe, shard.path, f"train on one recipe at a time; {self.shards[0].path} differs"
            )
        self.entries = [entry for shard in self.shards for entry in shard.index.samples]
        self.keys = [entry.key for entry in self.entries]
        self.shapes = [entry.shape for entry in self.entries]
        self.skipped = [gone for shard in shards for gone in shard.index.skipped]
        self._ends = list(accumulate(len(shard.index.samples) for shard in self.shards))

    @classmethod
    def open(cls, places: Iterable[str | Path]) -> ShardSet:
        """The shards in directories, globs or brace patterns."""
        shards = [Shard(path) for path in find_indexes(places)]
        require_disjoint(shards)
        return cls(shards)

    def __len__(self) -> int:
        return len(self.entries)

    def load(self, position: int) -> Sample:
        """The sample at a position, 0 to len - 1."""
        entry = self.entries[position]
        return self.shards[bisect_right(self._ends, position)].load(entry)


def require_disjoint(shards: Iterable[Shard]) -> None:
    """Raise ShardError when two shards of one directory hold the same rows."""
    ordered = sorted(shards, key=lambda shard: (str(shard.path.parent), shard.index.start))
    for first, second in pairwise(ordered):
        if first.path.parent == second.path.parent and second.index.start < first.index.stop:
            raise ShardError(
                "two shards hold the same rows",
                where=second.path,
                found=f"rows [{second.index.start}, {first.index.stop}) are in {first.path.name}, too",
                hint="delete one of the two with its index; qie-precompute writes what is then missing",
            )
