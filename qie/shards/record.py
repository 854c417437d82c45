"""Sample <-> the bytes of one `<key>.safetensors` member.

The writing is left to the safetensors library. Reading is done here, because the library can neither read from an
offset in a larger file nor hand out tensors without copying them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, TypeAdapter, ValidationError
from safetensors import TensorSpec, serialize

from qie.errors import ShardError
from qie.recipe import canonical_json
from qie.shards.tensors import BY_NAME, CHANNELS, DTYPES, REQUIRED, Sizes, stored_tensors
from qie.types import Sample, Shape

FORMAT_VERSION = 1

Whole = Annotated[int, Field(strict=True, ge=0, lt=1 << 62)]


@dataclass(frozen=True)
class _TensorEntry:
    """A tensor in the header of a safetensors file."""

    dtype: Literal["F16", "BOOL", "U8"]
    shape: tuple[Whole, ...]
    data_offsets: tuple[Whole, Whole]


@dataclass(frozen=True)
class _About:
    """The record's metadata entry."""

    key: str
    prompt: str
    control_shapes: tuple[tuple[Whole, Whole, Whole, Whole], ...]
    shared_prefix: Whole
    clipped: Whole


_TENSOR_ENTRIES = TypeAdapter(dict[str, _TensorEntry])
_ABOUT = TypeAdapter(_About)


def encode(sample: Sample, recipe_digest: str) -> bytes:
    """The record of a sample: a function of the sample alone, so equal samples are equal bytes.

    Of the null prompt's embedding only the tail after `shared_prefix` is stored. Several controls, which may differ in
    size, are stored as one flat tensor with their shapes in the metadata.
    """
    about = {
        "clipped": sample.clipped,
        "control_shapes": [list(latent.shape) for latent in sample.control_latent],
        "format_version": FORMAT_VERSION,
        "key": sample.key,
        "prompt": sample.prompt,
        "recipe": recipe_digest,
        "shared_prefix": sample.shared_prefix,
    }
    # One metadata entry only: the library writes several in an order that changes from process to process.
    # `serialize` instead of `safetensors.torch.save`, which takes ten times as long to describe small tensors to it.
    contiguous = {name: tensor.contiguous() for name, tensor in stored_tensors(sample).items()}
    specs = {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
        for name, tensor in contiguous.items()
    }
    return bytes(serialize(specs, {"qie": canonical_json(about)}))


@dataclass(frozen=True, eq=False)
class Record:
    """A record whose header was parsed and fits its bytes.

    Attributes:
        key: of its sample.
        shape: latent sizes of target and controls.
        sizes: what decides the size of each tensor.
    """

    key: str
    shape: Shape
    sizes: Sizes
    _about: _About
    _entries: Mapping[str, _TensorEntry]
    _body: memoryview

    def sample(self) -> Sample:
        """The sample; its tensors share the record's memory."""
        about, flat = self._about, self._entries["control_latent"]
        tensors = {
            BY_NAME[name].field or name: _view(entry.dtype, entry.shape, *entry.data_offsets, self._body)
            for name, entry in self._entries.items()
            if entry is not flat
        }
        controls, at = [], flat.data_offsets[0]
        for shape in about.control_shapes:
            end = at + prod(shape) * DTYPES[flat.dtype].itemsize
            controls.append(_view(flat.dtype, shape, at, end, self._body))
            at = end
        return Sample(
            key=about.key,
            prompt=about.prompt,
            control_latent=tuple(controls),
            shared_prefix=about.shared_prefix,
            clipped=about.clipped,
            **tensors,  # type: ignore[arg-type]
        )


def parse(record: memoryview, where: str) -> Record:
    """Check a record's header against itself and the record's length.

    Args:
        record: the member's bytes, in a writable buffer (torch takes no other without a warning).
        where: shard and member, for messages.

    Raises:
        ShardError: the record is malformed; every defect has its own message.
    """
    header, body = _split(record, where)
    about = _about(header.pop("__metadata__", None), where)
    entries = _entries(header, len(body), where)
    _require_types(entries, where)
    sizes = _sizes(entries, about, where)
    _require_shapes(entries, sizes, where)
    _require_no_gaps(entries, len(body), where)
    shape = Shape((sizes.height, sizes.width), tuple((h, w) for _, _, h, w in about.control_shapes))
    return Record(about.key, shape, sizes, about, entries, body)


def decode(record: memoryview, where: str) -> Sample:
    """The sample in a record; see `parse`. Its tensors share the record's memory."""
    return parse(record, where).sample()


def _split(record: memoryview, where: str) -> tuple[dict[str, Any], memoryview]:
    if len(record) < 8:
        raise ShardError(
            "the record is shorter than its header's length field", where=where, found=f"{len(record)} bytes"
        )
    length = int.from_bytes(record[:8], "little")
    if length > len(record) - 8:
        raise ShardError(
            "the header is longer than the record", where=where, expected=f"≤ {len(record) - 8}", found=length
        )
    try:
        header = json.loads(bytes(record[8 : 8 + length]))
    except (ValueError, RecursionError) as error:
        raise ShardError("the header is no JSON", where=where, found=error) from error
    if not isinstance(header, dict):
        raise ShardError("the header is no JSON object", where=where, found=type(header).__name__)
    return header, record[8 + length :]


def _about(metadata: object, where: str) -> _About:
    try:
        about = json.loads(metadata["qie"])  # type: ignore[index]
        version = about["format_version"]
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise ShardError(
            "the record was not written by qie", where=where, expected="metadata 'qie'", found=metadata
        ) from error
    if version != FORMAT_VERSION:
        raise ShardError(
            "the record is of another format version",
            where=where,
            expected=FORMAT_VERSION,
            found=version,
            hint="read it with the qie that wrote it, or precompute again",
        )
    try:
        return _ABOUT.validate_python(about)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(step) for step in first["loc"])
        raise ShardError(
            f"the record's {name} is missing or wrong", where=where, expected=first["msg"], found=first["input"]
        ) from error


def _entries(header: dict[str, Any], length: int, where: str) -> dict[str, _TensorEntry]:
    """The header's tensors, each within a body of `length` bytes and as large as its shape says."""
    try:
        entries = _TENSOR_ENTRIES.validate_python(header)
    except ValidationError as error:
        name = str(error.errors(include_url=False)[0]["loc"][0])
        raise ShardError(f"the header's entry for {name} is malformed", where=where, found=header[name]) from error
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        if not begin <= end <= length:
            raise ShardError(
                f"{name} lies outside the record", where=where, expected=f"within {length}", found=[begin, end]
            )
        if prod(entry.shape) * DTYPES[entry.dtype].itemsize != end - begin:
            raise ShardError(
                f"{name} has a size that its shape does not give",
                where=where,
                expected=list(entry.shape),
                found=end - begin,
            )
    return entries


def _require_types(entries: Mapping[str, _TensorEntry], where: str) -> None:
    """That the tensors are those of a sample, each of its type, and that none is empty but those that may be."""
    if not entries.keys() <= BY_NAME.keys():
        unknown = sorted(entries.keys() - BY_NAME.keys())
        raise ShardError("the record has a tensor that the format does not know", where=where, found=unknown)
    if not entries.keys() >= REQUIRED:
        missing = min(REQUIRED - entries.keys())
        raise ShardError("a tensor is missing from the record", where=where, expected=missing, found=sorted(entries))
    for name, entry in entries.items():
        stored = BY_NAME[name]
        if entry.dtype != stored.dtype or not (stored.flat or len(entry.shape) == stored.rank):
            raise ShardError(
                f"{name} has another type or rank",
                where=where,
                expected=f"{stored.dtype} of {'any number of' if stored.flat else stored.rank} dimensions",
                found=f"{entry.dtype} {list(entry.shape)}",
            )
        if 0 in entry.shape and not stored.may_be_empty:
            raise ShardError(f"{name} is empty", where=where, found=list(entry.shape))


def _sizes(entries: Mapping[str, _TensorEntry], about: _About, where: str) -> Sizes:
    """The sizes that latents and embeddings have, and that all tensors should fit."""
    (*_, height, width), (tokens, token_width) = entries["pixel_latent"].shape, entries["prompt_embed"].shape
    controls, prefix = about.control_shapes, about.shared_prefix
    if prefix > tokens:
        raise ShardError("shared_prefix is longer than the prompt", where=where, found=prefix)
    fitting = controls and all(shape[:2] == (CHANNELS, 1) and 0 not in shape for shape in controls)
    if not fitting or sum(map(prod, controls)) != prod(entries["control_latent"].shape):
        found = list(entries["control_latent"].shape)
        raise ShardError("control_latent does not fit control_shapes", where=where, expected=controls, found=found)
    thumbnail = entries["thumbnail"].shape if "thumbnail" in entries else (0, 0, 3)
    return Sizes(
        height=height,
        width=width,
        control_pixels=sum(h * w for _, _, h, w in controls),
        tokens=tokens,
        empty_tokens=prefix + entries["empty_prompt_embed"].shape[0],
        prefix=prefix,
        token_width=token_width,
        masked="loss_mask" in entries,
        thumbnail=(thumbnail[0], thumbnail[1]),
    )


def _require_shapes(entries: Mapping[str, _TensorEntry], sizes: Sizes, where: str) -> None:
    for name, entry in entries.items():
        shape = BY_NAME[name].shape(sizes)
        if entry.shape != shape and not BY_NAME[name].flat:
            raise ShardError(
                f"{name} has another shape than the sample's sizes give it",
                where=where,
                expected=list(shape),
                found=list(entry.shape),
            )


def _require_no_gaps(entries: Mapping[str, _TensorEntry], length: int, where: str) -> None:
    """That the tensors fill a body of `length` bytes, in whatever order, without gaps or overlaps."""
    at = 0
    for begin, end in sorted(entry.data_offsets for entry in entries.values()):
        if begin != at:
            raise ShardError("the record has gaps or overlaps between tensors", where=where, expected=at, found=begin)
        at = end
    if at != length:
        raise ShardError("the record has bytes after its tensors", where=where, expected=at, found=length)


def _view(dtype: str, shape: tuple[int, ...], begin: int, end: int, body: memoryview) -> torch.Tensor:
    kind = DTYPES[dtype]
    values = torch.frombuffer(body[begin:end], dtype=kind) if begin < end else torch.empty(0, dtype=kind)
    return values if len(shape) == 1 else values.view(shape)
