"""The index beside each tar: what the shard holds, where, and what it leaves out.

A tar without its index does not exist. The index is published last, so it vouches for a complete tar.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qie.errors import ShardError
from qie.recipe import Recipe, canonical_json
from qie.shards.record import FORMAT_VERSION
from qie.types import Shape

_STEM = re.compile(r"(\d{8,})-(\d{8,})")


@dataclass(frozen=True)
class Member:
    """Where a record lies in its tar, in bytes, and its SHA-256."""

    offset: int
    size: int
    sha256: str


@dataclass(frozen=True)
class Entry:
    """One row that is in the shard.

    Attributes:
        row: index of the row in its source.
        name: what the source calls it.
        key: content key; rows of equal content share one member.
        shape: latent sizes.
        tokens, empty_tokens: lengths of the prompt's and of the null prompt's embedding.
        tensor_bytes: what each tensor takes in the record.
        clipped: values clipped to FP16's range.
    """

    row: int
    name: str
    key: str
    shape: Shape
    tokens: int
    empty_tokens: int
    tensor_bytes: dict[str, int]
    clipped: int = 0


@dataclass(frozen=True)
class Skipped:
    """One row that is not in the shard, and why. `key` is None when the row could not even be read."""

    row: int
    name: str
    reason: str
    key: str | None = None


@dataclass(frozen=True)
class ShardIndex:
    """What one shard holds: rows [start, stop), each either an entry or skipped."""

    start: int
    stop: int
    filesize: int
    sha256: str
    recipe: Recipe
    files: dict[str, Member]
    samples: tuple[Entry, ...]
    skipped: tuple[Skipped, ...]

    def to_json(self) -> str:
        values = asdict(self)
        del values["recipe"]
        return canonical_json(
            values
            | {"format_version": FORMAT_VERSION, "recipe": self.recipe.to_dict() | {"digest": self.recipe.digest}}
        )


def member_name(key: str) -> str:
    return f"{key}.safetensors"


def shard_stem(start: int, stop: int) -> str:
    """Name of a shard without its ending: the half-open range of its rows."""
    return f"{start:08d}-{stop:08d}"


def parse_stem(stem: str) -> tuple[int, int] | None:
    """The range in a shard's name; None when it is no shard's name."""
    match = _STEM.fullmatch(stem)
    return (int(match[1]), int(match[2])) if match else None


def read_index(path: Path) -> ShardIndex:
    """The index in a file.

    Raises:
        ShardError: it cannot be read, is no index of this format, or its rows do not add up.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ShardError("the index cannot be read", where=path, found=error) from error
    try:
        values = json.loads(text)
        index = _parse(values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ShardError(
            "the index is damaged or was not written by qie",
            where=path,
            found=f"{type(error).__name__}: {error}",
            hint="delete the shard and its index and run qie-precompute again",
        ) from error
    _check(index, path)
    return index


def _parse(values: dict[str, Any]) -> ShardIndex:
    if values["format_version"] != FORMAT_VERSION:
        raise ValueError(f"format version {values['format_version']}, expected {FORMAT_VERSION}")
    recipe = dict(values["recipe"])
    digest = recipe.pop("digest")
    parsed = Recipe.from_dict(recipe)
    if parsed.digest != digest:
        raise ValueError(f"the recipe's digest is {parsed.digest}, not {digest}")
    return ShardIndex(
        start=int(values["start"]),
        stop=int(values["stop"]),
        filesize=int(values["filesize"]),
        sha256=str(values["sha256"]),
        recipe=parsed,
        files={str(name): Member(**member) for name, member in values["files"].items()},
        samples=tuple(Entry(**{**entry, "shape": _shape(entry["shape"])}) for entry in values["samples"]),
        skipped=tuple(Skipped(**skipped) for skipped in values["skipped"]),
    )


def _shape(values: dict[str, Any]) -> Shape:
    height, width = values["target"]
    return Shape((height, width), tuple((height, width) for height, width in values["controls"]))


def _check(index: ShardIndex, path: Path) -> None:
    """That the index agrees with itself: its name, its rows, its members."""
    if parse_stem(path.stem) != (index.start, index.stop):
        raise ShardError("the index is of another range than its name", where=path, found=[index.start, index.stop])
    rows = sorted([entry.row for entry in index.samples] + [skipped.row for skipped in index.skipped])
    if rows != list(range(index.start, index.stop)):
        raise ShardError(
            "the rows of the index do not add up", where=path, expected=f"each of [{index.start}, {index.stop}) once"
        )
    wanted = {member_name(entry.key) for entry in index.samples}
    if wanted != set(index.files):
        raise ShardError(
            "the samples and the members of the index differ", where=path, found=sorted(wanted ^ set(index.files))
        )
    for name, member in index.files.items():
        if not 0 <= member.offset <= member.offset + member.size <= index.filesize:
            raise ShardError(
                "a member lies outside the shard", where=f"{path}, {name}", expected=f"within {index.filesize}"
            )
