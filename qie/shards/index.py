"""The index beside each tar: what the shard holds, where, and what it leaves out.

A tar without its index does not exist. The index is published last, so it vouches for a complete tar.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from qie.errors import ShardError
from qie.recipe import Recipe, canonical_json
from qie.shards.record import FORMAT_VERSION, Whole, tensor_bytes
from qie.types import Sample, Shape

_STEM = re.compile(r"(\d{8,})-(\d{8,})")


@dataclass(frozen=True)
class Member:
    """Where a record lies in its tar, in bytes, and its SHA-256."""

    offset: Whole
    size: Whole
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
        notes: what encoding did to the row that its owner may want to know.
    """

    row: Whole
    name: str
    key: str
    shape: Shape
    tokens: Whole
    empty_tokens: Whole
    tensor_bytes: dict[str, Whole]
    clipped: Whole
    notes: tuple[str, ...]

    @classmethod
    def of(cls, sample: Sample, row: int, name: str) -> Entry:
        """The entry of a row's sample."""
        return cls(
            row=row,
            name=name,
            key=sample.key,
            shape=sample.shape,
            tokens=len(sample.prompt_embed),
            empty_tokens=len(sample.empty_prompt_embed),
            tensor_bytes=tensor_bytes(sample),
            clipped=sample.clipped,
            notes=sample.notes,
        )


@dataclass(frozen=True)
class Skipped:
    """One row that is not in the shard, and why. `key` is None when the row could not even be read."""

    row: Whole
    name: str
    reason: str
    key: str | None = None


@dataclass(frozen=True)
class ShardIndex:
    """What one shard holds: rows [start, stop), each either an entry or skipped."""

    start: Whole
    stop: Whole
    filesize: Whole
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


_INDEX = TypeAdapter(ShardIndex)


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
        index = _parse(json.loads(text))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _damaged(path, f"{'.'.join(str(step) for step in first['loc'])}: {first['msg']}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    _check(index, path)
    return index


def _parse(values: dict[str, Any]) -> ShardIndex:
    version = values["format_version"]
    if version != FORMAT_VERSION:
        raise ValueError(f"format version {version}, expected {FORMAT_VERSION}")
    digest = values["recipe"].pop("digest")
    odd = values["recipe"].keys() ^ {field.name for field in fields(Recipe)}
    if odd:
        raise ValueError(f"fields of the recipe are missing or unknown: {', '.join(sorted(odd))}")
    index = _INDEX.validate_python(values)
    if index.recipe.digest != digest:
        raise ValueError(f"the recipe's digest is {index.recipe.digest}, not {digest}")
    return index


def _damaged(path: Path, found: str) -> ShardError:
    return ShardError(
        "the index is damaged or was not written by qie",
        where=path,
        found=found,
        hint="delete the shard and its index and run qie-precompute again",
    )


def _check(index: ShardIndex, path: Path) -> None:
    """That the index agrees with itself: its name, its rows, its members."""
    if parse_stem(path.stem) != (index.start, index.stop):
        raise ShardError("the index is of another range than its name", where=path, found=[index.start, index.stop])
    rows = sorted([entry.row for entry in index.samples] + [skipped.row for skipped in index.skipped])
    if len(rows) != index.stop - index.start or rows != list(range(index.start, index.stop)):
        raise ShardError(
            "the rows of the index do not add up", where=path, expected=f"each of [{index.start}, {index.stop}) once"
        )
    wanted = {member_name(entry.key) for entry in index.samples}
    if wanted != set(index.files):
        raise ShardError(
            "the samples and the members of the index differ", where=path, found=sorted(wanted ^ set(index.files))
        )
    for name, member in index.files.items():
        if member.offset + member.size > index.filesize:
            raise ShardError(
                "a member lies outside the shard", where=f"{path}, {name}", expected=f"within {index.filesize}"
            )
