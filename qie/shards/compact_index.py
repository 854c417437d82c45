"""One file for the indexes of a whole folder. It is mapped, so any number of samples opens at once, in memory that all
processes of a machine share.

It is made on request and published by rename. The shards count for more: a shard whose index changed since is read from
its own index. The norm of a shard stays its own index; this file may be deleted.
Whoever made it, what it says is checked before it is used: its frame and the places of shards when it is opened, what a
plan reads when a plan is made, and what is said of a record when that is read. See docs/format.md.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from qie.errors import ShardError, one_line
from qie.recipe import Recipe, canonical_json
from qie.shards.grid import Range, overlapping
from qie.shards.hashes import SHA256_BYTES, XXH3_BYTES, xxh3_128
from qie.shards.index import ShardIndex, Skipped, first_fault, parse_stem, recipe_fields
from qie.shards.sample_table import COLUMNS, Table
from qie.shards.tensors import is_text_alone
from qie.stores import File, Folder, MissingError, ObjectFolder, local_copy
from qie.types import Shape

COMPACT_NAME = "index.safetensors"
COMPACT_VERSION = 2

WIDE = {
    "keys": SHA256_BYTES,
    "hashes": SHA256_BYTES,
    "xxh3_128": XXH3_BYTES,
    "shard_rows": 2,
    "tar_hashes": SHA256_BYTES,
}
"""Columns of several values each, and how many."""
TEXTS = ("stems", "stamps", "skipped")
OF_SHARDS: dict[str, np.dtype[Any]] = {
    "ends": np.dtype(np.int64),
    "shard_rows": np.dtype(np.int64),
    "filesizes": np.dtype(np.int64),
    "tar_hashes": np.dtype(np.uint8),
    **{f"{name}_ends": np.dtype(np.int64) for name in TEXTS},
}
"""The columns of shards and their types."""
_ALL = {**COLUMNS, **OF_SHARDS, **dict.fromkeys(TEXTS, np.dtype(np.uint8))}
_PLACES = ("ends", "shard_rows", "filesizes", *(f"{name}_ends" for name in TEXTS))
_PLANNED = ("shapes", "tokens", "empty_tokens", "sources", "variants", "rows")

_NAMES = {"int32": "I32", "int64": "I64", "uint8": "U8", "bool": "BOOL"}
_MOST_HEADER_BYTES = 100 * 10**6  # as the safetensors library allows


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
    filesize: int
    sha256: str
    stamp: str
    skipped: tuple[Skipped, ...]
    rows: Range

    @classmethod
    def of(cls, stem: str, index: ShardIndex, stamp: str) -> CompactShard:
        """What an index says of its shard."""
        return cls(stem, index.filesize, index.sha256, stamp, index.skipped, index.rows)


@dataclass(frozen=True)
class ManifestFolder(ObjectFolder):
    """A folder of a web server, which lists nothing: its compacted index names its shards."""

    compact: Compact = field(compare=False, repr=False)

    @classmethod
    def of(cls, folder: ObjectFolder) -> ManifestFolder:
        """Fetch it, in two requests. Raises ShardError when there is none, or when it is damaged."""
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


_SKIPPED = TypeAdapter(tuple[Skipped, ...])


@dataclass(frozen=True, eq=False)
class Compact:
    """The indexes of a folder's shards, in their order: one recipe, and all samples as a table over a mapped file.

    Attributes:
        file: where it lies, for messages.
        recipe: of all shards.
        table: the samples.
        columns: all that the file has, by name.
        hashes: XXH3-128 of each column, 32 hex characters, by its name.
        digest: SHA-256 of the keys, 64 hex characters.
    """

    file: File
    recipe: Recipe
    table: Table
    columns: Mapping[str, NDArray[Any]] = field(repr=False)
    hashes: Mapping[str, str] = field(repr=False)
    digest: str
    _checked: set[str] = field(default_factory=set, repr=False)

    def __len__(self) -> int:
        """How many shards there are."""
        return len(self.table.ends)

    @property
    def rows(self) -> NDArray[np.int64]:
        """[shards, 2]: [start, stop) of each."""
        return self.columns["shard_rows"]

    @property
    def filesizes(self) -> NDArray[np.int64]:
        return self.columns["filesizes"]

    def stem(self, number: int) -> str:
        """A shard's name without ending. Raises ShardError for what is none, or of other rows."""
        stem = self._text("stems", number)
        rows = (int(self.rows[number, 0]), int(self.rows[number, 1]))
        if not stem or set("/\\\0") & set(stem) or parse_stem(stem) not in (None, rows):
            raise self._damaged(f"no shard of the rows {list(rows)}: {stem!r}")
        return stem

    def shard(self, number: int) -> CompactShard:
        return CompactShard(
            self.stem(number),
            int(self.filesizes[number]),
            bytes(self.columns["tar_hashes"][number]).hex(),
            self._text("stamps", number),
            self._skipped_in(number),
            (int(self.rows[number, 0]), int(self.rows[number, 1])),
        )

    def stems(self) -> list[str]:
        """Of all shards."""
        self.require("stems")
        return [self.stem(number) for number in range(len(self))]

    def stamps(self) -> list[str]:
        """Of all shards."""
        self.require("stamps")
        return [self._text("stamps", number) for number in range(len(self))]

    def skipped(self) -> Iterator[Skipped]:
        """The rows that no shard holds."""
        for number in np.flatnonzero(np.diff(self.columns["skipped_ends"], prepend=0)).tolist():
            yield from self._skipped_in(number)

    def require(self, *names: str) -> None:
        """Raise ShardError unless columns have the hashes that they had when they were written. Looks at each once."""
        for name in names:
            if name not in self._checked:
                if xxh3_128(_stored(self.columns[name])).hex() != self.hashes[name]:
                    raise self._damaged(f"the XXH3-128 of {name} does not match")
                self._checked.add(name)

    def require_all(self) -> None:
        """The same of all columns."""
        self.require(*_ALL)

    def require_planned(self) -> None:
        """Raise ShardError unless what a plan reads is as it was written, and makes sense."""
        table = self.table
        single = not table.variants.any()
        planned = [name for name in _PLANNED if not (single and name == "rows")]
        self.require(*planned)
        numbered = {"shapes": len(table.shape_names), "sources": len(table.source_names)}
        for name, count in numbered.items():
            numbers = getattr(table, name)
            if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
                raise self._damaged(f"{name} holds numbers that are not of [0, {count})")
        for name, least in {"tokens": 1, "empty_tokens": 0, "variants": 0, "rows": 0}.items():
            if name in planned and len(table) and int(getattr(table, name).min()) < least:
                raise self._damaged(f"{name} holds numbers below {least}")

    def _text(self, name: str, number: int) -> str:
        ends = self.columns[f"{name}_ends"]
        content = self.columns[name][int(ends[number - 1]) if number else 0 : int(ends[number])]
        try:
            return bytes(content).decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"{name} of shard {number}: {error}") from error

    def _skipped_in(self, number: int) -> tuple[Skipped, ...]:
        try:
            text = self._text("skipped", number)
            return _SKIPPED.validate_json(text) if text else ()
        except ValidationError as error:
            raise self._damaged(f"skipped rows of shard {number}: {first_fault(error)}") from error

    def _damaged(self, found: str) -> ShardError:
        return _damaged_index(self.file, found)


def _damaged_index(file: File, found: object) -> ShardError:
    """The error of a compacted index that is not what it should be."""
    return ShardError(
        "the compacted index is damaged",
        where=file,
        found=one_line(found, 200),
        hint="delete it, or rebuild it with qie-stats --compact: the shards' own indexes hold all it says",
    )


# Reading


def read_compact(place: File | Folder) -> Compact | None:
    """A compacted index, mapped: the file, or that of a folder. None if there is none.

    Raises:
        ShardError: it is damaged; it may be deleted.
        StoreError: it cannot be fetched.
    """
    file = place if isinstance(place, File) else File(place, COMPACT_NAME)
    try:
        content = _mapped(file.path or local_copy(file))
    except MissingError:
        return None
    try:
        return _parsed(file, content)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _damaged_index(file, first_fault(error) if isinstance(error, ValidationError) else error) from error


def _mapped(path: Path) -> memoryview:
    """The content of a local file. Who replaces it renames another to its name, and leaves this one as it is."""
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise MissingError("no such file", where=path) from error
    except ValueError:  # it is empty
        return memoryview(b"")
    except OSError as error:
        raise ShardError("the compacted index cannot be read", where=path, found=error) from error


@dataclass(frozen=True)
class _About:
    """Its content besides the columns."""

    recipe: Recipe
    samples: int
    shape_names: tuple[Shape, ...]
    source_names: tuple[str, ...]
    keys_sha256: str
    xxh3_128: dict[str, str]


_ABOUT = TypeAdapter(_About)


def _parsed(file: File, content: memoryview) -> Compact:
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(len(content) - 8, _MOST_HEADER_BYTES):
        raise ValueError(f"a header of {length} bytes in a file of {len(content)}")
    header = json.loads(bytes(content[8 : 8 + length]))
    digest, text = (header["__metadata__"]["qie"][:64], header["__metadata__"]["qie"][64:])
    about = json.loads(text)
    if about["version"] != COMPACT_VERSION:  # an older one hashes other bytes
        raise ValueError(f"version {about['version']}, expected {COMPACT_VERSION}")
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise ValueError("its SHA-256 does not match its content")
    about["recipe"] = recipe_fields(about["recipe"])
    parsed = _ABOUT.validate_python(about)
    for names in (header.keys() - {"__metadata__"}, parsed.xxh3_128.keys()):
        if odd := names ^ _ALL.keys():
            raise ValueError(f"columns are missing or unknown: {', '.join(sorted(odd))}")
    content = content[8 + length :]
    if len(content) != (size := sum(stop - start for start, stop in (header[name]["data_offsets"] for name in _ALL))):
        raise ValueError(f"{len(content)} bytes of columns, expected {size}")
    columns = {name: _column(name, header[name], content, parsed.samples) for name in _ALL}
    table = Table(
        **{name: columns[name] for name in (*COLUMNS, "ends")},
        shape_names=parsed.shape_names,
        source_names=parsed.source_names,
    )
    compact = Compact(file, parsed.recipe, table, columns, parsed.xxh3_128, parsed.keys_sha256)
    _require_shards(compact)
    for shape in parsed.shape_names:
        if (
            not (shape.controls or is_text_alone(parsed.recipe))
            or min(side for size in (shape.target, *shape.controls) for side in size) < 1
        ):
            raise ValueError(f"no shape: {shape}")
    return compact


def _column(name: str, entry: Mapping[str, Any], content: memoryview, samples: int) -> NDArray[Any]:
    """A column as it lies in the file. One value for all samples is shown as many times as there are samples."""
    dtype, shape, (start, stop) = _ALL[name], tuple(entry["shape"]), entry["data_offsets"]
    width = (WIDE[name],) if name in WIDE else ()
    expected = [(samples, *width)] if name in COLUMNS else [(*shape[:1], *width)]
    if name in COLUMNS and not width and samples:
        expected.append((1,))
    if entry["dtype"] != _NAMES[dtype.name] or shape not in expected:
        raise ValueError(f"{name} is {entry['dtype']} {list(shape)}, expected {_NAMES[dtype.name]} {list(expected[0])}")
    if not (0 <= start <= stop <= len(content) and stop - start == math.prod(shape) * dtype.itemsize):
        raise ValueError(f"{name} lies at [{start}, {stop}) of {len(content)} bytes")
    if start == stop:
        return np.zeros(shape, dtype)
    values = np.frombuffer(content[start:stop], dtype).reshape(shape)
    return np.broadcast_to(values, (samples,)) if shape == (1,) and name in COLUMNS else values


def _require_shards(compact: Compact) -> None:
    """Raise ValueError unless the shards' places make sense: they are few beside samples."""
    columns, rows, ends = compact.columns, compact.rows, compact.table.ends
    for name in OF_SHARDS:
        if len(columns[name]) != len(ends):
            raise ValueError(f"{name} has {len(columns[name])} values, expected {len(ends)}")
    compact.require(*_PLACES)
    totals = {"ends": len(compact.table), **{f"{name}_ends": len(columns[name]) for name in TEXTS}}
    for name, total in totals.items():
        if (np.diff(columns[name], prepend=0) < 0).any() or (columns[name][-1] if len(ends) else 0) != total:
            raise ValueError(f"{name} does not rise to {total}")
    if (rows[:, 0] < 0).any() or (rows[:, 0] >= rows[:, 1]).any():
        raise ValueError(f"a shard cannot hold the rows {rows[np.argmin(np.diff(rows, axis=1))].tolist()}")
    if (columns["filesizes"] < 0).any():
        raise ValueError("filesizes holds numbers below 0")
    if pair := overlapping(rows):
        first, second = (compact.stem(number) for number in pair)
        raise ValueError(f"{first} and {second} hold the same rows")


# Writing


def write_compact(
    folder: Folder, recipe: Recipe, parts: Iterable[tuple[Sequence[CompactShard], Table]]
) -> tuple[File, int, int]:
    """Publish the compacted index of a folder; in memory that does not grow with it.

    Args:
        folder: of the shards.
        recipe: theirs.
        parts: shards in their order and the table of their samples, some at a time.

    Returns:
        The file, and how many shards and samples it tells of.
    """
    near = folder.path(COMPACT_NAME)
    with ExitStack() as stack:

        def temporary() -> IO[bytes]:
            # It has no name, so nothing is left of it when this process is killed.
            return stack.enter_context(tempfile.TemporaryFile(dir=near.parent if near else None, buffering=1 << 17))

        columns = {name: _Growing(temporary(), name) for name in _ALL}
        shapes: dict[Shape, int] = {}
        sources: dict[str, int] = {}
        shards = samples = 0
        for facts, table in parts:
            shards, samples = shards + len(facts), samples + len(table)
            _append(columns, facts, table, shapes, sources)
        about = {
            "version": COMPACT_VERSION,
            "recipe": recipe.to_dict(),
            "samples": samples,
            "shape_names": [vars(shape) for shape in shapes],
            "source_names": list(sources),
            "keys_sha256": columns["keys"].sha256,
            "xxh3_128": {name: column.xxh3_128 for name, column in columns.items()},
        }
        joined = temporary()
        _join(joined, canonical_json(about), columns)
        joined.flush()
        folder.upload(COMPACT_NAME, Path(f"/proc/self/fd/{joined.fileno()}"))
    return File(folder, COMPACT_NAME), shards, samples


def _append(
    columns: Mapping[str, _Growing],
    facts: Sequence[CompactShard],
    table: Table,
    shapes: dict[Shape, int],
    sources: dict[str, int],
) -> None:
    places = {
        "shapes": [shapes.setdefault(name, len(shapes)) for name in table.shape_names],
        "sources": [sources.setdefault(name, len(sources)) for name in table.source_names],
    }
    values: dict[str, Any] = {name: getattr(table, name) for name in COLUMNS}
    values |= {name: np.array(numbers, np.int32)[values[name]] for name, numbers in places.items()}
    before = columns["ends"].last
    values["ends"] = table.ends + before
    values["shard_rows"] = np.array([shard.rows for shard in facts], np.int64).reshape(-1, 2)
    values["filesizes"] = np.array([shard.filesize for shard in facts], np.int64)
    hashes = b"".join(bytes.fromhex(shard.sha256) for shard in facts)
    values["tar_hashes"] = np.frombuffer(hashes, np.uint8).reshape(-1, SHA256_BYTES)
    texts = {
        "stems": [shard.stem for shard in facts],
        "stamps": [shard.stamp for shard in facts],
        "skipped": [canonical_json([vars(gone) for gone in shard.skipped]) if shard.skipped else "" for shard in facts],
    }
    for name, lines in texts.items():
        encoded = [line.encode() for line in lines]
        values[name] = np.frombuffer(b"".join(encoded), np.uint8)
        values[f"{name}_ends"] = (
            np.cumsum([len(line) for line in encoded], dtype=np.int64) + columns[f"{name}_ends"].last
        )
    for name, column in columns.items():
        column.append(values[name])


class _Growing:
    """A column on its way into the file: a temporary file, its hash, and whether one value is all that it holds."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self.file, self.dtype, self.name = file, _ALL[name], name
        self.count, self.last = 0, 0
        self._xxh3_128, self._sha256 = xxhash.xxh3_128(), hashlib.sha256()
        self._first: NDArray[Any] | None = None
        self._alike = name in COLUMNS and name not in WIDE

    def append(self, values: NDArray[Any]) -> None:
        values = np.ascontiguousarray(values, self.dtype)
        if not len(values):
            return
        self._first = values[:1].copy() if self._first is None else self._first
        self._alike = self._alike and bool((values == self._first).all())
        self.count += len(values)
        self.last = int(values.ravel()[-1])
        self._xxh3_128.update(values.data)
        if self.name == "keys":
            self._sha256.update(values.data)
        self.file.write(values.data)

    @property
    def shape(self) -> list[int]:
        return [1 if self._alike and self.count else self.count, *([WIDE[self.name]] if self.name in WIDE else [])]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def xxh3_128(self) -> str:
        if self._alike and self._first is not None:
            return xxh3_128(self._first.data).hex()
        return self._xxh3_128.hexdigest()

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def copy_to(self, file: IO[bytes]) -> None:
        self.file.flush()
        self.file.seek(0)
        if self._alike and self._first is not None:
            file.write(self._first.tobytes())
        else:
            shutil.copyfileobj(self.file, file, 1 << 22)
        self.file.close()


def _join(file: IO[bytes], text: str, columns: Mapping[str, _Growing]) -> None:
    """A safetensors file of the columns. Wide types come first, so that each value lies at a multiple of its size."""
    ordered = sorted(columns.values(), key=lambda column: (-column.dtype.itemsize, column.name))
    header: dict[str, Any] = {"__metadata__": {"qie": hashlib.sha256(text.encode()).hexdigest() + text}}
    at = 0
    for column in ordered:
        place = [at, at := at + column.size]
        header[column.name] = {"dtype": _NAMES[column.dtype.name], "shape": column.shape, "data_offsets": place}
    told = canonical_json(header).encode()
    told += b" " * (-len(told) % 8)
    file.write(len(told).to_bytes(8, "little") + told)
    for column in ordered:
        column.copy_to(file)


def _stored(column: NDArray[Any]) -> memoryview:
    """The bytes of a column as the file has them: one value where all are this one."""
    alike = column.ndim == 1 and len(column) > 1 and column.strides == (0,)
    return np.ascontiguousarray(column[:1] if alike else column).data
