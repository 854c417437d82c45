"""Reading samples out of shards: mapped where they are on a local disk, by ranges where they are not."""

from __future__ import annotations

import hashlib
import mmap
import resource
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from qie.buffer_pool import ALIGNMENT, BUFFERS, copy_bits
from qie.errors import ShardError
from qie.shards.cache import ShardCache
from qie.shards.index import Entry, ShardIndex, member_name, pictures_name, read_index
from qie.shards.pictures import SmallPictures, decode_pictures
from qie.shards.record import parse, prompt_of
from qie.shards.tensors import Sizes
from qie.stores import File
from qie.types import Sample, Shape

_HEAD_BYTES = 1 << 12
"""Of a record: its header, unless the prompt is long."""
PIECE_BYTES = 2**19
"""Of a record that is copied and hashed: twice as much fits into a core's cache."""


@dataclass(eq=False)
class Tar:
    """The file of a shard's records, mapped when something of it is first read, or read through a cache.

    Attributes:
        file: where it lies.
        size, sha256: as its index says.
        cache: where copies of remote tars are kept; without one, each record is a request.
    """

    file: File
    size: int
    sha256: str
    cache: ShardCache | None = None
    _map: mmap.mmap | None = field(default=None, repr=False)
    _kept_open: bool = field(default=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @cached_property
    def path(self) -> Path | None:
        """Where it lies on a local disk; None elsewhere. Asked for with every record."""
        return self.file.path

    @property
    def distant(self) -> bool:
        """Whether each read is a request to a store."""
        return self.path is None and self.cache is None

    @property
    def copied(self) -> bool:
        """Whether it is read from a copy of all of it on a local disk."""
        return self.cache is not None and self.path is None

    @cached_property
    def name(self) -> str:
        """Its path or URL, for messages."""
        return str(self.file)

    def read(self, start: int, stop: int) -> memoryview:
        """The bytes [start, stop), in a buffer that may be written to without reaching the file.

        Raises:
            ShardError: the tar is gone.
            StoreError: it cannot be fetched.
        """
        path = self.path
        if start == stop:  # of an empty file there is no map
            return memoryview(bytearray())
        if path is not None:
            mapped = self._mapped(path)
            if mapped.size() < stop:  # to touch what is no longer there would kill the process
                raise ShardError(
                    "the shard became shorter since it was opened",
                    where=path,
                    expected=f"{self.size} bytes",
                    found=f"{mapped.size()} bytes",
                    hint="copy it again, or delete it with its index and run qie-precompute again",
                )
            return memoryview(mapped)[start:stop]
        copy = self.cache and self.cache.read(self.file, self.size, self.sha256, start, stop)
        # A bytearray: torch wants a writable buffer.
        return memoryview(copy or bytearray(self.file.read(start, stop)))

    def read_own(self, start: int, stop: int, told: Callable[[memoryview], object] | None = None) -> memoryview:
        """The bytes [start, stop) of a record, in memory that nobody else holds. Raises what `read` does.

        Args:
            start, stop: its place.
            told: of each piece, while it is in the CPU's cache; what reads it again then costs little.
        """
        record = self.read(start, stop)
        if self.path is None or len(record) < 8:
            if told:
                told(record)
            return record
        # What follows the header is aligned as tensors are.
        header_bytes = 8 + int.from_bytes(record[:8], "little")
        buffer = BUFFERS.take(len(record) + ALIGNMENT)[-header_bytes % ALIGNMENT :]
        target, source = buffer[: len(record)], np.frombuffer(record, np.uint8)
        piece_bytes = PIECE_BYTES if told else len(record)
        for at in range(0, len(record), piece_bytes):
            piece = target[at : at + piece_bytes]
            copy_bits(piece, source[at : at + piece_bytes])
            if told:
                told(piece.data)
        return target.data

    def keep_open(self) -> None:
        """Stay readable even after the tar was replaced or deleted. Only on a local disk."""
        if self.path is not None and self.size:
            self._kept_open = True
            self._mapped(self.path)

    def forget_copy(self) -> bool:
        """Drop the cached copy, which turned out to be damaged; whether there may have been one."""
        if self.cache is None or self.path is not None:
            return False
        self.cache.forget(self.sha256)
        return True

    def _mapped(self, path: Path) -> mmap.mmap:
        with self._lock:
            mapped = self._map  # which another thread may drop
            if mapped is None:
                if not self._kept_open:
                    _maps.add(self)
                try:
                    with path.open("rb") as file:
                        # Copy-on-write: torch wants a writable buffer, and nobody's write may reach the file.
                        mapped = self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                except (OSError, ValueError) as error:  # ValueError: it is empty
                    raise ShardError("the shard cannot be read", where=path, found=error) from error
            return mapped


def checked_sample(
    record: memoryview, key: str, shape: Shape, where: str, sizes: Sizes | None = None, *, own: bool = False
) -> Sample:
    """The sample in a record, whose memory is its `own` or not.

    Raises ShardError when the record is malformed, or not what its index says.
    """
    parsed = parse(record, where)
    if parsed.key != key:
        raise ShardError("the record is another sample's", where=where, expected=key, found=parsed.key)
    if parsed.shape != shape or sizes not in (None, parsed.sizes):
        expected, found = [shape, *(sizes or ())], [parsed.shape, *(parsed.sizes if sizes else ())]
        raise ShardError("the record has other sizes than the index", where=where, expected=expected, found=found)
    return parsed.sample(own=own)


class _Maps:
    """The tars that are mapped: each map holds a file open, and they may take a quarter of those that a process may."""

    def __init__(self) -> None:
        self._tars, self._lock = deque[Tar](), threading.Lock()

    def add(self, tar: Tar) -> None:
        may, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = 1 << 14 if may == resource.RLIM_INFINITY else min(may // 4, 1 << 14)
        with self._lock:
            self._tars.append(tar)
            while len(self._tars) > most:
                oldest = self._tars.popleft()
                if not oldest._kept_open:
                    oldest._map = None  # closed when the last tensor in it is gone, mapped again when asked for


_maps = _Maps()


class Shard:
    """One published shard. Opening it reads the index and the tar's size; the tar is mapped on first use.

    Raises:
        ShardError: the index is damaged, or the tar is missing or of another size than the index says.
    """

    def __init__(self, place: File | str | Path) -> None:
        place = File.at(place)
        self.index: ShardIndex = read_index(place)
        self.file = place.with_suffix(".tar")
        self.tar = Tar(self.file, self.index.filesize, self.index.sha256)
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

    @classmethod
    def published(cls, place: File) -> Shard | None:
        """The shard at a place where another thread or process may be replacing it; None where there is none just now.

        A writer deletes the index, replaces the tar and writes the new index: who looks in between sees two that do not
        fit. Only a fault that a second look finds again is one.

        Raises:
            ShardError: the shard is damaged.
        """
        fault = ""
        while place.size() is not None:
            try:
                return cls(place)
            except ShardError as error:
                if str(error) == fault:
                    raise
                fault = str(error)
        return None

    @cached_property
    def by_key(self) -> dict[str, Entry]:
        """An entry for each key; rows of equal content have equal ones but for what they are called."""
        return {entry.key: entry for entry in self.index.samples}

    def load(self, entry: Entry) -> Sample:
        """The sample of an entry; its tensors are views of the mapped file.

        Raises:
            ShardError: the record is malformed or is another sample's.
        """
        return checked_sample(self.record(entry), entry.key, entry.shape, f"{self.file}, {entry.key}")

    def record(self, entry: Entry) -> memoryview:
        """The bytes of an entry's member."""
        member = self.index.files[member_name(entry.key)]
        return self.tar.read(member.offset, member.offset + member.size)

    def prompt(self, entry: Entry) -> str:
        """The prompt of an entry's sample, without the rest of its record, whose hash is not checked.

        Raises:
            ShardError: the record is damaged where the prompt is.
        """
        member = self.index.files[member_name(entry.key)]
        start, where = member.offset, f"{self.file}, {entry.key}"
        head = self.tar.read(start, start + min(member.size, _HEAD_BYTES))
        length = 8 + int.from_bytes(head[:8], "little")
        if len(head) < length <= member.size:
            head = self.tar.read(start, start + length)
        return prompt_of(head, where)

    def pictures_jpeg(self, entry: Entry) -> bytes | None:
        """The JPEG with all small pictures of an entry's sample; None where the shard has none."""
        place = self.index.pictures.get(pictures_name(entry.key))
        return None if place is None else bytes(self.tar.read(place.offset, place.offset + place.size))

    def pictures(self, entry: Entry) -> SmallPictures | None:
        """The small pictures of an entry's sample; None where the shard has none.

        Shards of before controls had pictures hold one of the target in the record.

        Raises:
            ShardError: they cannot be read, or are of another number of controls.
        """
        where = f"{self.file}, {pictures_name(entry.key)}"
        if (jpeg := self.pictures_jpeg(entry)) is not None:
            found = decode_pictures(jpeg, where)
            if len(found.controls) != len(entry.shape.controls):
                raise ShardError(
                    "the pictures are of another number of controls",
                    where=where,
                    expected=len(entry.shape.controls),
                    found=len(found.controls),
                )
            return found
        if "thumbnail" not in entry.tensor_bytes or (thumbnail := self.load(entry).thumbnail) is None:
            return None
        from PIL import Image

        return SmallPictures(Image.fromarray(thumbnail.numpy()))

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
