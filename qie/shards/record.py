"""Sample <-> the bytes of one `<key>.safetensors` member.

The writing is left to the safetensors library. Reading is done here, because the library can neither read from an
offset in a larger file nor hand out tensors without copying them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, TypeAdapter, ValidationError
from safetensors import TensorSpec, serialize

from qie.errors import ShardError
from qie.recipe import canonical_json
from qie.types import Sample

FORMAT_VERSION = 1

_DTYPES = {"F16": torch.float16, "BOOL": torch.bool, "U8": torch.uint8}
_REQUIRED = {
    "pixel_latent": ("F16", 4),
    "control_latent": ("F16", None),
    "prompt_embed": ("F16", 2),
    "prompt_embeds_mask": ("BOOL", 1),
    "empty_prompt_embed": ("F16", 2),
    "empty_prompt_embeds_mask": ("BOOL", 1),
}
_OPTIONAL = {"loss_mask": ("U8", 2), "thumbnail": ("U8", 3)}

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


_TENSOR_ENTRY = TypeAdapter(_TensorEntry)
_ABOUT = TypeAdapter(_About)


def encode(sample: Sample, recipe_digest: str) -> bytes:
    """The record of a sample: a function of the sample alone, so equal samples are equal bytes.

    Of the null prompt's embedding only the tail behind `shared_prefix` is stored. Several controls, which may differ in
    size, are stored as one flat tensor with their shapes in the metadata.
    """
    several = len(sample.control_latent) > 1
    flat = torch.cat([latent.reshape(-1) for latent in sample.control_latent]) if several else sample.control_latent[0]
    tensors = {
        "pixel_latent": sample.pixel_latent,
        "control_latent": flat,
        "prompt_embed": sample.prompt_embed,
        "prompt_embeds_mask": sample.prompt_embeds_mask,
        "empty_prompt_embed": sample.empty_tail,
        "empty_prompt_embeds_mask": sample.empty_prompt_embeds_mask,
        **_optional(sample),
    }
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
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
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


def decode(record: memoryview, where: str) -> Sample:
    """The sample in a record. Its tensors share the record's memory.

    Args:
        record: the member's bytes, in a writable buffer (torch takes no other without a warning).
        where: shard and member, for messages.

    Raises:
        ShardError: the record is malformed; every defect has its own message.
    """
    header, body = _split(record, where)
    about = _about(header.pop("__metadata__", None), where)
    tensors = {name: _tensor(name, entry, body, where) for name, entry in header.items()}
    _check(tensors, about, where)
    prompt = tensors["prompt_embed"]
    return Sample(
        key=about.key,
        prompt=about.prompt,
        pixel_latent=tensors["pixel_latent"],
        control_latent=_controls(tensors["control_latent"], about.control_shapes, where),
        prompt_embed=prompt,
        prompt_embeds_mask=tensors["prompt_embeds_mask"],
        empty_tail=tensors["empty_prompt_embed"],
        empty_prompt_embeds_mask=tensors["empty_prompt_embeds_mask"],
        shared_prefix=about.shared_prefix,
        loss_mask=tensors.get("loss_mask"),
        clipped=about.clipped,
        thumbnail=tensors.get("thumbnail"),
    )


def tensor_bytes(sample: Sample) -> dict[str, int]:
    """Bytes that each tensor of a sample takes in its record."""
    stored = {
        "pixel_latent": sample.pixel_latent.nbytes,
        "control_latent": sum(latent.nbytes for latent in sample.control_latent),
        "prompt_embed": sample.prompt_embed.nbytes,
        "prompt_embeds_mask": sample.prompt_embeds_mask.nbytes,
        "empty_prompt_embed": sample.empty_tail.nbytes,
        "empty_prompt_embeds_mask": sample.empty_prompt_embeds_mask.nbytes,
    }
    return stored | {name: tensor.nbytes for name, tensor in _optional(sample).items()}


def _optional(sample: Sample) -> dict[str, torch.Tensor]:
    """Of the tensors that not every sample has, those that this one has."""
    found = {"loss_mask": sample.loss_mask, "thumbnail": sample.thumbnail}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


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


def _tensor(name: str, entry: Any, body: memoryview, where: str) -> torch.Tensor:
    try:
        parsed = _TENSOR_ENTRY.validate_python(entry)
    except ValidationError as error:
        raise ShardError(f"the header's entry for {name} is malformed", where=where, found=entry) from error
    dtype, shape, (begin, end) = _DTYPES[parsed.dtype], parsed.shape, parsed.data_offsets
    if not begin <= end <= len(body):
        raise ShardError(
            f"{name} lies outside the record", where=where, expected=f"within {len(body)}", found=[begin, end]
        )
    if prod(shape) * dtype.itemsize != end - begin:
        raise ShardError(
            f"{name} has a size that its shape does not give", where=where, expected=list(shape), found=end - begin
        )
    if begin < end:
        return torch.frombuffer(body[begin:end], dtype=dtype).view(shape)
    if not name.startswith("empty_prompt_embed"):  # only a null prompt may be missing, and its tail be shared
        raise ShardError(f"{name} is empty", where=where, found=list(shape))
    return torch.empty(shape, dtype=dtype)


def _check(tensors: dict[str, torch.Tensor], about: _About, where: str) -> None:
    """That every tensor is there, of its type and rank, and of the size that the others give it."""
    for name, (dtype, dimensions) in (_REQUIRED | _OPTIONAL).items():
        if name not in tensors:
            if name in _OPTIONAL:
                continue
            raise ShardError("a tensor is missing from the record", where=where, expected=name, found=sorted(tensors))
        tensor = tensors[name]
        if tensor.dtype != _DTYPES[dtype] or (dimensions is not None and tensor.ndim != dimensions):
            raise ShardError(
                f"{name} has another type or rank",
                where=where,
                expected=f"{dtype} of {dimensions or 'any number of'} dimensions",
                found=f"{tensor.dtype} {list(tensor.shape)}",
            )
    prompt, empty_tail = tensors["prompt_embed"], tensors["empty_prompt_embed"]
    if about.shared_prefix > len(prompt):
        raise ShardError("shared_prefix is longer than the prompt", where=where, found=about.shared_prefix)
    if prompt.shape[1] != empty_tail.shape[1]:
        raise ShardError("empty_prompt_embed has another width than prompt_embed", where=where)
    sizes = {
        "prompt_embeds_mask": (len(prompt),),
        "empty_prompt_embeds_mask": (about.shared_prefix + len(empty_tail),),
        "loss_mask": tuple(tensors["pixel_latent"].shape[-2:]),
    }
    for name, size in sizes.items():
        if name in tensors and tuple(tensors[name].shape) != size:
            found = list(tensors[name].shape)
            raise ShardError(
                f"{name} has another size than what it masks", where=where, expected=list(size), found=found
            )
    if "thumbnail" in tensors and tensors["thumbnail"].shape[2] != 3:
        raise ShardError("thumbnail is no RGB image", where=where, found=list(tensors["thumbnail"].shape))


def _controls(stored: torch.Tensor, shapes: Sequence[tuple[int, ...]], where: str) -> tuple[torch.Tensor, ...]:
    sizes = [prod(shape) for shape in shapes]
    if not sizes or 0 in sizes or sum(sizes) != stored.numel():
        raise ShardError(
            "control_latent does not fit control_shapes", where=where, expected=shapes, found=list(stored.shape)
        )
    parts = torch.split(stored.reshape(-1), sizes)
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))
