"""One file for the indexes of a whole folder: a million samples open in seconds instead of a minute.

It is made on request and published by rename. The shards count for more: a shard whose index changed since is read from
its own index. The norm of a shard stays its own index; this file may be deleted.
Whoever made it, what it says is checked before it is used, as an index is: see docs/format.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from qie.errors import ShardError
from qie.recipe import Recipe, canonical_json
from qie.shards.index import ShardIndex, Skipped, first_fault, is_digest, parse_stem, recipe_fields
from qie.shards.record import Whole
from qie.shards.sample_table import COLUMNS, HASH_BYTES, Table
from qie.shards.tensors import Sizes, is_text_alone, total_bytes
from qie.stores import File, Folder, MissingError, ObjectFolder
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
        rows: [start, stop) that it accounts for.
    """

    stem: str
    filesize: Whole
    sha256: str
    stamp: str
    skipped: tuple[Skipped, ...]
    rows: tuple[Whole, Whole]

    @classmethod
    def of(cls, stem: str, index: ShardIndex, stamp: str) -> CompactShard:
        """What an index says of its shard."""
        return cls(stem, index.filesize, index.sha256, stamp, index.skipped, index.rows)


@dataclass(frozen=True, eq=False)
class Compact:
    """The indexes of a folder's shards, in their order: one recipe, and all samples as a table."""

    recipe: Recipe
    shards: tuple[CompactShard, ...]
    table: Table


@dataclass(frozen=True)
class ManifestFolder(ObjectFolder):
    """A folder of a web server, which lists nothing: its compacted index names its shards."""

    compact: Compact = field(compare=False, repr=False)

    @classmethod
    def of(cls, folder: ObjectFolder) -> ManifestFolder:
        """Fetch it, in one request. Raises ShardError when there is none, or when it is damaged."""
        compact = read_compact(folder)
        if compact is None:
            raise ShardError(
                "a folder on a web server has no compacted index, and nothing else lists its shards",
                where=folder.url,
                expected=COMPACT_NAME,
                hint="write it with qie-stats --compact before the folder is copied to the server, or name each shard, "
                "such as {00000000-00000064,00000064-00000128}.tar",
            )
        return cls(folder.url, folder.prefix, folder.connection, compact)


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
            raise ValueError("its SHA-256 does not match its content")
        return _parsed(json.loads(text), columns)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, SafetensorError, RecursionError) as error:
        raise ShardError(
            "the compacted index is damaged",
            where=file,
            found=first_fault(error) if isinstance(error, ValidationError) else " ".join(str(error).split())[:200],
            hint="delete it, or rebuild it with qie-stats --compact: the shards' own indexes hold all it says",
        ) from error


@dataclass(frozen=True)
class _About:
    """Its content besides the columns."""

    recipe: Recipe
    shards: tuple[CompactShard, ...]
    shape_names: tuple[Shape, ...]
    source_names: tuple[str, ...]


_ABOUT = TypeAdapter(_About)


def _parsed(about: dict[str, Any], columns: dict[str, np.ndarray]) -> Compact:
    if about["version"] != COMPACT_VERSION:
        raise ValueError(f"version {about['version']}, expected {COMPACT_VERSION}")
    about["recipe"] = recipe_fields(about["recipe"])
    for shard in about["shards"]:
        shard.setdefault("rows", parse_stem(shard["stem"]))  # which older ones leave to the name
    if columns.keys() != COLUMNS.keys():
        raise ValueError(f"columns are missing or unknown: {', '.join(sorted(columns.keys() ^ COLUMNS.keys()))}")
    parsed = _ABOUT.validate_python(about)
    table = Table(**columns, shape_names=parsed.shape_names, source_names=parsed.source_names)
    compact = Compact(parsed.recipe, parsed.shards, table)
    _require_shards(compact.shards)
    _require_columns(table)
    _require_sense(compact)
    return compact


def _require_shards(shards: Sequence[CompactShard]) -> None:
    """Raise ValueError unless each is a file's name and rows of its own."""
    for shard in shards:
        if not shard.stem or set("/\\\0") & set(shard.stem) or not is_digest(shard.sha256):
            raise ValueError(f"no shard: {shard.stem!r} of SHA-256 {shard.sha256!r}")
        if shard.rows[0] >= shard.rows[1] or parse_stem(shard.stem) not in (None, shard.rows):
            raise ValueError(f"{shard.stem} cannot hold the rows {list(shard.rows)}")
    for first, second in pairwise(sorted(shards, key=lambda shard: shard.rows)):
        if second.rows[0] < first.rows[1]:
            raise ValueError(f"{first.stem} and {second.stem} hold the same rows")
    if len({shard.stem for shard in shards}) < len(shards):
        raise ValueError("two shards have the same name")


def _require_columns(table: Table) -> None:
    """Raise ValueError unless each is of its type, with a value for each sample."""
    for name, dtype in COLUMNS.items():
        column = getattr(table, name)
        shape = (table.rows.size, HASH_BYTES) if name in ("keys", "hashes") else (table.rows.size,)
        if column.dtype != dtype or column.shape != shape:
            raise ValueError(f"{name} is {column.dtype} {list(column.shape)}, expected {dtype} {list(shape)}")


def _require_sense(compact: Compact) -> None:
    """Raise ValueError unless every value of the columns fits the others, and its shard."""
    table, shards = compact.table, compact.shards
    numbered = {
        "shards": (table.shards, len(shards)),
        "shapes": (table.shapes, len(table.shape_names)),
        "sources": (table.sources, len(table.source_names)),
    }
    for name, (numbers, count) in numbered.items():
        if ((numbers < 0) | (numbers >= count)).any():
            raise ValueError(f"{name} holds numbers that are not of [0, {count})")
    for shape in table.shape_names:
        if (
            not (shape.controls or is_text_alone(compact.recipe))
            or min(side for size in (shape.target, *shape.controls) for side in size) < 1
        ):
            raise ValueError(f"no shape: {shape}")
    starts, stops = np.array([shard.rows for shard in shards], np.int64).reshape(-1, 2)[table.shards].T
    ends = np.array([shard.filesize for shard in shards], np.int64)[table.shards]
    shard, row, variant = (np.diff(column.astype(np.int64)) for column in (table.shards, table.rows, table.variants))
    rising = (shard > 0) | (shard == 0) & ((row > 0) | (row == 0) & (variant > 0))
    odd = {
        "rows": (table.rows < starts) | (table.rows >= stops),
        "variants": table.variants < 0,
        "order of shards, rows and variants": ~rising,
        "sizes": (table.sizes < _least_sizes(compact)) | (table.sizes > ends),
        "offsets": (table.offsets < 0) | (table.offsets > ends - table.sizes),
        "tokens": table.tokens < 1,
        "widths": table.widths < 1,
        "prefixes": (table.prefixes < 0) | (table.prefixes > np.minimum(table.tokens, table.empty_tokens)),
    }
    for name, places in odd.items():
        if places.any():
            raise ValueError(f"{name} is impossible at sample {int(np.argmax(places))}")


def _least_sizes(compact: Compact) -> np.ndarray:
    """Bytes that the tensors of each sample take, and the length before a record's header: in floats, as these do not
    wrap."""
    table = compact.table
    sides = [
        (*shape.target, sum(h * w for h, w in shape.controls), *(compact.recipe.thumbnail_size(shape) or (0, 0)))
        for shape in table.shape_names
    ]
    height, width, pixels, *thumbnail = np.array(sides, np.float64).reshape(-1, 5)[table.shapes].T
    tokens, empty, prefix = (column.astype(np.float64) for column in (table.tokens, table.empty_tokens, table.prefixes))
    small, text_alone = (thumbnail[0], thumbnail[1]), is_text_alone(compact.recipe)
    return 8.0 + total_bytes(  # type: ignore[no-any-return]
        Sizes(height, width, pixels, tokens, empty, prefix, table.widths, table.masked, small, text_alone)
    )


def _plain(value: Any) -> Any:
    return value.to_dict() if isinstance(value, Recipe) else vars(value)


def _digest(text: str, columns: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(columns):
        digest.update(name.encode())
        digest.update(canonical_json([str(columns[name].dtype), list(columns[name].shape)]).encode())
        digest.update(np.ascontiguousarray(columns[name]).data)
    return digest.hexdigest()
