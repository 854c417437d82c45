"""The three values that qie passes around: Row, Sample, Batch.

Shapes are written with these letters everywhere:

    B  samples in a batch        H, W  height and width of a latent (image pixels / 8, or 16)
    C  latent channels (16, 64)  L     text tokens (template prefix dropped)
    D  width of a text token
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from qie.png import file_bytes
from qie.quantities import human_bytes

if TYPE_CHECKING:
    import torch

    from qie.png import ImageLike


@dataclass(frozen=True)
class Augment:
    """One variant of a row's images, the same for target, controls and mask.

    Attributes:
        flip: mirrored, left to right.
        box: what is kept of each picture: left, top, right, bottom as fractions of its sides, before mirroring.
    """

    flip: bool = False
    box: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0)

    def __str__(self) -> str:
        return f"{'flip' if self.flip else 'as is'} {' '.join(f'{side:.6f}' for side in self.box)}"


@dataclass(frozen=True)
class Row:
    """One training example as its owner has it. Images are the bytes of their files, undecoded; `Row.of` takes others.

    Attributes:
        index: position in the source, from 0.
        name: the owner's name for it, for messages; not part of its identity.
        target: the image to be learnt.
        controls: the images to edit, in order; none for text-to-image.
        prompt: the instruction, as given (see `qie.recipe.normal_prompt` for what is hashed and encoded).
        mask: image whose bright parts weigh as foreground in the loss.
        more_prompts: further captions of the same edit; see `qie.data.variants`.
        source: name of the row's source in a mixture; not part of its identity.
        variant: which of the row's variants this is, from 0; not part of its identity.
        augment: what is done to the pictures before they are encoded.
        rejected: another image for the same controls and prompt, that people like less than the target.
    """

    index: int
    name: str
    target: bytes
    controls: tuple[bytes, ...]
    prompt: str
    mask: bytes | None = None
    more_prompts: tuple[str, ...] = ()
    source: str = ""
    variant: int = 0
    augment: Augment | None = None
    rejected: bytes | None = None

    @classmethod
    def of(
        cls,
        *,
        target: ImageLike,
        controls: ImageLike | Sequence[ImageLike] = (),
        prompt: str,
        mask: ImageLike | None = None,
        rejected: ImageLike | None = None,
        index: int = 0,
        name: str = "",
        more_prompts: Sequence[str] = (),
    ) -> Row:
        """A row of images as Python has them: paths of files, their bytes, PIL images, or NumPy arrays.

        A path is read, so its row is that of its bytes, with the same key. What is in memory becomes a PNG without
        loss, the same on every machine: PIL images of 8 bits a channel, as a viewer shows them (upright, with their
        colour profile), and arrays, uint8 or bool of [H, W] or [H, W, channels].

        Args:
            target, prompt, mask, rejected, index, more_prompts: see `Row`.
            controls: one image, or several in order.
            name: for messages; by default the target's file name.

        Raises:
            RowError: a file cannot be read, or an image is of another kind; says which.
        """
        listed = controls if isinstance(controls, (list, tuple)) else [cast("ImageLike", controls)]
        return cls(
            index=index,
            name=name or (Path(target).stem if isinstance(target, (str, os.PathLike)) else f"row {index}"),
            target=file_bytes(target, "the target"),
            controls=tuple(file_bytes(one, f"control {number}") for number, one in enumerate(listed, start=1)),
            prompt=prompt,
            mask=None if mask is None else file_bytes(mask, "the mask"),
            rejected=None if rejected is None else file_bytes(rejected, "the rejected target"),
            more_prompts=tuple(more_prompts),
        )

    def __repr__(self) -> str:
        images = {"target": (self.target,), "controls": self.controls}
        images |= {what: (one,) for what in ("mask", "rejected") if (one := getattr(self, what))}
        sizes = (
            f"{what} {' + '.join(human_bytes(len(one)) for one in files)}" for what, files in images.items() if files
        )
        return f"<Row {self.index} {_cut(self.name)}: {_cut(self.prompt)}, {', '.join(sizes)}>"

    def _repr_html_(self) -> str:
        from qie.html_report.notebook import row_html

        return row_html(self)

    @cached_property
    def target_hash(self) -> str:
        """SHA-256 of the target's file; computed once, since key and encoder both ask for it."""
        return hashlib.sha256(self.target).hexdigest()

    @cached_property
    def rejected_hash(self) -> str | None:
        """SHA-256 of the rejected target's file."""
        return None if self.rejected is None else hashlib.sha256(self.rejected).hexdigest()

    @cached_property
    def control_hashes(self) -> tuple[str, ...]:
        """SHA-256 of each control's file."""
        return tuple(hashlib.sha256(control).hexdigest() for control in self.controls)


PAIR_WARNINGS = {
    "shifted": "target shifted against its control",
    "scaled": "target enlarged or reduced against its control",
    "proportions": "target of other proportions than its control",
    "identical": "target and control are the same",
}
"""What a pair may be warned of."""

LEAST_SCALING = 0.01
"""A change of size that is told as one; less is an error of measuring a shift."""


@dataclass(frozen=True)
class Pair:
    """How a row's target lies on its control. What is None is as an edit should leave it.

    Attributes:
        control: the one that the target matches best, from 1; None where it matches none of several.
        identical: the target is the control.
        proportions: how much wider the target is for its height, as a factor.
        shift_px: how far the target's middle has moved (x, y), in pixels of the target as it is encoded.
        scale: how much the target is enlarged.
        agreement: the part of the picture, of what can be told of it, that moves so.
    """

    control: int | None = None
    identical: bool | None = None
    proportions: float | None = None
    shift_px: tuple[int, int] | None = None
    scale: float | None = None
    agreement: float | None = None

    @property
    def warning(self) -> str | None:
        """One of `PAIR_WARNINGS`."""
        if self.proportions is not None:
            return "proportions"
        if self.scale is not None and abs(self.scale - 1) >= LEAST_SCALING:
            return "scaled"
        if self.shift_px is not None:
            return "shifted"
        return "identical" if self.identical else None


@dataclass(frozen=True, eq=False)
class Sample:
    """A row's encoded tensors, as they are stored: FP16 (embeddings of some families BF16), masks as bool or uint8.

    Attributes:
        key: content hash of the row under its recipe, 64 hex characters.
        prompt: the prompt that was encoded.
        pixel_latent: the target, [C, 1, H, W].
        control_latent: each control in order, [C, 1, H_i, W_i].
        prompt_embed: [L, D].
        prompt_embeds_mask: [L], all true for a single sample.
        empty_tail: the same images with the null prompt, without the tokens that both embeddings share, [L0 - S, D].
        empty_prompt_embeds_mask: [L0].
        shared_prefix: S, the number of leading tokens in which both embeddings are equal, because the images stand
            before the prompt in a causal model. Stored once.
        loss_mask: [H, W] uint8, 255 is foreground; None when the row has no mask.
        rejected_latent: the rejected target, as large as the target; None when the row has none.
        clipped: how many values were finite but beyond FP16's range and were clipped to ±65504.
        thumbnail: the target made small, [h, w, 3] uint8, as shards of an earlier qie hold it; None where the recipe
            has none.
        image_slots: for each control, how many tokens of `prompt_embed` stand before it, where the transformer puts
            controls among the text's tokens and no token of an image is stored; None for other families.
        pictures: a JPEG of controls, target and mask made small, see `qie.shards.pictures`; kept beside the record.
            None where none was asked for, and of a sample that was read for training.
        notes: what encoding did to the row that its owner may want to know; kept in the index, not in the record.
        pair: how target and control lie on each other; None if that was not measured. Kept in the index, too.
        own: nothing else holds the memory of its tensors, so a batch may take them as they are.
    """

    key: str
    prompt: str
    pixel_latent: torch.Tensor
    control_latent: tuple[torch.Tensor, ...]
    prompt_embed: torch.Tensor
    prompt_embeds_mask: torch.Tensor
    empty_tail: torch.Tensor
    empty_prompt_embeds_mask: torch.Tensor
    shared_prefix: int
    loss_mask: torch.Tensor | None = None
    rejected_latent: torch.Tensor | None = None
    clipped: int = 0
    thumbnail: torch.Tensor | None = None
    image_slots: tuple[int, ...] | None = None
    pictures: bytes | None = None
    notes: tuple[str, ...] = ()
    pair: Pair | None = None
    own: bool = False

    def __repr__(self) -> str:
        return f"<Sample {self.key[:12]}: {_cut(self.prompt)}, {_tensors(self)}>"

    def _repr_html_(self) -> str:
        from qie.html_report.notebook import sample_html

        return sample_html(self)

    @property
    def empty_prompt_embed(self) -> torch.Tensor:
        """The whole embedding of the null prompt, [L0, D]: joined each time it is asked for."""
        import torch

        return torch.cat([self.prompt_embed[: self.shared_prefix], self.empty_tail])

    @property
    def shape(self) -> Shape:
        """The latent sizes of target and controls, which all samples of a batch share."""
        return Shape(_size(self.pixel_latent), tuple(_size(latent) for latent in self.control_latent))


@dataclass(frozen=True, order=True)
class Shape:
    """Latent sizes (H, W) of a sample's target and controls. The transformer takes one shape per batch."""

    target: tuple[int, int]
    controls: tuple[tuple[int, int], ...]

    def in_pixels(self, scale: int) -> str:
        """For people; `scale` is in image pixels per latent pixel."""
        target, *controls = (f"{w * scale}×{h * scale}" for h, w in (self.target, *self.controls))
        return f"{target} px from {' + '.join(controls) or 'text'}"


class Facts(NamedTuple):
    """The facts known about a sample before it is encoded: key, shape, length of the prompt embedding, mask or not,
    rejected target or not."""

    key: str
    shape: Shape
    tokens: int
    masked: bool = False
    paired: bool = False


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples of one shape, stacked. Prompts are padded with zeros to the longest.

    Attributes:
        keys: content hash of each sample.
        indices: the samples' positions in their stream.
        weight: [B] float32, 1 on average over the global batch; 0 marks a sample that only fills up the last batch of a
            shape.
        pixel_latent: [B, C, 1, H, W].
        control_latent: each control, [B, C, 1, H_i, W_i].
        prompt_embed: [B, L, D].
        prompt_embeds_mask: [B, L] bool; None when nothing is padded, which attention computes faster.
        empty_tail: of the null prompt, what does not stand in `prompt_embed`, [B, longest L0 - S, D].
        prompt_lengths: L of each sample.
        shared_prefixes, empty_lengths: S and L0 of each sample.
        empty_prompt_embeds_mask: [B, L0] bool or None.
        loss_mask: [B, H, W] uint8; None when no sample has one. Samples without a mask are all foreground.
        rejected_latent: [B, C, 1, H, W]; None when a sample has none.
        image_slots: as of `Sample`: the same for all samples, which have one shape and one template.
        prompts: as they were encoded.
        preserved: which samples are of a source that the model is to treat as before; nothing where no source is.
    """

    keys: tuple[str, ...]
    indices: tuple[int, ...]
    weight: torch.Tensor
    pixel_latent: torch.Tensor
    control_latent: tuple[torch.Tensor, ...]
    prompt_embed: torch.Tensor
    prompt_embeds_mask: torch.Tensor | None
    empty_tail: torch.Tensor
    prompt_lengths: tuple[int, ...]
    shared_prefixes: tuple[int, ...]
    empty_lengths: tuple[int, ...]
    empty_prompt_embeds_mask: torch.Tensor | None
    loss_mask: torch.Tensor | None = None
    rejected_latent: torch.Tensor | None = None
    image_slots: tuple[int, ...] | None = None
    prompts: tuple[str, ...] = ()
    preserved: tuple[bool, ...] = ()

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        prompts = ", ".join(map(_cut, self.prompts[:_FEW]))
        more = f" and {len(self.prompts) - _FEW} more" if len(self.prompts) > _FEW else ""
        return f"<Batch of {len(self)}: {prompts}{more}, {_tensors(self)}>"

    @cached_property
    def empty_prompt_embed(self) -> torch.Tensor:
        """[B, L0, D]: joined when it is asked for, where the batch is: most steps drop no caption."""
        longest = max(self.empty_lengths)
        joined = self.prompt_embed.new_zeros(len(self), longest, self.prompt_embed.shape[-1])
        parts = zip(joined, self.prompt_embed, self.empty_tail, self.shared_prefixes, self.empty_lengths, strict=True)
        for slot, prompt, tail, start, stop in parts:
            slot[:start].copy_(prompt[:start])
            slot[start:stop].copy_(tail[: stop - start])
        return joined

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """The batch on a device, its latents and embeddings in `dtype`; masks and weights keep theirs."""

        rejected = self.rejected_latent

        def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        return replace(
            self,
            weight=self.weight.to(device, non_blocking=True),
            pixel_latent=self.pixel_latent.to(device, dtype, non_blocking=True),
            control_latent=tuple(latent.to(device, dtype, non_blocking=True) for latent in self.control_latent),
            prompt_embed=self.prompt_embed.to(device, dtype, non_blocking=True),
            prompt_embeds_mask=moved(self.prompt_embeds_mask),
            empty_tail=self.empty_tail.to(device, dtype, non_blocking=True),
            empty_prompt_embeds_mask=moved(self.empty_prompt_embeds_mask),
            loss_mask=moved(self.loss_mask),
            rejected_latent=None if rejected is None else rejected.to(device, dtype, non_blocking=True),
        )


_FEW = 4
_PROMPT_CHARACTERS = 60


def _cut(text: str) -> str:
    return repr(text if len(text) <= _PROMPT_CHARACTERS else f"{text[:_PROMPT_CHARACTERS].rstrip()}…")


def tensors_of(values: Sample | Batch) -> dict[str, torch.Tensor]:
    """Its tensors by name, in the order of its fields; of several controls, `control_latent 1` and so on."""
    found: dict[str, torch.Tensor] = {}
    for field in fields(values):
        value = getattr(values, field.name)
        if hasattr(value, "dtype"):
            found[field.name] = value
        elif field.name == "control_latent":
            names = [f"control_latent {number}" for number in range(1, len(value) + 1)]
            found |= zip(names if len(value) > 1 else ["control_latent"], value, strict=True)
    return found


def _tensors(values: Sample | Batch) -> str:
    """Names, shapes and types of tensors of three and more dimensions and of embeddings, and the bytes of all."""
    tensors = tensors_of(values)
    told = {
        name: one
        for name, one in tensors.items()
        if name.endswith(("_latent", "prompt_embed", "loss_mask")) or " " in name
    }
    shapes = (f"{name} {list(one.shape)} {_type(one)}" for name, one in told.items())
    where = {str(one.device) for one in tensors.values()} - {"cpu"}
    return ", ".join([*shapes, human_bytes(sum(one.nbytes for one in tensors.values())), *sorted(where)])


def _type(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _size(latent: torch.Tensor) -> tuple[int, int]:
    return int(latent.shape[-2]), int(latent.shape[-1])
