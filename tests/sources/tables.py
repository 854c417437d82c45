"""Folders of images, tables and tars written for a test, and a bucket that counts what is asked of it."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from qie.data.sources import Source, open_source
from qie.errors import QieError
from qie.stores import WHOLE_BYTES, LocalFolder, MissingError

COLUMNS = ("path_target", "path_control", "prompt")


class Table:
    """A folder of images, and a table of rows in it. Images hold what they are called."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(exist_ok=True)
        for name in ("t0", "t1", "t2", "c0", "c1", "c2", "d0", "d1", "m0"):
            self.image(f"images/{name}.png")

    def image(self, name: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
        return path

    def csv(self, rows: Iterable[Sequence[str]], columns: Sequence[str] = COLUMNS, name: str = "rows.csv") -> Path:
        text = io.StringIO(newline="")
        csv.writer(text).writerows([columns, *rows])
        return self.write(name, text.getvalue())

    def jsonl(self, rows: Iterable[object], name: str = "rows.jsonl") -> Path:
        return self.write(name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.root / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path


def paths(number: int, prompt: str | None = None) -> tuple[str, str, str]:
    """Row `number` of a table: target, control, prompt."""
    return f"images/t{number}.png", f"images/c{number}.png", f"do {number}" if prompt is None else prompt


def values(number: int, **more: object) -> dict[str, object]:
    """The same as an object."""
    return dict(zip(COLUMNS, paths(number), strict=True)) | more


def names(source: Source) -> list[str]:
    return [source.name(index) for index in range(len(source))]


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], **settings: object) -> Path:
    path.write_bytes(packed(members, **settings))
    return path


def packed(members: Iterable[tuple[str, bytes]], **settings: object) -> bytes:
    """A tar of members."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", **settings) as tar:  # type: ignore[call-overload]
        for name, content in members:
            facts = tarfile.TarInfo(name)
            facts.size = len(content)
            tar.addfile(facts, io.BytesIO(content))
    return file.getvalue()


def refused(error: type[QieError], place: object, index: int | None = None) -> QieError:
    """What a source, or a row of it, is refused with."""
    with pytest.raises(error) as caught:
        source = open_source(place)  # type: ignore[arg-type]
        if index is not None:
            source.read(index)
    assert type(caught.value) is error
    return caught.value


@dataclass(frozen=True)
class Bucket:
    """A folder that looks like a remote one."""

    url: str
    folder: LocalFolder
    asked: list[str] = field(default_factory=list, compare=False)
    faults: dict[str, Exception] = field(default_factory=dict, compare=False)

    def path(self, name: str) -> None:
        self.folder.path(name)

    def child(self, name: str) -> Bucket:
        return Bucket(f"{self.url}/{name}", self.folder.child(name), self.asked, self.faults)

    def names(self) -> list[str]:
        return self.folder.names()

    def listing(self) -> Mapping[str, int]:
        return self.folder.listing()

    def folders(self) -> list[str]:
        return self.folder.folders()

    def size(self, name: str) -> int | None:
        return self.folder.size(name)

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, most: int = WHOLE_BYTES, size: int | None = None
    ) -> bytes:
        self.asked.append(f"{name} {start}-{stop}")
        if name in self.faults:
            raise self.faults[name]
        if self.size(name) is None:
            raise MissingError("no such file", where=name)
        return self.folder.read(name, start, stop, most=most)
