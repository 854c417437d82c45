"""The bytes of files that sources and rows name, or an error that says what is at fault.

A row's file that is missing, refused or too large is the row's fault (RowError): a run skips the row. A store or a
machine at fault (StoreError) stops the run, since every further row would fail, too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import unquote

from qie.errors import RowError, SourceError, UsageError
from qie.paths import local_path
from qie.stores import (
    REMOTE_SCHEMES,
    WHOLE_BYTES,
    ChangedError,
    File,
    Folder,
    LocalFolder,
    MissingError,
    RefusedError,
    TooLargeError,
    open_folder,
    scheme_of,
)

MAX_TEXT_BYTES = 2**20
"""The largest file of one prompt. Prompts that can be encoded are far shorter."""


def readable(name: str) -> str:
    """A printable name: line ends, control characters and bytes that are not Unicode become escapes."""
    return name if name.isprintable() else repr(name)[1:-1]


def row_bytes(file: File, most: int = WHOLE_BYTES) -> bytes:
    """A file of one row, whole.

    Raises:
        RowError: it is missing, has more than `most` bytes, or the system refuses it.
        StoreError: the machine or the store is at fault, not the row.
    """
    try:
        return file.read(most=most)
    except TooLargeError as error:
        raise RowError(error.what, where=file, expected=error.expected, found=error.found) from error
    except (MissingError, RefusedError) as error:
        raise RowError(f"a file cannot be read: {error.reason}", where=file) from error


def image_roots(root: str | None, folder: Folder) -> tuple[Folder, ...]:
    """The folders in which the rows of a table in `folder` may name files; relative paths begin at the first.

    Args:
        root: the folder or URL that its owner names, if any.
        folder: of the table.
    """
    if root is None:
        return (folder,)
    return (LocalFolder(local_path(root)) if scheme_of(root) is None else _store(root), folder)


def named_bytes(text: str, roots: Sequence[Folder]) -> bytes:
    """The bytes of the file that a path or URL in a row names.

    Args:
        text: a path in `roots[0]`, or a URL.
        roots: folders in which a row may name files.

    Raises:
        RowError: it is missing, is outside `roots`, or is a URL of another kind.
        StoreError: a store is at fault, not the row.
    """
    scheme = scheme_of(text)
    if scheme is None:
        return row_bytes(_file_within(text, roots))
    if scheme not in REMOTE_SCHEMES:
        raise RowError(
            f"{scheme}: URLs are not read",
            where=text[:200],
            expected="a path, or a URL of " + ", ".join(f"{known}://" for known in REMOTE_SCHEMES),
        )
    return row_bytes(_file_of(text, scheme))


def source_size(file: File) -> int:
    """The size of a file that holds rows, in bytes. Raises SourceError when it is missing or refused."""
    try:
        size = file.size()
    except (MissingError, RefusedError) as error:
        raise SourceError(f"the source cannot be read: {error.reason}", where=file) from error
    if size is None:
        raise SourceError("the source does not exist", where=file)
    return size


def source_bytes(file: File, start: int, stop: int, size: int) -> bytes:
    """The bytes [start, stop) of a file that had `size` bytes when its source was opened.

    Raises:
        SourceError: a local file has another size now, or the file is gone.
        StoreError: it cannot be read.
    """
    try:
        return file.read(start, stop, size=size)
    except (ChangedError, MissingError) as error:
        raise SourceError(
            "the source changed since it was opened",
            where=file,
            expected=f"{size} bytes",
            found=error.found or "nothing",
            hint="run again",
        ) from error


def _file_within(text: str, roots: Sequence[Folder]) -> File:
    """The file in `roots` that a path names, links resolved. Raises RowError when it lies elsewhere."""
    folder = roots[0]
    if isinstance(folder, LocalFolder):
        if "\0" in text:
            raise RowError("a path contains NUL", where=folder.root, found=repr(text[:200]))
        path = os.path.realpath(folder.root / text)
        for root in (root for root in roots if isinstance(root, LocalFolder)):
            resolved = _resolved(root)
            if path.startswith(f"{resolved.url}/".replace("//", "/")):
                return File(resolved, path.removeprefix(resolved.url).lstrip("/"))
    else:
        name = os.path.normpath(text)
        if not name.startswith(("/", "../")) and name not in ("..", ".") and "\\" not in name and "\0" not in name:
            return File(folder, name)
    raise RowError(
        "a path outside the source's root",
        where=text[:200],
        expected=f"a path in {folder}",
        hint="name the folder of the images in data.root, or keep the manifest in a folder above them; links that lead "
        "out of it are not followed",
    )


def _file_of(url: str, scheme: str) -> File:
    """The file of a URL in a row. Raises RowError for a URL that names none; touches no network."""
    folder, _, name = url.rpartition("/")
    try:
        if scheme in ("http", "https"):
            if {"?", "#"} & set(url):
                raise UsageError("a URL has a query", expected="a URL that ends in a file's name")
            name = unquote(name)
        store = _store(folder)
        store.path(name)  # checks it
    except UsageError as error:
        raise RowError(error.what, where=url[:200], expected=error.expected) from error
    return File(store, name)


@lru_cache(maxsize=64)
def _store(url: str) -> Folder:
    """One connection for all rows of a folder."""
    return open_folder(url)


@lru_cache(maxsize=64)
def _resolved(root: LocalFolder) -> LocalFolder:
    """A local folder under its real path."""
    return LocalFolder(root.root.resolve())
