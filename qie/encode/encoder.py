"""Row -> Sample: the one way from images and a prompt to the tensors that are stored and trained on."""

from __future__ import annotations

import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Generic, ParamSpec, TypeVar

import torch
from PIL import Image

from qie.devices import staged
from qie.encode.alignment import compare_pair
from qie.encode.images import (
    MAX_IMAGE_PX,
    Size,
    View,
    apply_view,
    augmented,
    choose_view,
    decode_image,
    decode_layers,
    fit_size,
    has_more_frames,
    on_background,
    require_proportions,
    to_loss_mask,
    to_pixels,
    to_small,
    to_thumbnail,
)
from qie.encode.options import EncoderOptions, make_recipe
from qie.encode.text import Patches, PromptEmbeds, PromptEncoder, VisionFeatures, check_prompt
from qie.encode.vae import VaeEncoder
from qie.errors import QieError, RowError, one_line
from qie.families import FAMILIES, NULL_PROMPT, Family
from qie.pretrained import PretrainedModel
from qie.recipe import Recipe, normal_prompt
from qie.shards.pictures import SmallPictures, encode_pictures
from qie.shards.tensors import Stored, store_together, to_storage
from qie.stages import Stage, Stages, in_turn
from qie.types import Facts, Pair, Row, Sample, Shape

A = TypeVar("A")
B = TypeVar("B")
P = ParamSpec("P")

LATENTS_BYTES = 1 << 30
"""Memory for latents of images that may come again: about 2,000 at 1024²."""

VISION_BYTES = 1 << 30
"""Memory for vision features of controls: about 50 at 1024² in float32, 400 at 384² in bfloat16."""

ALIKE = "the rejected target is the same picture as the target: the pair teaches nothing"
"""A note."""


@dataclass(frozen=True)
class Picture:
    """A decoded image, and the view of it that the models get."""

    image: Image.Image
    view: View

    @classmethod
    def of(cls, image: Image.Image, recipe: Recipe) -> Picture:
        """An image under a recipe's sizes."""
        return cls(image, choose_view(image.size, recipe.areas_px, recipe.buckets_px, recipe.multiple_px))

    def seen_as(self, other: Picture) -> Picture:
        """The same part of this image as the models get of another one of the same proportions, and as large."""
        scales = self.image.width / other.image.width, self.image.height / other.image.height
        left, top, right, bottom = (round(side * scales[place % 2]) for place, side in enumerate(other.view.box))
        return Picture(self.image, View((left, top, right, bottom), other.view.size))

    @cached_property
    def for_vae(self) -> Image.Image:
        return apply_view(self.image, self.view)

    @property
    def proportions(self) -> float:
        """The image's width, in heights."""
        return self.image.width / self.image.height

    def text_size(self, recipe: Recipe) -> Size:
        """The size for the text encoder: the VAE's, where the family has one image for both."""
        if recipe.text_area_px is None:
            return self.view.size
        left, top, right, bottom = self.view.box
        return fit_size(right - left, bottom - top, recipe.text_area_px, recipe.multiple_px)

    def for_text(self, recipe: Recipe) -> Image.Image:
        size = self.text_size(recipe)
        image = self.for_vae if size == self.view.size else apply_view(self.image, View(self.view.box, size))
        return on_background(image, recipe.background)

    def latent_size(self, recipe: Recipe) -> Size:
        """(H, W)."""
        return self.view.size[1] // recipe.latent_scale, self.view.size[0] // recipe.latent_scale


@dataclass(frozen=True)
class DecodedRow:
    """A row, decoded and checked. `notes` tell its owner about changes, such as dropped frames."""

    row: Row
    prompt: str
    target: Picture
    controls: tuple[Picture, ...]
    rejected: Picture | None
    loss_mask: torch.Tensor | None
    notes: tuple[str, ...]
    shape: Shape


@dataclass(frozen=True, eq=False)
class PreparedRow:
    """A row, decoded, checked and resized: all the work that needs no weights."""

    row: Row
    prompt: str
    target: torch.Tensor
    controls: tuple[torch.Tensor, ...]
    rejected: torch.Tensor | None
    patches: Patches
    loss_mask: torch.Tensor | None
    thumbnail: torch.Tensor | None
    pictures: bytes | None
    notes: tuple[str, ...]
    pair: Pair | None


@dataclass(frozen=True, eq=False)
class _Latents:
    """A prepared row with its latents."""

    prepared: PreparedRow
    target: Stored
    controls: tuple[Stored, ...]
    rejected: Stored | None


def decode_row(row: Row, recipe: Recipe, max_image_px: int) -> DecodedRow:
    """Decode and check a row.

    Raises:
        RowError: an image cannot be decoded, the prompt is refused, or the family takes another number of controls.
    """
    family = FAMILIES[recipe.family]
    least, limit = family.min_controls, family.max_controls
    if len(row.controls) < least or (limit is not None and len(row.controls) > limit):
        raise RowError(
            f"{len(row.controls)} control images for a model of family {recipe.family}",
            expected=f"{least} or more" if limit is None else f"exactly {limit}",
            hint="an edit_plus model takes several" if row.controls else "every row needs an image to edit",
        )
    check_prompt(row.prompt)
    images = {"the target": row.target} | {f"control {n}": content for n, content in enumerate(row.controls, start=1)}
    if row.rejected is not None:
        images["the rejected target"] = row.rejected
    layers = {what: decode_layers(content, what, max_image_px) for what, content in images.items()}
    decoded = {what: one.rgba if family.alpha else one.on(recipe.background) for what, one in layers.items()}
    pictures = {what: Picture.of(augmented(image, row.augment), recipe) for what, image in decoded.items()}
    rejected = pictures.pop("the rejected target", None)
    target, *controls = pictures.values()
    if rejected is not None:
        require_proportions(decoded["the rejected target"], decoded["the target"].size, "the rejected target")
        rejected = rejected.seen_as(target)
    loss_mask = None
    if row.mask is not None:
        mask = decode_image(row.mask, "the mask", recipe.background, max_image_px)
        if row.augment is not None:
            # At the target's size, so that the same pixels are cut off it.
            require_proportions(mask, decoded["the target"].size)
            mask = augmented(mask.resize(decoded["the target"].size, Image.Resampling.BOX), row.augment)
        loss_mask = to_loss_mask(mask, target.image.size, target.view, family.latent_scale)
    notes = [
        f"{what} has several frames: the first is used" for what, content in images.items() if has_more_frames(content)
    ]
    if not family.alpha:
        notes += [
            f"{what} has transparent parts: the model gets them as {recipe.background} (data.background)"
            for what, one in layers.items()
            if one.opacity is not None
        ]
    shape = Shape(target.latent_size(recipe), tuple(control.latent_size(recipe) for control in controls))
    prompt = normal_prompt(row.prompt)
    return DecodedRow(row, prompt, target, tuple(controls), rejected, loss_mask, tuple(notes), shape)


def text_room(family: Family, shape: Shape) -> int:
    """How many stored tokens of text the transformer's table of positions holds beside latents of these sizes.

    Text positions begin after the largest half side of a latent, in patches of 2×2. Where the controls stand in the
    text, each takes as many positions as its longer side, and the target begins after them.
    """
    if family.interleaved:
        return family.positions - 1 - sum(max(size) for size in shape.controls)
    return family.positions - max(max(size) for size in (shape.target, *shape.controls)) // 4


class Memo(Generic[A]):
    """The last results, by key, within a budget of bytes: the same image often comes again. The one that nobody asked
    for longest goes first.

    Args:
        budget_bytes: of all results together.
        size_bytes: of one result.
    """

    def __init__(self, budget_bytes: int, size_bytes: Callable[[A], int]) -> None:
        self._budget_bytes, self._size_bytes = budget_bytes, size_bytes
        self._kept: OrderedDict[Hashable, A] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable, compute: Callable[[], A]) -> A:
        """The result for `key`, computed if it is missing. Two threads that ask at once may both compute it."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        result = compute()
        with self._lock:
            if key not in self._kept:
                self._kept[key] = result
                self._bytes += self._size_bytes(result)
            while self._bytes > self._budget_bytes:
                self._bytes -= self._size_bytes(self._kept.popitem(last=False)[1])
        return result


class Encoder:
    """Both frozen encoders under one recipe. The first row loads their weights.

    By default the encoder takes one row at a time. The last bits of a result depend on the rest of its batch, and a
    last bit can decide an FP16 rounding: in a batch, a sample would depend on its neighbours.
    """

    def __init__(
        self,
        pretrained: PretrainedModel,
        recipe: Recipe,
        vae_device: torch.device,
        text_device: torch.device,
        max_image_px: int = MAX_IMAGE_PX,
        thumbnail_px: int | None = None,
        compare_pairs: bool = True,
    ) -> None:
        self.pretrained, self.recipe = pretrained, recipe
        self.thumbnail_px, self.compare_pairs = thumbnail_px, compare_pairs
        self.batch_size = recipe.batch_size
        self._vae_device, self._text_device, self._max_image_px = vae_device, text_device, max_image_px
        self._latents: Memo[Stored] = Memo(LATENTS_BYTES, lambda stored: stored.values.nbytes)
        self._vision: Memo[VisionFeatures] = Memo(VISION_BYTES, lambda features: features.nbytes)

    @classmethod
    def open(
        cls,
        pretrained: PretrainedModel,
        *,
        vae_device: torch.device,
        text_device: torch.device,
        options: EncoderOptions | None = None,
    ) -> Encoder:
        """The encoder of a model with all of `ENCODERS`. Hashes the model's files now, for the recipe.

        Raises:
            ModelError: the tokenizer or processor cannot be loaded, or is another model's.
        """
        options = options or EncoderOptions()
        recipe = make_recipe(pretrained, options, vae_device, text_device)
        for_people = options.thumbnail_px, options.compare_pairs
        encoder = cls(pretrained, recipe, vae_device, text_device, options.max_image_px, *for_people)
        _ = encoder.text  # now, not in the threads that inspect rows; the weights come later
        return encoder

    @cached_property
    def vae(self) -> VaeEncoder:
        dtype = getattr(torch, self.recipe.vae_dtype)
        folder, kind = self.pretrained.component("vae"), self.pretrained.family.vae
        return VaeEncoder(folder, self._vae_device, dtype, kind, compiled=self.recipe.compiled)

    @cached_property
    def text(self) -> PromptEncoder:
        dtype = getattr(torch, self.recipe.text_dtype)
        return PromptEncoder(self.pretrained, self._text_device, dtype, share_prefix=self.recipe.share_prefix)

    def inspect(self, row: Row) -> Facts:
        """Key, shape and length of a row, not encoded. Raises RowError as `encode`, except for NaN and infinity."""
        decoded = self._decode(row)
        told = row.mask is not None, row.rejected is not None
        return Facts(self.recipe.key(row), decoded.shape, self._count_tokens(decoded), *told)

    def encode(self, row: Row) -> Sample:
        """The row's sample, in host memory.

        Raises:
            RowError: an image, the prompt or the number of controls is invalid, or an encoder gives NaN or infinity.
        """
        (sample,) = self.encode_together([row])
        if isinstance(sample, RowError):
            raise sample
        return sample

    def encode_together(self, rows: Sequence[Row]) -> list[Sample | RowError]:
        """Each row's sample, or the reason why it has none; `batch_size` rows at a time, which decides the last bits.

        When a device is out of memory, this and all later batches are halved.
        """
        return in_turn(self.stages, rows)

    @property
    def stages(self) -> Stages[Sequence[Row], list[Sample | RowError]]:
        """The steps of `encode_together`. A RowError stands for a row that failed, in this step or before."""
        prepare = Stage("prepare", self._prepare_rows, workers=min(4, os.cpu_count() or 1))
        vae = Stage("vae", partial(self._in_batches, self._encode_images))
        text = Stage("text", partial(self._in_batches, self._encode_prompts))
        return Stages.of(prepare).then(vae).then(text)

    def embed(self, images: Sequence[Image.Image], prompt: str) -> torch.Tensor:
        """Embedding of a prompt with images of any size, [L, D] on the text encoder's device, for inference.

        Raises:
            RowError: the prompt contains a special token. The null prompt is allowed.
        """
        return self.embed_whole(images, prompt).prompt

    def embed_whole(self, images: Sequence[Image.Image], prompt: str) -> PromptEmbeds:
        """As `embed`: what the text encoder gives for the prompt, and which of its tokens are of an image."""
        prompt = normal_prompt(prompt)
        if prompt:
            check_prompt(prompt)
        pictures = [Picture.of(image, self.recipe).for_text(self.recipe) for image in images]
        features = self.text.vision_features(self.text.patches(pictures))
        return self.text.encode([features], [prompt or NULL_PROMPT])[0]

    def release(self) -> None:
        """Free the weights; the next row loads them again."""
        self.__dict__.pop("vae", None)
        self.__dict__.pop("text", None)

    def _decode(self, row: Row) -> DecodedRow:
        decoded, family = decode_row(row, self.recipe, self._max_image_px), self.pretrained.family
        tokens, room = self._count_tokens(decoded), text_room(family, decoded.shape)
        if tokens > room:
            expected = f"at most {room} tokens{'' if family.interleaved else ', images included'}"
            raise RowError("the prompt is too long", expected=expected, found=tokens)
        if family.interleaved:
            self.require_slots(decoded.controls)
        return decoded

    def require_slots(self, controls: Sequence[Picture]) -> None:
        """Raise RowError unless each control takes one token of the text encoder for four of its latent's."""
        tokens = self.text.image_tokens([control.text_size(self.recipe) for control in controls])
        for number, (found, control) in enumerate(zip(tokens, controls, strict=True), start=1):
            height, width = control.latent_size(self.recipe)
            if 4 * found != height * width:
                raise RowError(
                    f"the text encoder resizes control {number}, so that its tokens do not fit the latent's",
                    expected=height * width // 4,
                    found=found,
                    hint="choose another data.area_px",
                )

    def _count_tokens(self, row: DecodedRow) -> int:
        return self.text.count_tokens([control.text_size(self.recipe) for control in row.controls], row.prompt)

    def _prepare_rows(self, rows: Sequence[Row]) -> list[PreparedRow | RowError]:
        return [_attempt(self._prepare, row) for row in rows]

    def _prepare(self, row: Row) -> PreparedRow:
        decoded = self._decode(row)
        target, small = decoded.target.for_vae, self.recipe.thumbnail_size(decoded.shape)
        return PreparedRow(
            row,
            decoded.prompt,
            self._pixels(target),
            tuple(self._pixels(control.for_vae) for control in decoded.controls),
            None if decoded.rejected is None else self._pixels(decoded.rejected.for_vae),
            self.text.patches([control.for_text(self.recipe) for control in decoded.controls]),
            decoded.loss_mask,
            to_thumbnail(on_background(target, self.recipe.background), small) if small else None,
            self._pictures(decoded),
            decoded.notes,
            self._compare(decoded) if self.compare_pairs else None,
        )

    def _pictures(self, row: DecodedRow) -> bytes | None:
        """Controls, target, rejected target and mask made small, for people."""

        most_px = self.thumbnail_px
        if most_px is None:
            return None

        def small(picture: Picture) -> Image.Image:
            return to_small(on_background(picture.for_vae, self.recipe.background), most_px)

        target, controls = small(row.target), tuple(map(small, row.controls))
        mask = None
        if row.loss_mask is not None:
            mask = Image.fromarray(row.loss_mask.numpy()).resize(target.size, Image.Resampling.BILINEAR)
        rejected = None if row.rejected is None else small(row.rejected)
        return encode_pictures(SmallPictures(target, controls, mask, rejected))

    def _compare(self, row: DecodedRow) -> Pair | None:
        """How the target lies on a control, as the VAE gets them."""
        target, *controls = (
            on_background(picture.for_vae, self.recipe.background) for picture in (row.target, *row.controls)
        )
        wider = [row.target.proportions / control.proportions for control in row.controls]
        return compare_pair(target, controls, wider)

    def _pixels(self, image: Image.Image) -> torch.Tensor:
        return staged(to_pixels(image), self._vae_device, getattr(torch, self.recipe.vae_dtype))

    def _encode_images(self, rows: Sequence[PreparedRow]) -> list[_Latents | RowError]:
        if len(rows) == 1:
            (row,) = rows
            targets = [self._latent(row.row.target_hash, row.row, row.target, "the target's latent")]
        else:  # in a batch, a latent differs from the one that the image gives alone: no other row may have it
            targets = [
                _attempt(to_storage, latent, "the target's latent")
                for latent in self.vae.encode_together([row.target for row in rows])
            ]
        return [
            target if isinstance(target, RowError) else _attempt(self._encode_controls, row, target)
            for row, target in zip(rows, targets, strict=True)
        ]

    def _encode_controls(self, row: PreparedRow, target: Stored) -> _Latents:
        """A row's controls, each encoded alone, so that rows may share them."""
        controls = []
        for digest, pixels in zip(row.row.control_hashes, row.controls, strict=True):
            latent = self._latent(digest, row.row, pixels, "a control's latent")
            if isinstance(latent, RowError):
                raise latent
            controls.append(latent)
        rejected = None
        if row.rejected is not None:
            # Its size is the target's.
            digest = f"{row.row.rejected_hash} {row.row.target_hash}"
            rejected = self._latent(digest, row.row, row.rejected, "the rejected target's latent")
        if isinstance(rejected, RowError):
            raise rejected
        return _Latents(row, target, tuple(controls), rejected)

    def _latent(self, digest: str, row: Row, pixels: torch.Tensor, what: str) -> Stored | RowError:
        """The latent of one image alone: a function of its content and its augmentation."""
        return _attempt(self._latents.get, (digest, row.augment), lambda: to_storage(self.vae.encode(pixels), what))

    def _encode_prompts(self, rows: Sequence[_Latents]) -> list[Sample | RowError]:
        prepared = [row.prepared for row in rows]
        features = [
            self._vision.get((one.row.control_hashes, one.row.augment), partial(self.text.vision_features, one.patches))
            for one in prepared
        ]
        embeds = self.text.encode(features, [one.prompt for one in prepared])
        return [_attempt(self._sample, row, embed) for row, embed in zip(rows, embeds, strict=True)]

    def _sample(self, row: _Latents, embeds: PromptEmbeds) -> Sample:
        prepared, family = row.prepared, self.pretrained.family
        whole = embeds.prompt, embeds.null, embeds.shared_prefix
        embed, null, prefix = embeds.of_text() if family.interleaved else whole
        prompt, empty_tail = store_together(
            (embed, "the prompt's embedding"),
            (null[prefix:], "the null prompt's embedding"),
            dtype=getattr(torch, family.prompt_dtype),
        )
        alike = row.rejected is not None and torch.equal(row.target.values, row.rejected.values)
        return Sample(
            key=self.recipe.key(prepared.row),
            prompt=prepared.prompt,
            pixel_latent=row.target.values,
            control_latent=tuple(control.values for control in row.controls),
            prompt_embed=prompt.values,
            prompt_embeds_mask=torch.ones(len(prompt.values), dtype=torch.bool),
            empty_tail=empty_tail.values,
            empty_prompt_embeds_mask=torch.ones(prefix + len(empty_tail.values), dtype=torch.bool),
            shared_prefix=prefix,
            loss_mask=prepared.loss_mask,
            rejected_latent=None if row.rejected is None else row.rejected.values,
            clipped=sum(part.clipped for part in (row.target, row.rejected, *row.controls, prompt, empty_tail) if part),
            thumbnail=prepared.thumbnail,
            image_slots=embeds.image_slots if family.interleaved else None,
            pictures=prepared.pictures,
            notes=(*prepared.notes, ALIKE) if alike else prepared.notes,
            pair=prepared.pair,
        )

    def _in_batches(
        self, work: Callable[[Sequence[A]], list[B | RowError]], rows: Sequence[A | RowError]
    ) -> list[B | RowError]:
        """`work` on the rows that have not failed yet, `batch_size` at a time."""
        results: list[B | RowError] = []
        while len(results) < len(rows):
            batch = rows[len(results) : len(results) + self.batch_size]
            good = [row for row in batch if not isinstance(row, RowError)]
            try:
                done = iter(work(good) if good else ())
            except torch.OutOfMemoryError as error:
                if len(batch) == 1:
                    raise QieError(
                        "an encoder's device ran out of memory",
                        found=one_line(error, 200),
                        hint="give each encoder its own device (cache.*_encoder_device), or lower data.area_px",
                    ) from error
                self.batch_size = len(batch) // 2
                warnings.warn(f"out of memory: continuing with {self.batch_size} rows at a time", stacklevel=2)
                continue
            results += [row if isinstance(row, RowError) else next(done) for row in batch]
        return results


def _attempt(work: Callable[P, A], *args: P.args, **kwargs: P.kwargs) -> A | RowError:
    try:
        return work(*args, **kwargs)
    except RowError as error:
        return error
