"""One file for the indexes of a whole folder: a million samples open in seconds instead of a minute.

It is made on request, published by rename, and never trusted against what is there: a shard whose index is not the one
that was compacted is read from its own index. The norm of a shard stays its own index; this file may be deleted.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from qie.errors import ShardError
from qie.recipe import Recipe, canonical_json
from qie.shards.index import Skipped
from qie.shards.table import COLUMNS, Table
from qie.stores import File, Folder, MissingError
from qie.types import Shape

COMPACT_NAME = "index.safetensors"
COMPACT_VERSION = 1


@dataclass(frozen=True)
class CompactShard:
    """A shard as it was when it was compacted.

    Attributes:
        stem: its name without ending.
        filesize, sha256: of its tar.
        stamp: of its index; see `Folder.stamps`.
        skipped: rows that it does not hold.
    """

    stem: str
    filesize: int
    sha256: str
    stamp: str
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True, eq=False)
class Compact:
    """The indexes of a folder's shards, in their order: one recipe, and all samples as a table."""

    recipe: Recipe
    shards: tuple[CompactShard, ...]
    table: Table


def write_compact(folder: Folder, compact: Compact) -> File:
    """Publish the compacted index of a folder."""
    table = compact.table
    about = {
        "version": COMPACT_VERSION,
        "recipe": compact.recipe,
        "shards": compact.shards,
        "shape_names": table.shape_names,
        "source_names": table.source_names,
    }
    columns = {name: np.ascontiguousarray(getattr(table, name)) for name in COLUMNS}
    text = json.dumps(about, ensure_ascii=False, default=_plain)
    # One metadata entry only, as in records: the library writes several in an order that changes.
    file = File(folder, COMPACT_NAME)
    folder.write(file.name, save(columns, {"qie": _digest(text, columns) + text}))
    return file


def read_compact(folder: Folder) -> Compact | None:
    """The compacted index of a folder; None if there is none.

    Raises:
        ShardError: it is damaged; it may be deleted.
    """
    file = File(folder, COMPACT_NAME)
    try:
        content = file.read()
    except MissingError:
        return None
    try:
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        columns = load(content)
        digest, text = metadata["qie"][:64], metadata["qie"][64:]
        if _digest(text, columns) != digest:
            raise ValueError("its SHA-256 is another one than it says")
        return _parsed(json.loads(text), columns)
    except (ValueError, KeyError, TypeError, SafetensorError, ValidationError, RecursionError) as error:
        raise ShardError(
            "the compacted index is damaged",
            where=file,
            found=" ".join(str(error).split())[:200],
            hint="delete it, or make it again with qie-stats --compact: the shards' own indexes hold all it says",
        ) from error


_SHARDS = TypeAdapter(tuple[CompactShard, ...])
_RECIPE = TypeAdapter(Recipe)
_SHAPES = TypeAdapter(tuple[Shape, ...])
_NAMES = TypeAdapter(tuple[str, ...])


def _parsed(about: dict[str, Any], columns: dict[str, np.ndarray]) -> Compact:
    if about["version"] != COMPACT_VERSION or set(columns) != set(COLUMNS):
        raise ValueError(f"version {about['version']}, expected {COMPACT_VERSION}")
    table = Table(
        **columns,
        shape_names=_SHAPES.validate_python(about["shape_names"]),
        source_names=_NAMES.validate_python(about["source_names"]),
    )
    return Compact(_RECIPE.validate_python(about["recipe"]), _SHARDS.validate_python(about["shards"]), table)


def _plain(value: Any) -> Any:
    return value.to_dict() if isinstance(value, Recipe) else vars(value)


def _digest(text: str, columns: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(columns):
        digest.update(name.encode())
        digest.update(canonical_json([str(columns[name].dtype), list(columns[name].shape)]).encode())
        digest.update(np.ascontiguousarray(columns[name]).data)
    return digest.hexdigest()
