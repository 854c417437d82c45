"""Rows of CSV files. Opening records where each row starts; a row is parsed on request."""

from __future__ import annotations

import csv
import io
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from qie.data.sources.cells import Cells, Roles, checked_roles
from qie.data.sources.layouts import DEFAULT, Layout
from qie.data.sources.lines import Lines, TextRows, wide_fields
from qie.data.sources.resolve import image_roots, source_size
from qie.errors import RowError, SourceError
from qie.stores import File
from qie.types import Row


@dataclass(frozen=True)
class CsvSource:
    """Rows of a CSV file: UTF-8, divided by commas, with a header. Cells with commas, quotes or newlines are quoted."""

    rows: TextRows
    header: tuple[str, ...]
    roles: Roles

    @classmethod
    def open(cls, file: File, layout: Layout = DEFAULT) -> CsvSource:
        """Note where the rows start.

        Raises:
            SourceError: the file is missing, is not UTF-8, lacks a column, has one twice, holds no row, does not
                close a quote, or names two rows the same.
        """
        size = source_size(file)
        starts, lines, hashes = array("q"), array("q"), array("q")
        with wide_fields(), file.open() as stream:
            text = Lines(stream, file)
            records = _records(text, file)
            header = _header(next(records, None), file)
            roles = checked_roles(header, file, _divided_otherwise(header), layout=layout)
            name = header.index(roles.name) if roles.name else len(header)
            for start, line, cells in records:
                starts.append(start)
                lines.append(line)
                named = isinstance(cells, list) and len(cells) > name and cells[name] != ""
                hashes.append(hash(cells[name]) if isinstance(cells, list) and named else len(hashes))
            starts.append(text.offset)
        if not lines:
            raise SourceError("the CSV holds no rows", where=file, found="only a header")
        rows = TextRows(file, size, np.array(starts), np.array(lines))
        source = cls(rows, header, roles)
        if roles.name:
            rows.check_names(hashes, source.name)
        return source

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        if self.roles.name is None:
            return self.rows.label(index)
        try:
            return self.cells(index).name(self.rows.label(index))
        except RowError:
            return self.rows.label(index)

    def read(self, index: int) -> Row:
        cells = self.cells(index)
        return cells.row(range(len(self))[index], cells.name(self.rows.label(index)))

    def cells(self, index: int) -> Cells:
        """The cells of a row, without its images. Raises RowError when it cannot be parsed."""
        where = self.rows.where(index)
        try:
            text = self.rows.content(index).decode()
            # Divided as when it was opened: at \n alone, not at what else Unicode calls the end of a line.
            with wide_fields():
                cells = next(csv.reader(io.StringIO(text, newline="\n"), strict=True), [])
        except (csv.Error, UnicodeDecodeError) as error:
            raise RowError("the row is not valid CSV", where=where, found=str(error)) from error
        if len(cells) != len(self.header):
            raise RowError(
                "the row and the header have different numbers of cells",
                where=where,
                expected=f"{len(self.header)} cells",
                found=f"{len(cells)} cells",
                hint="quote cells that hold commas or newlines",
            )
        roots = image_roots(self.roles.layout.root, self.rows.file.folder)
        return Cells(dict(zip(self.header, cells, strict=True)), self.roles, where, roots)


def _records(lines: Lines, file: File) -> Iterator[tuple[int, int, list[str] | csv.Error]]:
    """Offset, first line and cells of each record, or the fault of a one-line record, which is raised when it is read.

    Raises SourceError when the fault takes several lines: an open quote swallows rows, and where it should have been
    closed cannot be known.
    """
    reader = csv.reader(iter(lines), strict=True)
    while True:
        start, line = lines.offset, lines.number + 1
        cells: list[str] | csv.Error
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if lines.number > line:
                raise SourceError(
                    "a quoted cell does not end properly",
                    where=f"{file}, line {line}",
                    found=str(error),
                    hint='inside a quoted cell, write each quote twice: ""',
                ) from error
            cells = error
        if cells != []:
            yield start, line, cells


def _header(record: tuple[int, int, list[str] | csv.Error] | None, file: File) -> tuple[str, ...]:
    if record is None or isinstance(record[2], csv.Error):
        found = "nothing" if record is None else str(record[2])
        raise SourceError("the CSV has no header", where=file, expected="a line of column names", found=found)
    header = tuple(cell.strip() for cell in record[2])
    twice = sorted({name for name in header if name and header.count(name) > 1})
    if twice:
        raise SourceError("two columns have the same name", where=file, found=", ".join(twice))
    return header


def _divided_otherwise(header: tuple[str, ...]) -> str | None:
    other = next((mark for mark in (";", "\t", "|") if len(header) == 1 and mark in header[0]), None)
    return f"divide columns by commas instead of {other!r}" if other else None
