"""Sample <-> the bytes of one `<key>.safetensors` member.

The writing is left to the safetensors library. Reading is done here, because the library can neither read from an
offset in a larger file nor hand out tensors without copying them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, TypeAdapter, ValidationError
from safetensors import TensorSpec, serialize

from qie.errors import ShardError
from qie.recipe import canonical_json
from qie.shards.tensors import ALWAYS, BY_NAME, CHANNELS, DTYPES, Sizes, stored_tensors
from qie.types import Sample, Shape

FORMAT_VERSION = 1

Whole = Annotated[int, Field(strict=True, ge=0, lt=1 << 62)]


@dataclass(frozen=True)
class _TensorEntry:
    """A tensor in the header of a safetensors file."""

    dtype: Literal["F16", "BF16", "BOOL", "U8"]
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
    image_slots: tuple[Whole, ...] | None = None


_TENSOR_ENTRIES = TypeAdapter(dict[str, _TensorEntry])
_ABOUT = TypeAdapter(_About)


def encode(sample: Sample, recipe_digest: str) -> bytes:
    """The record of a sample: a function of the sample alone, so equal samples are equal bytes.

    Of the null prompt's embedding only the tail after `shared_prefix` is stored. Several controls, which may differ in
    size, are stored as one flat tensor with their shapes in the metadata. Where images stand in the text is there, too,
    if the embeddings are of text alone.
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
    if sample.image_slots is not None:
        about["image_slots"] = list(sample.image_slots)
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
class _View:
    """Where a tensor lies: `count` values from `offset` bytes into the body."""

    field: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    count: int
    offset: int

    def of(self, body: memoryview) -> torch.Tensor:
        if not self.count:
            return torch.empty(self.shape, dtype=self.dtype)
        values = torch.frombuffer(body, dtype=self.dtype, count=self.count, offset=self.offset)
        return values if len(self.shape) == 1 else values.view(self.shape)


@dataclass(frozen=True, eq=False)
class _Layout:
    """What the tensors' part of a header says, checked: sizes, and where each tensor lies in the body."""

    shape: Shape
    sizes: Sizes
    tensors: tuple[_View, ...]
    controls: tuple[_View, ...]


@dataclass(frozen=True, eq=False)
class Record:
    """A record whose header was parsed and fits its bytes."""

    _about: _About
    _layout: _Layout
    _body: memoryview

    @property
    def key(self) -> str:
        """Of its sample."""
        return self._about.key

    @property
    def shape(self) -> Shape:
        """Latent sizes of target and controls."""
        return self._layout.shape

    @property
    def sizes(self) -> Sizes:
        """The numbers that decide the size of each tensor."""
        return self._layout.sizes

    def sample(self, *, own: bool = False) -> Sample:
        """The sample; its tensors share the record's memory, which is its `own` or not."""
        about, layout, body = self._about, self._layout, self._body
        return Sample(
            key=about.key,
            prompt=about.prompt,
            control_latent=tuple([view.of(body) for view in layout.controls]),
            shared_prefix=about.shared_prefix,
            clipped=about.clipped,
            image_slots=about.image_slots,
            own=own,
            **{view.field: view.of(body) for view in layout.tensors},  # type: ignore[arg-type]
        )


def parse(record: memoryview, where: str) -> Record:
    """Check a record's header against itself and the record's length.

    Args:
        record: the member's bytes, in a writable buffer (torch takes no other without a warning).
        where: shard and member, for messages.

    Raises:
        ShardError: the record is malformed; every defect has its own message.
    """
    try:
        metadata, tensors, body = _split(record)
        about = _about(metadata)
        layout = _layout(tensors, about.control_shapes, about.shared_prefix, about.image_slots, len(body))
        return Record(about, layout, body)
    except ShardError as error:
        error.where = where
        raise


def prompt_of(beginning: memoryview, where: str) -> str:
    """The prompt, from the beginning of a record that holds at least its header: for people, checked against nothing.

    Raises:
        ShardError: the header is longer, or is none.
    """
    try:
        metadata, _, _ = _split(beginning)
        return _about(metadata).prompt
    except ShardError as error:
        error.where = where
        raise


def decode(record: memoryview, where: str) -> Sample:
    """The sample in a record; see `parse`. Its tensors share the record's memory."""
    return parse(record, where).sample()


_METADATA = b'{"__metadata__":'
_METADATA_END = b'}"},'
"""The metadata is a JSON object in a string. In a string, a quotation mark has a backslash before it, never a brace."""


def _split(record: memoryview) -> tuple[object, bytes, memoryview]:
    """The metadata, the header's JSON without it, and the body.

    The safetensors library writes the metadata first; what follows is the same for all records of the same sizes.
    """
    if len(record) < 8:
        raise ShardError("the record is shorter than its header's length field", found=f"{len(record)} bytes")
    length = int.from_bytes(record[:8], "little")
    if length > len(record) - 8:
        raise ShardError("the header is longer than the record", expected=f"≤ {len(record) - 8}", found=length)
    text, body = bytes(record[8 : 8 + length]), record[8 + length :]
    end = text.find(_METADATA_END, len(_METADATA)) if text.startswith(_METADATA) else -1
    if end > 0:
        metadata = _json(text[len(_METADATA) : end + 3])
        return metadata, b"{" + text[end + 4 :].rstrip(), body
    header = _json(text)
    if not isinstance(header, dict):
        raise ShardError("the header is not a JSON object", found=type(header).__name__)
    metadata = header.pop("__metadata__", None)
    return metadata, json.dumps(header).encode(), body


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ShardError("the header is not JSON", found=error) from error


@lru_cache(maxsize=4096)
def _layout(
    header: bytes,
    control_shapes: tuple[tuple[int, int, int, int], ...],
    shared_prefix: int,
    image_slots: tuple[int, ...] | None,
    length: int,
) -> _Layout:
    """The layout that a header, without its metadata, gives to a body of `length` bytes.

    Remembered: to check it takes longer than all else that reading does, and many samples have the same.
    """
    entries = _entries(_json(header), length)
    text_alone = image_slots is not None
    _require_types(entries, text_alone=text_alone, controls=bool(control_shapes))
    sizes = _sizes(entries, control_shapes, shared_prefix, text_alone=text_alone)
    _require_shapes(entries, sizes)
    _require_no_gaps(entries, length)
    if image_slots is not None:
        _require_slots(image_slots, len(control_shapes), shared_prefix)
    flat = entries.get("control_latent")
    controls, at = [], flat.data_offsets[0] if flat else 0
    for control in control_shapes:
        view = _view("", "F16", control, at)
        controls.append(view)
        at += view.count * view.dtype.itemsize
    tensors = [
        _view(BY_NAME[name].field or name, entry.dtype, entry.shape, entry.data_offsets[0])
        for name, entry in entries.items()
        if entry is not flat
    ]
    shape = Shape((sizes.height, sizes.width), tuple((h, w) for _, _, h, w in control_shapes))
    return _Layout(shape, sizes, tuple(tensors), tuple(controls))


def _view(field: str, dtype: str, shape: tuple[int, ...], offset: int) -> _View:
    return _View(field, DTYPES[dtype], shape, prod(shape), offset)


def _about(metadata: object) -> _About:
    try:
        about = json.loads(metadata["qie"])  # type: ignore[index]
        version = about["format_version"]
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise ShardError("the record was not written by qie", expected="metadata 'qie'", found=metadata) from error
    if version != FORMAT_VERSION:
        raise ShardError(
            "the record is of another format version",
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
            f"the record's {name} is missing or wrong", expected=first["msg"], found=first["input"]
        ) from error


def _entries(header: dict[str, Any], length: int) -> dict[str, _TensorEntry]:
    """The header's tensors, each within a body of `length` bytes and as large as its shape says."""
    try:
        entries = _TENSOR_ENTRIES.validate_python(header)
    except ValidationError as error:
        name = str(error.errors(include_url=False)[0]["loc"][0])
        raise ShardError(f"the header's entry for {name} is malformed", found=header[name]) from error
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        if not begin <= end <= length:
            raise ShardError(f"{name} lies outside the record", expected=f"within {length}", found=[begin, end])
        if prod(entry.shape) * DTYPES[entry.dtype].itemsize != end - begin:
            raise ShardError(
                f"{name} has a size that its shape does not give",
                expected=list(entry.shape),
                found=end - begin,
            )
    return entries


def _require_types(entries: Mapping[str, _TensorEntry], *, text_alone: bool, controls: bool) -> None:
    """That the tensors are those of a sample, each of its type, and that none is empty but those that may be."""
    required = ALWAYS | ({"control_latent"} if controls or not text_alone else set())
    if not entries.keys() <= BY_NAME.keys():
        unknown = sorted(entries.keys() - BY_NAME.keys())
        raise ShardError("the record has a tensor that the format does not know", found=unknown)
    if not entries.keys() >= required:
        missing = min(required - entries.keys())
        raise ShardError("a tensor is missing from the record", expected=missing, found=sorted(entries))
    for name, entry in entries.items():
        stored = BY_NAME[name]
        dtype = stored.stored_dtype(text_alone=text_alone)
        if entry.dtype != dtype or not (stored.flat or len(entry.shape) == stored.rank):
            raise ShardError(
                f"{name} has another type or rank",
                expected=f"{dtype} of {'any number of' if stored.flat else stored.rank} dimensions",
                found=f"{entry.dtype} {list(entry.shape)}",
            )
        if 0 in entry.shape and not stored.may_be_empty:
            raise ShardError(f"{name} is empty", found=list(entry.shape))


def _require_slots(slots: tuple[int, ...], controls: int, shared_prefix: int) -> None:
    """That each control stands in the text that both prompts share, in order."""
    if len(slots) != controls or any(slot > shared_prefix for slot in slots) or list(slots) != sorted(slots):
        expected = f"a place for each of {controls} controls, in order, up to {shared_prefix}"
        raise ShardError("image_slots do not fit the controls", expected=expected, found=list(slots))


def _sizes(
    entries: Mapping[str, _TensorEntry],
    controls: tuple[tuple[int, int, int, int], ...],
    prefix: int,
    *,
    text_alone: bool,
) -> Sizes:
    """The sizes that latents and embeddings have, and that all tensors should fit."""
    flat = entries["control_latent"].shape if "control_latent" in entries else (0,)
    (*_, height, width), (tokens, token_width) = entries["pixel_latent"].shape, entries["prompt_embed"].shape
    if prefix > tokens:
        raise ShardError("shared_prefix is longer than the prompt", found=prefix)
    fitting = all(shape[:2] == (CHANNELS[text_alone], 1) and 0 not in shape for shape in controls)
    if not fitting or not (controls or text_alone) or sum(map(prod, controls)) != prod(flat):
        raise ShardError("control_latent does not fit control_shapes", expected=controls, found=list(flat))
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
        paired="rejected_latent" in entries,
        text_alone=text_alone,
    )


def _require_shapes(entries: Mapping[str, _TensorEntry], sizes: Sizes) -> None:
    for name, entry in entries.items():
        shape = BY_NAME[name].shape(sizes)
        if entry.shape != shape and not BY_NAME[name].flat:
            raise ShardError(
                f"{name} has another shape than the sample's sizes give it",
                expected=list(shape),
                found=list(entry.shape),
            )


def _require_no_gaps(entries: Mapping[str, _TensorEntry], length: int) -> None:
    """That the tensors fill a body of `length` bytes, in whatever order, without gaps or overlaps."""
    at = 0
    for begin, end in sorted(entry.data_offsets for entry in entries.values()):
        if begin != at:
            raise ShardError("the record has gaps or overlaps between tensors", expected=at, found=begin)
        at = end
    if at != length:
        raise ShardError("the record has bytes after its tensors", expected=at, found=length)
