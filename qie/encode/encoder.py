"""Row -> Sample: the one way from images and a prompt to what is stored and trained on."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from PIL import Image

from qie.encode.fp16 import Stored, to_storage
from qie.encode.images import MAX_IMAGE_PX, to_pixels, to_thumbnail
from qie.encode.memo import LATENTS_BYTES, SEEN_BYTES, Memo
from qie.encode.options import EncoderOptions, make_recipe
from qie.encode.rows import DecodedRow, PreparedRow, decode_row, see
from qie.encode.text import MAX_POSITIONS, PromptEmbeds, PromptEncoder, Seen, check_prompt
from qie.encode.vae import VaeEncoder
from qie.errors import QieError, RowError
from qie.pretrained import PretrainedModel
from qie.recipe import NULL_PROMPT, Recipe, normal_prompt
from qie.stages import Stage, in_turn
from qie.types import Facts, Row, Sample

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class _Latents:
    """A prepared row with its latents."""

    prepared: PreparedRow
    target: Stored
    controls: tuple[Stored, ...]


class Encoder:
    """Both frozen encoders under one recipe. Their weights are loaded when the first row is encoded.

    By default rows are encoded one at a time: the last bits of a result depend on what else is in a batch, and a last
    bit can decide an FP16 rounding, so a batch would make a sample depend on its neighbours.
    """

    def __init__(
        self,
        pretrained: PretrainedModel,
        recipe: Recipe,
        vae_device: torch.device,
        text_device: torch.device,
        max_image_px: int = MAX_IMAGE_PX,
    ) -> None:
        self.pretrained, self.recipe = pretrained, recipe
        self.batch_size = recipe.batch_size
        self._vae_device, self._text_device, self._max_image_px = vae_device, text_device, max_image_px
        self._latents: Memo[Stored] = Memo(LATENTS_BYTES, lambda stored: stored.values.nbytes)
        self._seen: Memo[Seen] = Memo(SEEN_BYTES, lambda seen: seen.nbytes)

    @classmethod
    def open(
        cls,
        pretrained: PretrainedModel,
        *,
        vae_device: torch.device,
        text_device: torch.device,
        options: EncoderOptions | None = None,
    ) -> Encoder:
        """The encoder of a model with all of `ENCODERS`. Its recipe is made now, from the content of the files.

        Raises:
            ModelError: the tokenizer or processor cannot be loaded, or is another model's.
        """
        options = options or EncoderOptions()
        recipe = make_recipe(pretrained, options, vae_device, text_device)
        encoder = cls(pretrained, recipe, vae_device, text_device, options.max_image_px)
        _ = encoder.text  # now, not in the threads that inspect rows; its weights wait
        return encoder

    @cached_property
    def vae(self) -> VaeEncoder:
        dtype = getattr(torch, self.recipe.vae_dtype)
        return VaeEncoder(self.pretrained.component("vae"), self._vae_device, dtype, compiled=self.recipe.compiled)

    @cached_property
    def text(self) -> PromptEncoder:
        dtype = getattr(torch, self.recipe.text_dtype)
        return PromptEncoder(self.pretrained, self._text_device, dtype, share_prefix=self.recipe.share_prefix)

    def inspect(self, row: Row) -> Facts:
        """What is known of a row without encoding it. Raises RowError as `encode` would, but for NaN and infinity."""
        decoded = self._decode(row)
        return Facts(self.recipe.key(row), decoded.shape, self._count_tokens(decoded), row.mask is not None)

    def encode(self, row: Row) -> Sample:
        """The row's sample, in host memory.

        Raises:
            RowError: an image, the prompt or the number of controls is refused, or an encoder gives NaN or infinity.
        """
        (sample,) = self.encode_together([row])
        if isinstance(sample, RowError):
            raise sample
        return sample

    def encode_together(self, rows: Sequence[Row]) -> list[Sample | RowError]:
        """Each row's sample, or why it has none; `batch_size` rows at a time, which decides the last bits.

        On a device that is out of memory the batch is halved, for all later ones, too.
        """
        samples: list[Sample | RowError] = in_turn(self.stages, rows)
        return samples

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """What `encode_together` consists of. Each takes a list and gives one of the same length, in which a RowError
        stands for a row that failed, then or before."""
        return (
            Stage("prepare", partial(_each, self._prepare), workers=min(4, os.cpu_count() or 1)),
            Stage("vae", partial(self._in_parts, self._encode_images)),
            Stage("text", partial(self._in_parts, self._encode_prompts)),
        )

    def embed(self, images: Sequence[Image.Image], prompt: str) -> torch.Tensor:
        """Embedding of a prompt over images of any size, [L, D] on the text encoder's device, as painting needs it.

        Raises:
            RowError: the prompt contains a special token. The null prompt is allowed.
        """
        prompt = normal_prompt(prompt)
        if prompt:
            check_prompt(prompt)
        pictures = [see(image, self.recipe).for_text(self.recipe) for image in images]
        seen = self.text.see(self.text.patches(pictures))
        return self.text.encode([seen], [prompt or NULL_PROMPT])[0].prompt

    def release(self) -> None:
        """Let go of the weights; what is encoded next loads them again."""
        self.__dict__.pop("vae", None)
        self.__dict__.pop("text", None)

    def _decode(self, row: Row) -> DecodedRow:
        decoded = decode_row(row, self.recipe, self._max_image_px)
        tokens = self._count_tokens(decoded)
        # The transformer's text positions begin behind the largest half side of an image, in patches of 2×2.
        room = MAX_POSITIONS - max(max(size) for size in (decoded.shape.target, *decoded.shape.controls)) // 4
        if tokens > room:
            raise RowError("the prompt is too long", expected=f"at most {room} tokens, images included", found=tokens)
        return decoded

    def _count_tokens(self, row: DecodedRow) -> int:
        return self.text.count_tokens([control.text_size(self.recipe) for control in row.controls], row.prompt)

    def _prepare(self, row: Row) -> PreparedRow:
        decoded = self._decode(row)
        target, small = decoded.target.for_vae, self.recipe.thumbnail_size(decoded.shape)
        return PreparedRow(
            row,
            decoded.prompt,
            to_pixels(target),
            tuple(to_pixels(control.for_vae) for control in decoded.controls),
            self.text.patches([control.for_text(self.recipe) for control in decoded.controls]),
            decoded.loss_mask,
            to_thumbnail(target, small) if small else None,
            decoded.notes,
        )

    def _encode_images(self, rows: Sequence[PreparedRow]) -> list[_Latents | RowError]:
        if len(rows) == 1:
            (row,) = rows
            targets = [self._latent(row.row.target_hash, row.row, row.target, "the target's latent")]
        else:  # encoded together, a latent is not the one that the image gives alone, so it is no other row's
            targets = [
                _attempt(to_storage, latent, "the target's latent")
                for latent in self.vae.encode_together([row.target for row in rows])
            ]
        return [
            target if isinstance(target, RowError) else _attempt(self._encode_controls, row, target)
            for row, target in zip(rows, targets, strict=True)
        ]

    def _encode_controls(self, row: PreparedRow, target: Stored) -> _Latents:
        """A row's controls, each encoded alone: which rows have the same one changes nothing."""
        controls = []
        for digest, pixels in zip(row.row.control_hashes, row.controls, strict=True):
            latent = self._latent(digest, row.row, pixels, "a control's latent")
            if isinstance(latent, RowError):
                raise latent
            controls.append(latent)
        return _Latents(row, target, tuple(controls))

    def _latent(self, digest: str, row: Row, pixels: torch.Tensor, what: str) -> Stored | RowError:
        """Of an image by itself, which is a function of its content and of what is done to it."""
        return _attempt(self._latents.get, (digest, row.augment), lambda: to_storage(self.vae.encode(pixels), what))

    def _encode_prompts(self, rows: Sequence[_Latents]) -> list[Sample | RowError]:
        prepared = [row.prepared for row in rows]
        seen = [
            self._seen.get((one.row.control_hashes, one.row.augment), partial(self.text.see, one.patches))
            for one in prepared
        ]
        embeds = self.text.encode(seen, [one.prompt for one in prepared])
        return [_attempt(self._sample, row, embed) for row, embed in zip(rows, embeds, strict=True)]

    def _sample(self, row: _Latents, embeds: PromptEmbeds) -> Sample:
        prefix, prepared = embeds.shared_prefix, row.prepared
        prompt = to_storage(embeds.prompt, "the prompt's embedding")
        empty_tail = to_storage(embeds.empty[prefix:], "the null prompt's embedding")
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
            clipped=sum(part.clipped for part in (row.target, *row.controls, prompt, empty_tail)),
            thumbnail=prepared.thumbnail,
            notes=prepared.notes,
        )

    def _in_parts(self, work: Callable[[Sequence[Any]], list[Any]], rows: Sequence[Any]) -> list[Any]:
        """`work` of the rows that have not failed yet, `batch_size` at a time."""
        results: list[Any] = []
        while len(results) < len(rows):
            part = rows[len(results) : len(results) + self.batch_size]
            good = [row for row in part if not isinstance(row, RowError)]
            try:
                done = iter(work(good) if good else ())
            except torch.OutOfMemoryError as error:
                if len(part) == 1:
                    raise QieError(
                        "an encoder's device is out of memory",
                        found=" ".join(str(error).split())[:200],
                        hint="give each encoder its own device (cache.*_encoder_device), or lower data.area_px",
                    ) from error
                self.batch_size = len(part) // 2
                warnings.warn(f"out of memory: going on with {self.batch_size} rows at a time", stacklevel=2)
                continue
            results += [row if isinstance(row, RowError) else next(done) for row in part]
        return results


def _each(work: Callable[[Row], PreparedRow], rows: Sequence[Row]) -> list[PreparedRow | RowError]:
    return [_attempt(work, row) for row in rows]


def _attempt(work: Callable[..., T], *arguments: Any) -> T | RowError:
    try:
        return work(*arguments)
    except RowError as error:
        return error
