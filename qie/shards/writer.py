"""Writing one shard so that it is either there, complete, or not there at all.

On a local disk the tar grows in `<stem>.tar.partial`, under a lock that dies with its process. When it is complete it
is synced and renamed, then the index is. A killed run leaves at most partial files, which the next writer of that shard
takes over. For any other store it grows in a nameless temporary file and is uploaded, then the index is.

No row gets into two shards, whatever ranges writers were given: each locks its own partial file, then looks for others.
So of two that begin at once at least one sees the other. Without locks, a writer looks before it publishes its index.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from qie.errors import ShardError
from qie.paths import is_at, open_own
from qie.recipe import Recipe
from qie.shards.grid import Range
from qie.shards.hashes import xxh3_128
from qie.shards.index import (
    Entry,
    Member,
    PicturesPlace,
    ShardIndex,
    Skipped,
    member_name,
    parse_stem,
    pictures_name,
    shard_stem,
)
from qie.stores import File, Folder, LocalFolder, open_folder

_BLOCK = 512


class ShardBusyError(ShardError):
    """Another process is writing this shard now."""


class ShardOverlapError(ShardError):
    """Another published shard holds some of these rows."""


class ShardWriter:
    """Writes the shard of rows [start, stop). Use as a context; without `publish` nothing becomes visible.

    Attributes:
        index_file: where its index will be.
        skipped: rows recorded as such so far.

    Raises:
        ShardBusyError: on entering, when another process is writing some of the same rows.
        ShardOverlapError: on entering, or on publishing where there are no locks: another shard holds some of the rows.
        ShardError: the disk is full, or refuses.
    """

    def __init__(self, folder: Folder | str | Path, start: int, stop: int, recipe: Recipe) -> None:
        self.start, self.stop, self.recipe = start, stop, recipe
        self.index_file = File(open_folder(folder), f"{shard_stem(start, stop)}.json")
        self._tar_file = self.index_file.with_suffix(".tar")
        path = self._tar_file.path
        self._partial = path.with_suffix(".tar.partial") if path else None
        self._members: dict[str, Member] = {}
        self._pictures: dict[str, PicturesPlace] = {}
        self._entries: list[Entry] = []
        self.skipped: list[Skipped] = []
        self._published = False

    def __enter__(self) -> ShardWriter:
        with self._explained():
            if self._partial is None:
                self._file: BinaryIO = tempfile.TemporaryFile()
            else:
                self._partial.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._claimed(self._partial)
        self._hashed = _HashingFile(self._file)
        # A stream: the tar is written front to back, so its hash is known when it ends. USTAR with an integer mtime
        # needs no extended headers: every member is one 512-byte block and its payload.
        self._tar = tarfile.open(fileobj=self._hashed, mode="w|", format=tarfile.USTAR_FORMAT)  # type: ignore[call-overload]
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove a shard that is not published."""
        # Once published, what lies at the partial path may be the next writer's.
        if not self._published and self._partial is not None:
            self._partial.unlink(missing_ok=True)
            self._published = True
        with suppress(OSError):  # an abandoned tar that is not closed complains when it is collected
            self._tar.close()
        with suppress(OSError):  # the same of a file whose buffer no longer fits on the disk
            self._file.close()

    def add(self, entry: Entry, record: bytes, pictures: bytes | None = None) -> None:
        """Append a row's record; a record that is there already (a row of equal content) is not written twice.

        Its pictures, if there are any, go before it: who reads the beginning of the record has them with one request.
        """
        self._entries.append(entry)
        name = member_name(entry.key)
        if name in self._members:
            return
        if pictures:
            self._pictures[pictures_name(entry.key)] = PicturesPlace(
                self._append(pictures_name(entry.key), pictures), len(pictures)
            )
        sha256, fast = hashlib.sha256(record).hexdigest(), xxh3_128(record).hex()
        self._members[name] = Member(self._append(name, record), len(record), sha256, fast)

    def _append(self, name: str, content: bytes) -> int:
        """Append a member. Returns the offset of its content."""
        info = tarfile.TarInfo(name)
        info.size, info.mtime, info.mode = len(content), 0, 0o644
        offset: int = self._tar.offset + _BLOCK
        with self._explained():
            self._tar.addfile(info, io.BytesIO(content))
        return offset

    def skip(self, skipped: Skipped) -> None:
        """Record a row that the shard does not hold, and why."""
        self.skipped.append(skipped)

    def publish(self) -> ShardIndex:
        """Make the shard visible: tar first, then its index. Returns the index."""
        with self._explained():
            self._tar.close()
            self._file.flush()
            os.fsync(self._file.fileno())
        index = ShardIndex(
            start=self.start,
            stop=self.stop,
            filesize=self._hashed.written,
            sha256=self._hashed.sha256.hexdigest(),
            recipe=self.recipe,
            files=self._members,
            samples=tuple(sorted(self._entries, key=lambda entry: (entry.row, entry.variant))),
            skipped=tuple(sorted(self.skipped, key=lambda skipped: (skipped.row, skipped.variant))),
            pictures=self._pictures,
        )
        content = (index.to_json() + "\n").encode()
        # A shard that replaces another: without its index the old one is gone before the new one is there.
        self.index_file.folder.delete(self.index_file.name)
        with self._explained():
            if self._partial is None:
                self._file.seek(0)  # which the opening of its path again shares on some systems
                # The path of a file without a name: it is gone with this process, however that ends.
                self._tar_file.folder.upload(self._tar_file.name, Path(f"/dev/fd/{self._file.fileno()}"))
            else:
                self._partial.replace(self._partial.with_suffix(""))
                self._published = True
        # A local folder syncs itself when the index is written: the tar's name is then on the disk, too.
        if self._partial is None:  # there are no locks
            self._require_alone()
        self.index_file.folder.write(self.index_file.name, content)
        self._published = True
        return index

    def _claimed(self, partial: Path) -> BinaryIO:
        file = _locked(partial)
        try:
            for rows in _overlapping((path.name for path in partial.parent.iterdir()), (self.start, self.stop)):
                tar = partial.with_name(f"{shard_stem(*rows)}.tar")
                # In the order in which a shard comes to be: what changes meanwhile is met one step further.
                if _is_locked(tar.with_suffix(".tar.partial")) or _is_locked(tar):
                    raise ShardBusyError("another process is writing some of the same rows", where=tar)
                if tar.with_suffix(".json").exists():
                    raise self._overlap(rows)
        except BaseException:
            partial.unlink()
            file.close()
            raise
        return file

    def _require_alone(self) -> None:
        """Raise ShardOverlapError, and leave nothing behind, when another shard has got some of the rows meanwhile."""
        indexes = [name for name in self.index_file.folder.listing() if name.endswith(".json")]
        for rows in _overlapping(indexes, (self.start, self.stop)):
            self._tar_file.folder.delete(self._tar_file.name)
            raise self._overlap(rows)

    def _overlap(self, rows: Range) -> ShardOverlapError:
        return ShardOverlapError(
            "another shard holds some of these rows",
            where=File(self.index_file.folder, f"{shard_stem(*rows)}.json"),
            hint="another run writes here with another --shard-size or range; run this one again when it has ended",
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise ShardError(
                "the shard cannot be written",
                where=self._tar_file if self._partial else tempfile.gettempdir(),
                found=error.strerror or error,
                hint="free some space and run again: published shards stay, and nothing else is left behind"
                if full
                else None,
            ) from error


def remove_abandoned(folder: Folder, rows: Range) -> None:
    """Remove what killed runs left of shards that overlap `rows`: partial files, and tars without an index.

    What a run is writing is left to it. Other stores show nothing of an upload that was not completed.
    """
    if not isinstance(folder, LocalFolder) or not folder.root.is_dir():
        return
    for path in sorted(folder.root.iterdir()):
        name = path.name.partition(".")[0]
        stem = parse_stem(name)
        if stem is None or stem[0] >= rows[1] or stem[1] <= rows[0] or not path.is_file():
            continue
        tar = path.with_name(f"{name}.tar")
        if path.name.endswith(".partial") or (path == tar and not tar.with_suffix(".json").exists()):
            # As the shard's next writer would: with its lock, nobody replaces the tar meanwhile.
            with suppress(ShardBusyError), _locked(tar.with_suffix(".tar.partial")):
                tar.with_suffix(".tar.partial").unlink()
                tar.with_suffix(".json.partial").unlink(missing_ok=True)
                if not tar.with_suffix(".json").exists():
                    tar.unlink(missing_ok=True)


def _overlapping(names: Iterable[str], rows: Range) -> set[Range]:
    """The rows of other shards, by the names of their files, that have some of `rows`."""
    stems = {parse_stem(name.partition(".")[0]) for name in names}
    return {stem for stem in stems if stem and stem != rows and stem[0] < rows[1] and rows[0] < stem[1]}


def _locked(partial: Path) -> BinaryIO:
    """The file at `partial`, empty, and locked by this process for as long as it is open.

    Raises:
        ShardBusyError: another process writes the shard, or is between its tar and its index.
    """
    file = open_own(partial)
    mine = False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mine = is_at(file, partial)
        if not mine:
            raise ShardBusyError("another process has just written or abandoned this shard", where=partial)
        if _is_locked(partial.with_suffix("")):
            raise ShardBusyError("another process is publishing this shard", where=partial)
        file.truncate(0)
    except BaseException as error:
        if mine:
            partial.unlink()
        file.close()
        if isinstance(error, BlockingIOError):
            raise ShardBusyError("another process is writing this shard", where=partial) from error
        raise
    return file


def _is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a partial file, under its name or under that of the tar that it became."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


class _HashingFile:
    """A file for writing that knows the SHA-256 and the number of the bytes written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.written = 0

    def write(self, chunk: bytes) -> int:
        self.sha256.update(chunk)
        self.written += len(chunk)
        return self._file.write(chunk)
