"""Rows of JSONL files. Opening records where each line starts; a line is parsed on request."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from qie.data.sources.cells import Cells, checked_roles, roles_of
from qie.data.sources.layouts import DEFAULT, Layout
from qie.data.sources.lines import TextRows, line_starts
from qie.data.sources.resolve import image_roots, source_size
from qie.errors import RowError, SourceError
from qie.stores import File
from qie.types import Row

_LOOKED_AT = 100  # lines whose keys are looked at when a file is opened


@dataclass(frozen=True)
class JsonlSource:
    """Rows of a JSONL file: UTF-8, one JSON object per line. The keys of a line name its content."""

    rows: TextRows
    named: bool
    layout: Layout = DEFAULT

    @classmethod
    def open(cls, file: File, layout: Layout = DEFAULT) -> JsonlSource:
        """Note where the lines start, and look at the keys of the first ones.

        Raises:
            SourceError: the file is missing, holds no line of JSON, lacks a key, or names two rows the same.
        """
        size = source_size(file)
        with file.open() as stream:
            starts, lines = line_starts(stream)
        if not len(lines):
            raise SourceError("the JSONL holds no rows", where=file, found="nothing" if size == 0 else "blank lines")
        rows = TextRows(file, size, starts, lines)
        source = cls(rows, named=False, layout=layout)
        if checked_roles(source._first_keys(), file, layout=layout).name:
            source = cls(rows, named=True, layout=layout)
            rows.check_names(array("q", source._hashes()), source.name)
        return source

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        try:
            return self.cells(index).name(self.rows.label(index)) if self.named else self.rows.label(index)
        except RowError:
            return self.rows.label(index)

    def read(self, index: int) -> Row:
        cells, label = self.cells(index), self.rows.label(index)
        return cells.row(range(len(self))[index], cells.name(label) if self.named else label)

    def cells(self, index: int) -> Cells:
        """The cells of a row, without its images. Raises RowError when it cannot be parsed."""
        where = self.rows.where(index)
        values = _parsed(self.rows.content(index), where)
        try:
            roles = roles_of(tuple(values), self.layout)
            return Cells(values, roles, where, image_roots(self.layout.root, self.rows.file.folder))
        except ValueError as error:
            raise RowError("two keys have the same name", where=where, found=str(error)) from error

    def _first_keys(self) -> list[str]:
        """The keys of the first lines, each in one spelling. Raises SourceError when none of them is a row."""
        keys: dict[str, str] = {}
        fault: RowError | None = None
        for index in range(min(len(self), _LOOKED_AT)):
            try:
                for key in _parsed(self.rows.content(index), self.rows.where(index)):
                    keys.setdefault(key.strip().lower(), key)
            except RowError as error:
                fault = fault or error
        if fault and not keys:
            raise SourceError(
                "no line holds a row",
                where=fault.where,
                expected="a JSON object per line",
                found=fault.found or fault.what,
            )
        if len(self) > _LOOKED_AT:  # what a row may lack may come later
            names = self.layout.columns
            rare = [name for name in (names.mask, names.rejected, *(names.controls or ())[1:]) if name is not None]
            for name in rare:
                keys.setdefault(name.strip().lower(), name)
        return list(keys.values())

    def _hashes(self) -> Iterator[int]:
        """A hash of each row's name, or its index; read in one go."""
        with self.rows.file.open() as stream:
            for index, (start, stop) in enumerate(pairwise(self.rows.starts.tolist())):
                stream.seek(start)
                try:
                    values = json.loads(stream.read(stop - start))
                    name = values.get(roles_of(tuple(values), self.layout).name) if isinstance(values, dict) else None
                except (ValueError, RecursionError):
                    name = None
                yield hash(str(name)) if name else index


def _parsed(content: bytes, where: str) -> dict[str, object]:
    """A line of JSON. Raises RowError when it is not an object, or has a key twice."""
    try:
        value = json.loads(content.decode(), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise RowError("the line is not UTF-8", where=where, found=f"byte {error.object[error.start]:#x}") from error
    except (ValueError, RecursionError) as error:
        raise RowError("the line is not valid JSON", where=where, found=str(error)) from error
    if not isinstance(value, dict):
        raise RowError("the line is not a JSON object", where=where, found=type(value).__name__)
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key appears twice")
    return values
