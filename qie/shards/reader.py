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
from qie.stores import File
from qie.types import Sample


class Shard:
    """One published shard. Opening it reads the index and the tar's size; the tar is mapped on first use.

    Raises:
        ShardError: the index is damaged, or the tar is missing or of another size than the index says.
    """

    def __init__(self, place: File | str | Path) -> None:
        place = File.at(place)
        self.index: ShardIndex = read_index(place)
        self.file = place.with_suffix(".tar")
        self._map: mmap.mmap | None = None
        self._lock = threading.Lock()
        size = self.file.size()
        if size != self.index.filesize:
            raise ShardError(
                "the shard is cut short or is not the one its index describes"
                if size is not None
                else "the shard is missing",
                where=self.file,
                expected=f"{self.index.filesize} bytes",
                found=f"{size} bytes" if size is not None else "no file",
                hint="copy it again, or delete it with its index and run qie-precompute again",
            )

    def load(self, entry: Entry) -> Sample:
        """The sample of an entry; its tensors are views of the mapped file.

        Raises:
            ShardError: the record is malformed or is another sample's.
        """
        where = f"{self.file}, {entry.key}"
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
        return self._bytes(member.offset, member.offset + member.size)

    def verified_record(self, entry: Entry) -> bytes:
        """A copy of an entry's member, checked against its hash. Raises ShardError when it is damaged."""
        record = bytes(self.record(entry))
        if hashlib.sha256(record).hexdigest() != self.index.files[member_name(entry.key)].sha256:
            raise ShardError(
                "a record is damaged",
                where=f"{self.file}, {entry.key}",
                expected="the SHA-256 that the index gives",
                hint="delete the shard and its index and run qie-precompute again",
            )
        return record

    def verify(self) -> Iterator[str]:
        """Rehash the tar and every member; yields a line for each fault."""
        whole, at = hashlib.sha256(), 0
        for name, member in sorted(self.index.files.items(), key=lambda item: item[1].offset):
            whole.update(self._bytes(min(at, member.offset), member.offset))
            content = self._bytes(member.offset, member.offset + member.size)
            at = member.offset + member.size
            whole.update(content)
            if hashlib.sha256(content).hexdigest() != member.sha256:
                yield f"{self.file}: {name} is damaged"
        whole.update(self._bytes(at, self.index.filesize))
        if whole.hexdigest() != self.index.sha256:
            yield f"{self.file}: its SHA-256 is not the one in its index"

    def keep_open(self) -> None:
        """Make its records readable even after the tar was replaced or deleted. Only on a local disk."""
        if self.file.path is not None:
            self._mapped(self.file.path)

    def _bytes(self, start: int, stop: int) -> memoryview:
        path = self.file.path
        if start == stop:  # of an empty file there is no map
            return memoryview(bytearray())
        if path is None:
            # A bytearray: torch wants a writable buffer.
            return memoryview(bytearray(self.file.read(start, stop)))
        return memoryview(self._mapped(path))[start:stop]

    def _mapped(self, path: Path) -> mmap.mmap:
        with self._lock:
            if self._map is None:
                try:
                    with path.open("rb") as file:
                        # Copy-on-write: torch wants a writable buffer, and nobody's write may reach the file.
                        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                except (OSError, ValueError) as error:  # ValueError: it is empty
                    raise ShardError("the shard cannot be read", where=path, found=error) from error
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
                shard.index.recipe, shard.file, f"train on one recipe at a time; {self.shards[0].file} differs"
            )
        self.entries = [entry for shard in self.shards for entry in shard.index.samples]
        self.keys = [entry.key for entry in self.entries]
        # A row's number is its first sample's position: entries are in the order of rows, a row's versions together.
        places = [(number, entry.row) for number, shard in enumerate(self.shards) for entry in shard.index.samples]
        firsts = {place: position for position, place in reversed(list(enumerate(places)))}
        self.rows = [firsts[place] for place in places]
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
    ordered = sorted(shards, key=lambda shard: (shard.file.folder.url, shard.index.start))
    for first, second in pairwise(ordered):
        if first.file.folder == second.file.folder and second.index.start < first.index.stop:
            raise ShardError(
                "two shards hold the same rows",
                where=second.file,
                found=f"rows [{second.index.start}, {first.index.stop}) are in {first.file.name}, too",
                hint="delete one of the two with its index; qie-precompute writes what is then missing",
            )
