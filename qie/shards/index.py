"""The index beside each tar: what the shard holds, where, and what it leaves out.

A tar without its index does not exist. The index is published last, so it vouches for a complete tar.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field, fields
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from qie.errors import ShardError
from qie.families import FAMILIES
from qie.recipe import LATER, STORED_AS, Recipe, canonical_json, normal_prompt
from qie.shards.grid import Range
from qie.shards.hashes import SHA256_BYTES
from qie.shards.record import FORMAT_VERSION, Whole
from qie.shards.tensors import tensor_bytes
from qie.stores import File, MissingError
from qie.types import Pair, Row, Sample, Shape

_HEX = re.compile(r"[0-9a-f]*")
_STEM = re.compile(r"(\d{8,})-(\d{8,})")
_OWN_HASH = ',"this_sha256":"'


@dataclass(frozen=True)
class Member:
    """Where a record lies in its tar, in bytes, and its hashes; indexes of before there was an XXH3-128 have none."""

    offset: Whole
    size: Whole
    sha256: str
    xxh3_128: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As it stands in an index."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class PicturesPlace:
    """Where the pictures of a sample lie in its tar, in bytes."""

    offset: Whole
    size: Whole


@dataclass(frozen=True)
class Entry:
    """One row that is in the shard.

    Attributes:
        row: index of the row in its source.
        name: what the source calls it.
        source: name of its source in a mixture; empty for a source alone.
        variant: which variant of the row this is, from 0.
        key: content key; rows of equal content share one member.
        shape: latent sizes.
        tokens, empty_tokens: lengths of the prompt's and of the null prompt's embedding.
        tensor_bytes: what each tensor takes in the record.
        clipped: values clipped to FP16's range.
        notes: what encoding did to the row that its owner may want to know.
        inputs: see `row_inputs`; empty in indexes of before there were any. For people who ask why a row is stale.
        pair: how target and control lie on each other; None without controls, or where nobody measured it.
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
    source: str = ""
    variant: Whole = 0
    inputs: dict[str, str] = field(default_factory=dict)
    pair: Pair | None = None

    def to_dict(self) -> dict[str, Any]:
        """As it stands in an index: of a pair only what there is to say."""
        values = dict(vars(self))
        pair = values.pop("pair")
        if pair is not None:
            values["pair"] = {name: value for name, value in vars(pair).items() if value is not None}
        return values

    @classmethod
    def of(cls, sample: Sample, row: Row) -> Entry:
        """The entry of a row's sample."""
        return cls(
            row=row.index,
            name=row.name,
            source=row.source,
            variant=row.variant,
            key=sample.key,
            shape=sample.shape,
            tokens=len(sample.prompt_embed),
            empty_tokens=len(sample.empty_prompt_embed),
            tensor_bytes=tensor_bytes(sample),
            clipped=sample.clipped,
            notes=sample.notes,
            inputs=row_inputs(row),
            pair=sample.pair,
        )


@dataclass(frozen=True)
class Skipped:
    """One row, or one variant of it, that is not in the shard, and why. `key` is None if it could not even be read."""

    row: Whole
    name: str
    reason: str
    key: str | None = None
    source: str = ""
    variant: Whole = 0


@dataclass(frozen=True)
class ShardIndex:
    """What one shard holds: rows [start, stop), each variant of a row either an entry or skipped.

    `pictures` says where small pictures of samples lie, which a shard may lack, of some samples or of all.
    `this_sha256` is the hash that its file gives for itself: None where it was written before there was one, and where
    it was not read from a file.
    """

    start: Whole
    stop: Whole
    filesize: Whole
    sha256: str
    recipe: Recipe
    files: dict[str, Member]
    samples: tuple[Entry, ...]
    skipped: tuple[Skipped, ...]
    pictures: dict[str, PicturesPlace] = field(default_factory=dict)
    this_sha256: str | None = field(default=None, compare=False)

    @property
    def rows(self) -> Range:
        """[start, stop)."""
        return self.start, self.stop

    @property
    def accounts(self) -> list[Entry | Skipped]:
        """What it says of each variant of each row, in their order."""
        everything: list[Entry | Skipped] = [*self.samples, *self.skipped]
        return sorted(everything, key=lambda one: (one.row, one.variant))

    def to_json(self) -> str:
        recipe = self.recipe.to_dict() | {"digest": self.recipe.digest}
        files = {name: member.to_dict() for name, member in self.files.items()}
        samples = [entry.to_dict() for entry in self.samples]
        values = vars(self) | {"format_version": FORMAT_VERSION, "recipe": recipe, "files": files, "samples": samples}
        del values["this_sha256"]
        if not self.pictures:  # as it was before there were any
            del values["pictures"]
        text = canonical_json(values)
        return f'{text[:-1]}{_OWN_HASH}{_sha256(text.encode())}"}}'  # its name sorts last


@dataclass(frozen=True)
class _Stored:
    """A file's content, its long parts checked while they are parsed: half the time of one after the other."""

    format_version: Any
    start: Any
    stop: Any
    filesize: Any
    sha256: Any
    recipe: Any
    files: dict[str, Member]
    samples: tuple[Entry, ...]
    skipped: tuple[Skipped, ...]
    pictures: dict[str, PicturesPlace] = field(default_factory=dict)
    this_sha256: Any = None


_INDEX = TypeAdapter(ShardIndex)
_STORED = TypeAdapter(_Stored)


def row_inputs(row: Row) -> dict[str, str]:
    """All of a row that its key is made of, by name: the first 16 hex characters of each SHA-256."""
    inputs = {"target": row.target_hash[:16], "prompt": _sha256(normal_prompt(row.prompt).encode())[:16]}
    if row.rejected_hash is not None:
        inputs["rejected"] = row.rejected_hash[:16]
    inputs |= {f"control {number}": digest[:16] for number, digest in enumerate(row.control_hashes, start=1)}
    if row.mask is not None:
        inputs["mask"] = _sha256(row.mask)[:16]
    if row.augment is not None:
        inputs["augment"] = str(row.augment)
    return inputs


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def is_digest(text: str, size: int = SHA256_BYTES) -> bool:
    """Whether a text is a hash of `size` bytes as it is written here: two lower-case hex characters each."""
    return len(text) == 2 * size and _HEX.fullmatch(text) is not None


def member_name(key: str) -> str:
    return f"{key}.safetensors"


def pictures_name(key: str) -> str:
    """The member with the small pictures of a sample."""
    return f"{key}.jpg"


def shard_stem(start: int, stop: int) -> str:
    """Name of a shard without its ending: the half-open range of its rows."""
    return f"{start:08d}-{stop:08d}"


def parse_stem(stem: str) -> Range | None:
    """The range that a shard's name says; None of another name, as a shard may have that somebody renamed."""
    match = _STEM.fullmatch(stem)
    return (int(match[1]), int(match[2])) if match else None


def read_index(place: File | str | Path) -> ShardIndex:
    """The index in a file.

    Raises:
        ShardError: it is missing, is not an index of this format, or its rows do not add up.
        StoreError: it cannot be read.
    """
    path = File.at(place)
    try:
        text = path.read().decode()
    except MissingError as error:
        raise ShardError("the index cannot be read", where=path, found=error.what) from error
    except UnicodeDecodeError as error:
        raise ShardError("the index cannot be read", where=path, found=error) from error
    try:
        index = _parse(_stored(text))
    except ValidationError as error:
        raise _damaged(path, first_fault(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    _check(index, path)
    if index.this_sha256 is not None and not _has_own_hash(text, index.this_sha256):
        raise _damaged(path, "its SHA-256 does not match its content")
    return index


def _stored(text: str) -> dict[str, Any]:
    try:
        return vars(_STORED.validate_json(text))
    except ValidationError:
        return json.loads(text)  # type: ignore[no-any-return]  # what is wrong is said where all of it is checked


def _has_own_hash(text: str, digest: str) -> bool:
    """Whether a file ends in the hash of what stands before it, told by its text: it is canonical, so nothing has to be
    written again to be hashed."""
    before, _, after = text.rpartition(_OWN_HASH)
    return after.rstrip("\n") == f'{digest}"}}' and _sha256(f"{before}}}".encode()) == digest


def _parse(values: dict[str, Any]) -> ShardIndex:
    version = values["format_version"]
    if version != FORMAT_VERSION:
        raise ValueError(f"format version {version}, expected {FORMAT_VERSION}")
    digest = values["recipe"].pop("digest")
    values["recipe"] = recipe_fields(values["recipe"])
    index = _INDEX.validate_python(values)
    if index.recipe.digest != digest:
        raise ValueError(f"the recipe's digest is {index.recipe.digest}, not {digest}")
    return index


def first_fault(error: ValidationError) -> str:
    """Where values are not what they should be, and why."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(str(step) for step in first['loc'])}: {first['msg']}"


def recipe_fields(recipe: dict[str, Any]) -> dict[str, Any]:
    """The fields of a recipe that `Recipe.to_dict` gave, by their names in it. Raises ValueError for any others."""
    names = {STORED_AS.get(field.name, field.name): field.name for field in fields(Recipe)}
    known = names.keys()
    odd = {name for name in recipe.keys() ^ known if name in recipe or name not in LATER}
    odd |= {name for name in LATER if recipe.get(name, 0) is None}  # it would have no place in the digest
    if recipe.get("family", "edit") not in FAMILIES:
        raise ValueError(f"no such family of models: {recipe.get('family')!r}")
    if odd:
        raise ValueError(f"fields of the recipe are missing or unknown: {', '.join(sorted(odd))}")
    return {names[name]: value for name, value in recipe.items()}


def _damaged(path: File, found: str) -> ShardError:
    return ShardError(
        "the index is damaged or was not written by qie",
        where=path,
        found=found,
        hint="delete the shard and its index and run qie-precompute again",
    )


def _check(index: ShardIndex, path: File) -> None:
    """That the index agrees with itself: its name, its rows, its members."""
    if parse_stem(path.stem) not in (None, (index.start, index.stop)):
        raise ShardError("the index has another range than its name", where=path, found=[index.start, index.stop])
    found = [(one.row, one.variant) for one in index.accounts]
    # Variants are numbered from 0: counted within its row, each has the number that it says.
    counted = [(row, number) for row, variants in groupby(found, itemgetter(0)) for number, _ in enumerate(variants)]
    rows = [row for row, variant in counted if variant == 0]
    if found != counted or len(rows) != index.stop - index.start or rows != list(range(index.start, index.stop)):
        raise ShardError(
            "the rows of the index do not add up",
            where=path,
            expected=f"each of [{index.start}, {index.stop}), its variants from 0",
        )
    wanted = {member_name(entry.key) for entry in index.samples}
    if wanted != set(index.files):
        raise ShardError(
            "the samples and the members of the index differ", where=path, found=sorted(wanted ^ set(index.files))
        )
    if odd := index.pictures.keys() - {pictures_name(entry.key) for entry in index.samples}:
        raise ShardError("the index has pictures of samples that it does not have", where=path, found=sorted(odd))
    places: list[tuple[str, Member | PicturesPlace]] = [*index.files.items(), *index.pictures.items()]
    for name, member in places:
        if member.offset + member.size > index.filesize:
            raise ShardError(
                "a member lies outside the shard", where=f"{path}, {name}", expected=f"within {index.filesize}"
            )
