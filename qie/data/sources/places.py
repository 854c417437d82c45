"""Folders, globs and {000..999} braces as users write them, local or remote."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

from qie.data.sources.files import File, LocalFile, RemoteFile, row_bytes
from qie.errors import RowError, SourceError, UsageError
from qie.paths import local_path
from qie.stores import Folder, is_glob, open_folder, scheme_of, spelled_out

REMOTE_SCHEMES = ("s3", "gs", "az", "https", "http", "hf")


class Place(Protocol):
    """A folder that holds a source."""

    @property
    def where(self) -> object:
        """Path or URL, for messages."""

    def names(self) -> list[str]:
        """What is in it, in order, folders included."""

    def folders(self) -> list[str]: ...

    def child(self, name: str) -> Place: ...

    def file(self, name: str) -> File: ...

    def within(self, text: str) -> File:
        """The file that a row of a source here names. Raises RowError when it lies elsewhere."""


@dataclass(frozen=True)
class LocalPlace:
    """A local folder.

    Attributes:
        path: the folder.
        also: further folders in which rows may name files.
    """

    path: Path
    also: tuple[Path, ...] = ()

    @property
    def where(self) -> Path:
        return self.path

    def names(self) -> list[str]:
        return sorted(os.listdir(self.path))  # noqa: PTH208 - a million Path objects take long

    def folders(self) -> list[str]:
        return [name for name in self.names() if os.path.isdir(self.path / name)]  # noqa: PTH112 - no link fails here

    def child(self, name: str) -> LocalPlace:
        return LocalPlace(self.path / name)

    def file(self, name: str) -> LocalFile:
        return LocalFile(self.path / name)

    def within(self, text: str) -> LocalFile:
        if "\0" in text:
            raise RowError("a path holds a NUL", where=self.path, found=repr(text[:200]))
        path = os.path.realpath(self.path / text)
        for root in (self.path, *self.also):
            if path.startswith(_real(root)):
                return LocalFile(Path(path))
        raise _outside(text, self.path)


@dataclass(frozen=True)
class RemotePlace:
    folder: Folder

    @property
    def where(self) -> str:
        return self.folder.url

    def names(self) -> list[str]:
        return sorted([*self.folder.listing(), *self.folder.folders()])

    def folders(self) -> list[str]:
        return self.folder.folders()

    def child(self, name: str) -> RemotePlace:
        return RemotePlace(self.folder.child(name))

    def file(self, name: str) -> RemoteFile:
        return RemoteFile(self.folder, name)

    def within(self, text: str) -> RemoteFile:
        name = os.path.normpath(text)
        if name.startswith(("/", "../")) or name in ("..", ".") or "\\" in name or "\0" in name:
            raise _outside(text, self.folder.url)
        return RemoteFile(self.folder, name)


def place_at(place: str | Path) -> Place:
    """The folder that a user names. Touches neither network nor disk. Raises UsageError for a URL of another kind."""
    if scheme_of(str(place)) in REMOTE_SCHEMES:
        return RemotePlace(open_folder(str(place)))
    return LocalPlace(local_path(place))


def file_at(place: str | Path) -> tuple[Place, File]:
    """A file that a user names, and the folder it lies in."""
    if scheme_of(str(place)) in REMOTE_SCHEMES:
        folder, _, name = str(place).rpartition("/")
        return (parent := place_at(folder)), parent.file(name)
    path = local_path(place)
    return LocalPlace(path.parent), LocalFile(path)


def files_at(place: str | Path, ending: str) -> list[tuple[Place, File]]:
    """The files that a file name, folder, glob or brace pattern stands for, in order, each once.

    Raises:
        SourceError: the pattern, or one of the names that its braces spell out, stands for nothing.
        UsageError: see `qie.stores.patterns.expand_braces`.
    """
    found: dict[object, tuple[Place, File]] = {}
    for pattern in spelled_out(str(place)):
        matches = list(_matches(pattern, ending))
        if not matches:
            raise SourceError(
                "no file of the source is there", where=pattern, expected=f"files ending in {ending}", found="nothing"
            )
        found.update((file.where, (parent, file)) for parent, file in matches)
    return list(found.values())


def bytes_named(text: str, place: Place) -> bytes:
    """The bytes behind a path or URL in a row of a source in `place`.

    Raises:
        RowError: it is not there, lies outside of `place`, or is a URL of another kind.
        StoreError: a store is at fault, not the row.
    """
    scheme = scheme_of(text)
    if scheme is None:
        return row_bytes(place.within(text))
    if scheme not in REMOTE_SCHEMES:
        raise RowError(
            f"{scheme}: URLs are not read",
            where=text[:200],
            expected="a path, or a URL of " + ", ".join(f"{known}://" for known in REMOTE_SCHEMES),
        )
    return row_bytes(_file_of(text, scheme))


def _file_of(url: str, scheme: str) -> RemoteFile:
    """The file of a URL in a row. Raises RowError for a URL that names none; touches no network."""
    folder, _, name = url.rpartition("/")
    try:
        if scheme in ("http", "https"):
            if {"?", "#"} & set(url):
                raise UsageError("a URL holds a query", expected="a URL that ends in a file's name")
            name = unquote(name)
        store = _store(folder)
        store.path(name)  # checks it
    except UsageError as error:
        raise RowError(error.what, where=url[:200], expected=error.expected) from error
    return RemoteFile(store, name)


@lru_cache(maxsize=64)
def _store(url: str) -> Folder:
    """One connection for all rows of a folder."""
    return open_folder(url)


@lru_cache(maxsize=64)
def _real(root: Path) -> str:
    return os.path.realpath(root).rstrip("/") + "/"


def _outside(text: str, root: object) -> RowError:
    return RowError(
        "a path outside the source's root",
        where=text[:200],
        expected=f"a path in {root}",
        hint="keep the manifest in a folder above its images; links that lead out of it are not followed",
    )


def _matches(pattern: str, ending: str) -> Iterator[tuple[Place, File]]:
    parent, file = file_at(pattern)
    if isinstance(file, LocalFile):
        if file.path.is_dir():
            yield from _all(LocalPlace(file.path), "*" + ending)
        elif file.path.exists():
            yield parent, file
        elif is_glob(str(file.path)):
            for match in sorted(glob.glob(str(file.path), recursive=True)):  # noqa: PTH207 - takes no absolute pattern
                yield LocalPlace(Path(match).parent), LocalFile(Path(match))
    elif is_glob(file.name):
        yield from _all(parent, file.name)
    elif file.name.lower().endswith(ending):
        yield parent, file
    else:
        yield from _all(place_at(pattern), "*" + ending)


def _all(place: Place, pattern: str) -> Iterator[tuple[Place, File]]:
    for name in place.names():
        if fnmatch.fnmatchcase(name, pattern) and not name.startswith("."):
            yield place, place.file(name)
