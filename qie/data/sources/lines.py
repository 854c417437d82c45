"""Rows in text files: where they start, and their names."""

from __future__ import annotations

import csv
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from qie.data.sources.resolve import readable, source_bytes
from qie.errors import RowError, SourceError
from qie.stores import File

BOM = b"\xef\xbb\xbf"
MAX_LINE_BYTES = 256 * 2**20
MAX_FIELD_CHARS = 16 * 2**20
CHUNK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class TextRows:
    """Where the rows of a text file are.

    Attributes:
        file: the file; its paths are relative to its folder.
        size: bytes of the file when it was opened.
        starts: [rows + 1] offset of each row, and of the end.
        lines: [rows] the line on which each row starts, from 1.
    """

    file: File
    size: int
    starts: NDArray[np.int64] = field(compare=False, repr=False)
    lines: NDArray[np.int64] = field(compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.lines)

    def content(self, index: int) -> bytes:
        """The bytes of a row. Raises RowError when they are too many, SourceError when the file changed."""
        index = range(len(self))[index]
        start, stop = int(self.starts[index]), int(self.starts[index + 1])
        if stop - start > MAX_LINE_BYTES:
            raise RowError(
                "a row is too long", where=self.where(index), expected=f"≤ {MAX_LINE_BYTES} bytes", found=stop - start
            )
        return source_bytes(self.file, start, stop, self.size)

    def where(self, index: int) -> str:
        return f"{self.file}, line {self.lines[index]}"

    def label(self, index: int) -> str:
        return f"{readable(self.file.name)}:{self.lines[index]}"

    def check_names(self, hashes: array[int], name: Callable[[int], str]) -> None:
        """Raise SourceError when two rows have one name; see `require_unique`."""
        lines = self.lines
        require_unique(
            np.frombuffer(hashes, np.int64), name, self.file, lambda a, b: f"on lines {lines[a]} and {lines[b]}"
        )


class Lines:
    """The lines of a UTF-8 file as text, and how far they have been read.

    Attributes:
        offset: bytes of the lines read so far.
        number: of lines read so far.
    """

    def __init__(self, stream: BinaryIO, where: object) -> None:
        self.offset, self.number = 0, 0
        self._stream, self._where = stream, where

    def __iter__(self) -> Iterator[str]:
        """Raises SourceError for a line that is not UTF-8, or too long."""
        while raw := self._stream.readline(MAX_LINE_BYTES):
            if len(raw) == MAX_LINE_BYTES:
                raise SourceError("a line is too long", where=f"{self._where}, line {self.number + 1}")
            try:
                text = raw.decode("utf-8-sig" if self.offset == 0 else "utf-8")
            except UnicodeDecodeError as error:
                raise self._not_utf8(raw, error) from error
            self.offset += len(raw)
            self.number += 1
            yield text

    def _not_utf8(self, raw: bytes, error: UnicodeDecodeError) -> SourceError:
        other = "utf-16" if self.offset == 0 and raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin1"
        at = self.offset + error.start + (len(BOM) if self.offset == 0 and raw.startswith(BOM) else 0)
        return SourceError(
            "the file is not UTF-8",
            where=f"{self._where}, line {self.number + 1}, byte {at}",
            found=f"byte {error.object[error.start]:#x}",
            hint=f"convert it, for example with: iconv -f {other} -t utf-8 old > new",
        )


def line_starts(stream: BinaryIO) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Offsets of the lines that are not blank, and of the file's end; and the lines' numbers, from 1."""
    ends = []
    offset = skipped = len(BOM) if stream.read(len(BOM)) == BOM else 0
    stream.seek(offset)
    while chunk := stream.read(CHUNK_BYTES):
        ends.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + (offset + 1))
        offset += len(chunk)
    starts = np.concatenate([[skipped], *ends, [offset]]).astype(np.int64)
    lengths = np.diff(starts)
    full = np.flatnonzero(lengths > 0)
    # Only short lines are looked at: a longer one of spaces alone is a row that cannot be parsed, and is reported.
    short = np.flatnonzero((lengths > 0) & (lengths <= 8)).tolist()
    blank = [line for line in short if _is_blank(stream, starts, line)]
    full = np.setdiff1d(full, np.array(blank, np.int64), assume_unique=True)
    return np.append(starts[full], offset), full + 1


def require_unique(
    hashes: NDArray[np.int64],
    name: Callable[[int], str],
    where: object,
    places: Callable[[int, int], str] = "in rows {} and {}".format,
) -> None:
    """Raise SourceError when two rows have one name.

    Args:
        hashes: a hash of each row's name, and of its index where it has none; names themselves would fill memory.
        name: the name of a row, for those of equal hashes.
        where: of the rows.
        places: of two rows, in words.
    """
    for first, second in equal_pairs(hashes):
        if name(first) == name(second):
            raise SourceError(
                "two rows have the same name",
                where=where,
                found=f"{name(first)!r} {places(first, second)}",
                hint="give each row its own name, or rename the column",
            )


def equal_pairs(values: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Pairs of positions of neighbouring equal values, sorted by value."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    for at in np.flatnonzero(ordered[1:] == ordered[:-1]):
        yield int(order[at]), int(order[at + 1])


@contextmanager
def wide_fields() -> Iterator[None]:
    """Let the csv module read fields of up to 16 Mi characters. The limit is the process's; the last restores it."""
    with _wide.lock:
        if _wide.users == 0:
            _wide.former = csv.field_size_limit(MAX_FIELD_CHARS)
        _wide.users += 1
    try:
        yield
    finally:
        with _wide.lock:
            _wide.users -= 1
            if _wide.users == 0:
                csv.field_size_limit(_wide.former)


@dataclass
class _Wide:
    lock: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0
    former: int = 0


_wide = _Wide()


def _is_blank(stream: BinaryIO, starts: NDArray[np.int64], line: int) -> bool:
    stream.seek(int(starts[line]))
    return not stream.read(int(starts[line + 1] - starts[line])).strip()
