"""Rows of parquet files, read by row groups."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qie.data.sources.cells import Cells, Roles, checked_roles
from qie.data.sources.layouts import DEFAULT, Layout
from qie.data.sources.lines import require_unique
from qie.data.sources.resolve import image_roots, readable, source_size
from qie.data.sources.source import library
from qie.errors import RowError, SourceError
from qie.stores import File
from qie.types import Row

CACHED_GROUPS = 2
BUFFER_BYTES = 64 * 2**10
"""Of a remote file: pyarrow asks for the parts of a file that it needs, each as a whole."""


@dataclass(frozen=True)
class ParquetFile:
    """One file.

    Attributes:
        file: the file; its paths are relative to its folder.
        size: its bytes when it was opened.
        start: the index of its first row in the source.
        starts: the index of each row group's first row in the file, and the number of rows.
        names: the column of the rows' names, if there is one.
    """

    file: File
    size: int
    start: int
    starts: tuple[int, ...]
    names: Any = field(compare=False, repr=False)

    def label(self, row: int) -> str:
        name = self.names[row].as_py() if self.names is not None else None
        return readable(f"{self.file.name}[{row}]" if name in (None, "") else str(name))


@dataclass(frozen=True)
class ParquetSource:
    """Rows of one or more parquet files of equal columns.

    Parquet cannot be read by the row: a row group is read whole, and the last ones are kept for neighbouring rows.
    Rows in order cost little; rows in random order cost a row group each: for live training, write small ones.
    """

    files: tuple[ParquetFile, ...]
    roles: Roles
    notes: tuple[str, ...] = field(default=(), compare=False)
    groups: Groups = field(default_factory=lambda: Groups(), compare=False, repr=False)

    @classmethod
    def open(cls, files: Sequence[File], layout: Layout = DEFAULT, note: str = "") -> ParquetSource:
        """Read the files' footers, and the rows' names if they have any. A note is for the user, see `source_notes`.

        Raises:
            SourceError: a file is missing, is not Parquet, has other columns than the first or lacks one, there are
                no rows, two have one name, or pyarrow is not installed.
        """
        opened: list[ParquetFile] = []
        columns: list[str] = []
        roles: Roles | None = None
        for file in files:
            with _opened(file) as parquet:
                found = parquet.schema_arrow.names
                columns = columns or found
                if found != columns:
                    raise SourceError(
                        "the Parquet files have different columns", where=file, expected=columns, found=found
                    )
                roles = roles or checked_roles(columns, file, layout=layout)
                counts = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
                start = opened[-1].start + opened[-1].starts[-1] if opened else 0
                starts = tuple(np.cumsum([0, *counts]).tolist())
                names = _names(parquet, roles.name, file) if roles.name else None
                opened.append(ParquetFile(file, source_size(file), start, starts, names))
        if roles is None or not opened[-1].start + opened[-1].starts[-1]:
            raise SourceError("the Parquet file holds no rows", where=files[0] if files else None)
        source = cls(tuple(opened), roles, (note,) if note else ())
        if roles.name:
            hashes = (hash(str(name)) for file in opened for name in file.names.to_pylist())
            require_unique(np.fromiter(hashes, np.int64, len(source)), source.name, files[0])
        return source

    def __len__(self) -> int:
        return self.files[-1].start + self.files[-1].starts[-1]

    def name(self, index: int) -> str:
        file, row = self._find(index)
        return file.label(row)

    def read(self, index: int) -> Row:
        return self.cells(index).row(range(len(self))[index], self.name(index))

    def _find(self, index: int) -> tuple[ParquetFile, int]:
        index = range(len(self))[index]
        file = self.files[bisect_right(self.files, index, key=lambda file: file.start) - 1]
        return file, index - file.start

    def cells(self, index: int) -> Cells:
        """The cells of a row, without its images. Raises RowError when it cannot be parsed."""
        file, row = self._find(index)
        where = f"{file.file}, row {row}"
        group = bisect_right(file.starts, row) - 1
        table = self.groups.read(file, group, self.roles.used(), where)
        values = table.slice(row - file.starts[group], 1).to_pylist()[0]
        return Cells(values, self.roles, where, image_roots(self.roles.layout.root, file.file.folder))


class Groups:
    """The row groups that were read last, for all threads of a process; another process starts with none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: OrderedDict[tuple[int, int], Any] = OrderedDict()

    def __reduce__(self) -> tuple[type[Groups], tuple[()]]:
        return Groups, ()

    def read(self, file: ParquetFile, group: int, columns: list[str], where: str) -> Any:
        """Row group `group` of a file. A thread that asks for one that another thread reads waits for it.

        Raises:
            RowError: it is damaged.
            SourceError: the file changed.
        """
        key = (file.start, group)
        with self._lock:
            if key not in self._tables:
                while len(self._tables) >= CACHED_GROUPS:  # before reading: there are never more in memory
                    self._tables.popitem(last=False)
                if source_size(file.file) != file.size:
                    raise SourceError("the source changed since it was opened", where=file.file, hint="run again")
                try:
                    with _opened(file.file) as parquet:
                        self._tables[key] = parquet.read_row_group(group, columns=columns)
                except (OSError, library("pyarrow").ArrowException) as error:
                    raise RowError("the Parquet file is damaged", where=where, found=str(error)) from error
            self._tables.move_to_end(key)
            return self._tables[key]


@contextmanager
def _opened(file: File) -> Iterator[Any]:
    """The file, opened by pyarrow. Raises SourceError when it is missing or is not Parquet."""
    reader = library("pyarrow.parquet")
    source_size(file)
    with file.open(BUFFER_BYTES) as stream:
        try:
            parquet = reader.ParquetFile(stream)
        except (OSError, library("pyarrow").ArrowException) as error:
            raise SourceError("the file is not Parquet", where=file, found=str(error)) from error
        yield parquet


def _names(parquet: Any, column: str, file: File) -> Any:
    try:
        return parquet.read(columns=[column])[column]
    except (OSError, library("pyarrow").ArrowException) as error:
        raise SourceError("the Parquet file is damaged", where=file, found=str(error)) from error
