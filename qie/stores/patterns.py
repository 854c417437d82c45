"""Patterns that stand for many names: braces, which spell names out, and globs, which match what is there."""

from __future__ import annotations

import os
import re
from itertools import product
from math import prod

from qie.errors import UsageError
from qie.paths import local_path
from qie.stores.folder import scheme_of

MAX_NAMES = 1_000_000

_GLOB = re.compile(r"[*?\[]")
_NUMBERS = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.(-?\d{1,18}))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?\d{1,18}))?")


def is_glob(pattern: str) -> bool:
    """Whether a pattern matches what is there, instead of naming it."""
    return _GLOB.search(pattern) is not None


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
    """The names of the brace that opens at `at`, and where the pattern goes on behind it."""
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
    """What {text} counts up or down; None if it is no range."""
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
            "the braces of a pattern stand for too many names", where=pattern, expected=f"at most {MAX_NAMES}"
        )


def _unbalanced(pattern: str) -> UsageError:
    return UsageError("the braces of a pattern do not match", where=pattern, expected="such as {a,b} or {000..999}")
