"""Patterns that stand for many names: braces, which spell names out, and globs, which match what is there."""

from __future__ import annotations

import glob
import os
import re
from fnmatch import fnmatchcase
from itertools import product
from math import prod
from pathlib import Path

from qie.errors import UsageError
from qie.paths import local_path
from qie.stores.contract import Folder
from qie.stores.disk import LocalFolder
from qie.stores.urls import File, open_folder, scheme_of

MAX_NAMES = 1_000_000

_GLOB = re.compile(r"[*?\[]")
_NUMBERS = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.(-?\d{1,18}))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?\d{1,18}))?")


def is_glob(pattern: str) -> bool:
    """Whether a name is a pattern that existing files match."""
    return _GLOB.search(pattern) is not None


def matching_files(place: str, ending: str) -> list[File]:
    """The files that a file's name, a folder or a glob stands for, in order; of a folder, those with the ending.

    In a URL, a glob may stand in the last part only, and a name with the ending counts as a file's without a request.
    """
    if scheme_of(place) is None:
        path = local_path(place)
        if path.is_dir():
            return files_in(LocalFolder(path), "*" + ending)
        if path.exists():
            return [File(LocalFolder(path.parent), path.name)]
        return glob_files(str(path)) if is_glob(str(path)) else []
    folder, _, name = place.rpartition("/")
    if is_glob(name):
        return files_in(open_folder(folder), name)
    if name.lower().endswith(ending):
        return [File(open_folder(folder), name)]
    return files_in(open_folder(place), "*" + ending)


def glob_files(pattern: str) -> list[File]:
    """The local files that a glob matches, in order; `**` matches folders of any depth."""
    matches = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
    return [File(LocalFolder(path.parent), path.name) for path in map(Path, matches)]


def files_in(folder: Folder, pattern: str) -> list[File]:
    """The files of a folder whose names match, in order, without hidden ones."""
    names = (name for name in folder.names() if fnmatchcase(name, pattern) and not name.startswith("."))
    return [File(folder, name) for name in names]


def spelled_out(place: str) -> list[str]:
    """The names that a place's braces spell out. A local place that is there is its own name, whatever is in it."""
    if scheme_of(place) is None and os.path.exists(local_path(place)):  # noqa: PTH110 - Path's raises for long names
        return [place]
    return expand_braces(place)


def expand_braces(pattern: str) -> list[str]:
    """The names that a pattern's braces spell out, in order, as bash does: {a,b}, {000..999}, {0..20..5}, {a..e}.

    Braces that hold neither a comma nor a range stand for themselves. Names are counted before they are made.

    Raises:
        UsageError: a brace lacks its partner, or there are more than `MAX_NAMES` names.
    """
    try:
        names, at = _sequence(pattern, 0, ends="")
    except RecursionError:
        raise _unbalanced(pattern) from None
    if at < len(pattern):
        raise _unbalanced(pattern)
    return names


def _sequence(pattern: str, at: int, ends: str) -> tuple[list[str], int]:
    """The names of what stands from `at` on, up to one of `ends` or a brace that closes nothing."""
    parts: list[list[str]] = []
    while at < len(pattern) and pattern[at] not in "}" + ends:
        if pattern[at] == "{":
            part, at = _brace(pattern, at)
        else:
            end = next((n for n in range(at, len(pattern)) if pattern[n] in "{}" + ends), len(pattern))
            part, at = [pattern[at:end]], end
        parts.append(part)
    _limited(prod(map(len, parts)), pattern)
    return list(map("".join, product(*parts))), at


def _brace(pattern: str, at: int) -> tuple[list[str], int]:
    """The names of the brace that opens at `at`, and where the pattern goes on after it."""
    start = at
    alternatives: list[list[str]] = []
    while not alternatives or pattern[at] == ",":
        names, at = _sequence(pattern, at + 1, ends=",")
        alternatives.append(names)
        if at == len(pattern):
            raise _unbalanced(pattern)
    if len(alternatives) == 1:
        counted = _range(pattern, pattern[start + 1 : at])
        return counted or [f"{{{name}}}" for name in alternatives[0]], at + 1
    _limited(sum(map(len, alternatives)), pattern)
    return [name for names in alternatives for name in names], at + 1


def _range(pattern: str, text: str) -> list[str] | None:
    """The names of the range {text}, upwards or downwards; None if it is no range."""
    found = _NUMBERS.fullmatch(text) or _LETTERS.fullmatch(text)
    if found is None:
        return None
    letters = found[1].isalpha()
    first, last = (ord(end) if letters else int(end) for end in found.group(1, 2))
    step = abs(int(found[3] or 1)) or 1
    _limited(abs(last - first) // step + 1, pattern)
    numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    if letters:
        return list(map(chr, numbers))
    padded = any(re.match(r"-?0\d", end) for end in found.group(1, 2))
    width = max(map(len, found.group(1, 2))) if padded else 0
    return [f"{number:0{width}d}" for number in numbers]


def _limited(count: int, pattern: str) -> None:
    if count > MAX_NAMES:
        raise UsageError(
            "the braces of a pattern expand to too many names", where=pattern, expected=f"at most {MAX_NAMES}"
        )


def _unbalanced(pattern: str) -> UsageError:
    return UsageError("the braces of a pattern do not match", where=pattern, expected="such as {a,b} or {000..999}")
