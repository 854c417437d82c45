"""Where shards lie: directories, globs and {000..999} braces, on local disks.

Nothing here runs a program: a `pipe:` URL is refused, whatever it says.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from braceexpand import braceexpand

from qie.errors import UsageError
from qie.paths import local_path
from qie.shards.index import parse_stem

_URL = re.compile(r"(pipe(?=:)|[a-z][a-z0-9+.-]*(?=://))", re.IGNORECASE)

MAX_PATTERNS = 1_000_000


def find_indexes(places: Iterable[str | Path]) -> list[Path]:
    """The index files of all shards in `places`, in the order of their rows within each place.

    Args:
        places: directories, tar files, globs, or patterns with braces such as `shards/{00000000..00000640}*.tar`.

    Raises:
        UsageError: a place is of a kind that is not read, or nothing was found in it; says what is there.
    """
    indexes: list[Path] = []
    for place in places:
        found = [index for pattern in _patterns(str(place)) for index in _expand(pattern)]
        if not found:
            raise UsageError(
                "no shards found",
                where=place,
                expected="tars with an index beside each, such as 00000000-00000064.tar and .json",
                found=_what_is_there(local_path(place)),
                hint="correct the path, or write shards with qie-precompute",
            )
        indexes += found
    return list({index.resolve(): index for index in indexes}.values())


def published(directory: Path) -> list[Path]:
    """Index files in a directory, in the order of their rows. An empty or missing directory has none."""
    found = [(parsed, path) for path in directory.glob("*.json") if (parsed := parse_stem(path.stem))]
    return [path for _, path in sorted(found)]


def refuse_url(place: str) -> None:
    """Raise UsageError when `place` is a URL."""
    scheme = _URL.match(place)
    if scheme is None:
        return
    why = "because they run a shell command" if scheme[1].lower() == "pipe" else "by this version"
    raise UsageError(
        f"{scheme[1]}: URLs are not read {why}",
        where=place,
        expected="a local path",
        hint="copy the shards and their indexes to a local folder first",
    )


def _patterns(place: str) -> list[str]:
    try:
        patterns = list(islice(braceexpand(place), MAX_PATTERNS + 1))
    except ValueError as error:
        raise UsageError("the braces of a pattern do not match", where=place, expected="such as {000..999}") from error
    if len(patterns) > MAX_PATTERNS:
        raise UsageError("the braces of a pattern stand for too many names", where=place, expected=f"≤ {MAX_PATTERNS}")
    return patterns


def _expand(pattern: str) -> list[Path]:
    refuse_url(pattern)
    path = local_path(pattern)
    if path.is_dir():
        return published(path)
    if path.suffix not in (".tar", ".json"):
        return []
    matches = [Path(match) for match in glob.glob(str(path))]  # noqa: PTH207 - Path.glob takes no absolute pattern
    found = {(match.parent, rows, match.with_suffix(".json")) for match in matches if (rows := parse_stem(match.stem))}
    return [index for _, _, index in sorted(found) if index.is_file()]


def _what_is_there(path: Path) -> str:
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        return (
            ", ".join(names[:6]) + (f", … ({len(names)} files)" if len(names) > 6 else "")
            if names
            else "an empty folder"
        )
    return "nothing that matches" if path.parent.is_dir() else f"no folder {path.parent}"
