"""A sample's tensors, described once: name, type, size, and the field of `Sample` that holds each.

Writing, reading, the checks of an index, and what becomes of a tensor in a batch follow from this table. A new tensor
is a row here, a field of `Sample`, and the code that makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

import torch

from qie.errors import RowError
from qie.families import FAMILIES
from qie.recipe import Recipe
from qie.types import Sample

CHANNELS = {False: 16, True: 64}
"""Of a latent, by `Sizes.text_alone`."""

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool, "U8": torch.uint8}
"""The types of stored tensors, by their names in a safetensors header."""

Kind = Literal["latent", "embedding", "mask", "picture"]


class Sizes(NamedTuple):
    """The numbers that decide the size of every tensor: integers for one sample, arrays for many.

    Attributes:
        height, width: of the target's latent.
        control_pixels: latent pixels of all controls together.
        tokens, empty_tokens: lengths of the prompt's and of the null prompt's embedding.
        prefix: leading tokens that both embeddings share.
        token_width: of a token's embedding.
        masked: whether there is a loss mask.
        thumbnail: its height and width; zeros without one.
        paired: whether there is a rejected target.
        text_alone: whether embeddings are those of text alone, as of Qwen-Image-2.1: BF16, beside 64 channels.
    """

    height: Any
    width: Any
    control_pixels: Any
    tokens: Any
    empty_tokens: Any
    prefix: Any
    token_width: Any
    masked: Any
    thumbnail: tuple[Any, Any] = (0, 0)
    paired: Any = False
    text_alone: bool = False

    @property
    def channels(self) -> int:
        """Of a latent."""
        return CHANNELS[self.text_alone]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a record.

    Attributes:
        name: in the record.
        dtype: in the record's header; see `stored_dtype`.
        rank: number of dimensions.
        shape: its shape, by the sample's sizes.
        kind: what it is, which decides how samples are kept in memory and put into batches.
        field: the field of `Sample`, where it has another name.
        there: whether a sample has it, by its sizes; None for always.
        may_be_empty: it may have no values.
        flat: several latents are stored one after the other; a single one in its own shape.
    """

    name: str
    dtype: str
    rank: int
    shape: Callable[[Sizes], tuple[Any, ...]]
    kind: Kind
    field: str = ""
    there: Callable[[Sizes], Any] | None = None
    may_be_empty: bool = False
    flat: bool = False

    def of(self, sample: Sample) -> torch.Tensor | None:
        """As it is stored; None if the sample has none."""
        value = getattr(sample, self.field or self.name)
        if not self.flat:
            return value  # type: ignore[no-any-return]
        if not value:
            return None
        return value[0] if len(value) == 1 else torch.cat([part.reshape(-1) for part in value])

    def stored_dtype(self, *, text_alone: bool) -> str:
        """In the header of a record that holds embeddings of text alone, or of images, too."""
        return "BF16" if text_alone and self.kind == "embedding" else self.dtype

    def nbytes(self, sizes: Sizes) -> Any:
        """Bytes in the record: an integer, or an array if `sizes` holds arrays."""
        size = prod(self.shape(sizes)) * DTYPES[self.dtype].itemsize
        return size if self.there is None else size * self.there(sizes)


TENSORS = (
    StoredTensor("pixel_latent", "F16", 4, lambda of: (of.channels, 1, of.height, of.width), "latent"),
    StoredTensor(
        "control_latent",
        "F16",
        2,
        lambda of: (of.channels, of.control_pixels),
        "latent",
        there=lambda of: not of.text_alone or of.control_pixels > 0,
        flat=True,
    ),
    StoredTensor("prompt_embed", "F16", 2, lambda of: (of.tokens, of.token_width), "embedding"),
    StoredTensor("prompt_embeds_mask", "BOOL", 1, lambda of: (of.tokens,), "mask"),
    StoredTensor(
        "empty_prompt_embed",
        "F16",
        2,
        lambda of: (of.empty_tokens - of.prefix, of.token_width),
        "embedding",
        field="empty_tail",
        may_be_empty=True,
    ),
    StoredTensor("empty_prompt_embeds_mask", "BOOL", 1, lambda of: (of.empty_tokens,), "mask", may_be_empty=True),
    StoredTensor("loss_mask", "U8", 2, lambda of: (of.height, of.width), "mask", there=lambda of: of.masked),
    StoredTensor(
        "rejected_latent",
        "F16",
        4,
        lambda of: (of.channels, 1, of.height, of.width),
        "latent",
        there=lambda of: of.paired,
    ),
    StoredTensor("thumbnail", "U8", 3, lambda of: (*of.thumbnail, 3), "picture", there=lambda of: of.thumbnail[0] > 0),
)
BY_NAME = {tensor.name: tensor for tensor in TENSORS}
ALWAYS = {tensor.name for tensor in TENSORS if tensor.there is None}
"""The tensors that every record has."""


def stored_tensors(sample: Sample) -> dict[str, torch.Tensor]:
    """The tensors of a sample as they are stored."""
    found = {tensor.name: tensor.of(sample) for tensor in TENSORS}
    return {name: value for name, value in found.items() if value is not None}


def tensor_bytes(sample: Sample) -> dict[str, int]:
    """Bytes that each tensor of a sample takes in its record."""
    return {name: value.nbytes for name, value in stored_tensors(sample).items()}


def bytes_by_name(sizes: Sizes) -> dict[str, int]:
    """Bytes that each tensor of a sample of these sizes takes in its record."""
    return {tensor.name: tensor.nbytes(sizes) for tensor in TENSORS if tensor.there is None or tensor.there(sizes)}


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor as stored, and how many of its values were clipped."""

    values: torch.Tensor
    clipped: int


def is_text_alone(recipe: Recipe) -> bool:
    """Whether a recipe's records hold embeddings of text alone; see `Sizes`."""
    return FAMILIES[recipe.family].interleaved


def to_storage(values: torch.Tensor, what: str) -> Stored:
    """`values` in FP16 on the host; from a GPU, in page-locked memory.

    The only way to what is stored, for cached and live training alike. It is exact for bfloat16's normal values within
    range.

    Raises:
        RowError: a value is NaN or infinite; names `what`.
    """
    return store_together((values, what))[0]


def store_together(*tensors: tuple[torch.Tensor, str], dtype: torch.dtype = torch.float16) -> list[Stored]:
    """`to_storage` of tensors on one device, with their names. If that is a GPU, the host waits for it once.

    In bfloat16 it is exact for what was computed in bfloat16.
    """
    halves, counts = zip(*(_halved(values, dtype) for values, _ in tensors), strict=True)
    clipped = torch.stack(counts).tolist()  # waits: the GPU has copied the values by then
    for count, (_, what) in zip(clipped, tensors, strict=True):
        if count < 0:
            raise RowError(f"{what} contains NaN or infinity", hint="try cache.compute_dtype: float32")
    return [Stored(half, count) for half, count in zip(halves, clipped, strict=True)]


def _halved(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`values` as `dtype` on the host, as soon as its GPU has copied them, and on that GPU the number of values that
    were clipped; -1 for NaN or infinity."""
    finite, limit = torch.isfinite(values).all(), torch.finfo(dtype).max
    # In float32: bfloat16 cannot represent the limit and would round it up, to infinity in FP16.
    values = values.float()
    clipped = torch.where(finite, (values.abs() > limit).sum(), -1)
    half = values.clamp(-limit, limit).to(dtype)
    if half.device.type == "cuda":  # rounded there, since torch copies before it rounds: twice the bytes
        half = torch.empty(half.shape, dtype=half.dtype, pin_memory=True).copy_(half, non_blocking=True)
    return half, clipped
