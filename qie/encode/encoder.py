"""Row -> Sample: the one way from images and a prompt to what is stored and trained on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from PIL import Image

from qie.encode.images import MAX_IMAGE_PX
from qie.encode.options import EncoderOptions, make_recipe
from qie.encode.rows import DecodedRow, decode_row, see
from qie.encode.text import MAX_POSITIONS, PromptEmbeds, PromptEncoder, Seen, check_prompt
from qie.encode.vae import VaeEncoder
from qie.errors import RowError
from qie.pretrained import Checkpoint
from qie.recipe import NULL_PROMPT, Recipe
from qie.types import Row, Sample, Shape

FP16_MAX = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class _Controls:
    """What encoding a row's controls gave, kept for the next row, which often has the same ones."""

    contents: tuple[bytes, ...]
    latents: tuple[torch.Tensor, ...]
    seen: Seen


class Encoder:
    """Both frozen encoders under one recipe. Their weights are loaded when the first row is encoded.

    By default rows are encoded one at a time: the last bits of a result depend on what else is in a batch, and a last
    bit can decide an FP16 rounding, so a batch would make a sample depend on its neighbours.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        recipe: Recipe,
        vae_device: torch.device,
        text_device: torch.device,
        max_image_px: int = MAX_IMAGE_PX,
    ) -> None:
        self.checkpoint, self.recipe = checkpoint, recipe
        self.batch_size = recipe.batch_size
        self._vae_device, self._text_device, self._max_image_px = vae_device, text_device, max_image_px
        self._last_controls: _Controls | None = None

    @classmethod
    def open(
        cls,
        checkpoint: Checkpoint,
        *,
        vae_device: torch.device,
        text_device: torch.device,
        options: EncoderOptions | None = None,
    ) -> Encoder:
        """The encoder of a checkpoint with all of `ENCODERS`. Its recipe is made now, from the content of the files.

        Raises:
            ModelError: the tokenizer or processor cannot be loaded, or is another model's.
        """
        options = options or EncoderOptions()
        recipe = make_recipe(checkpoint, options, vae_device, text_device)
        encoder = cls(checkpoint, recipe, vae_device, text_device, options.max_image_px)
        _ = encoder.text  # now, not in the threads that inspect rows; its weights wait
        return encoder

    @cached_property
    def vae(self) -> VaeEncoder:
        dtype = getattr(torch, self.recipe.vae_dtype)
        return VaeEncoder(self.checkpoint.component("vae"), self._vae_device, dtype, compiled=self.recipe.compiled)

    @cached_property
    def text(self) -> PromptEncoder:
        dtype = getattr(torch, self.recipe.text_dtype)
        return PromptEncoder(self.checkpoint, self._text_device, dtype, continued=self.recipe.continued)

    def inspect(self, row: Row) -> tuple[str, Shape]:
        """Key and shape of a row without encoding it. Raises RowError as `encode` would, but for NaN and infinity."""
        return self.recipe.key(row), self._decode(row).shape

    def encode(self, row: Row) -> Sample:
        """The row's sample, in host memory.

        Raises:
            RowError: an image cannot be decoded, the prompt or the number of controls is refused, or an encoder gives
                NaN or infinity.
        """
        (sample,) = self.encode_together([row])
        if isinstance(sample, RowError):
            raise sample
        return sample

    def encode_together(self, rows: Sequence[Row]) -> list[Sample | RowError]:
        """Each row's sample, or why it has none; `batch_size` rows at a time, which decides the last bits.

        On a device that is out of memory the batch is halved, for all later ones, too.
        """
        results: list[Sample | RowError] = []
        while len(results) < len(rows):
            part = rows[len(results) : len(results) + self.batch_size]
            try:
                results += self._encode(part)
            except torch.OutOfMemoryError:
                if len(part) == 1:
                    raise
                self.batch_size = len(part) // 2
                warnings.warn(f"out of memory: going on with {self.batch_size} rows at a time", stacklevel=2)
        return results

    def embed(self, images: Sequence[Image.Image], prompt: str) -> torch.Tensor:
        """Embedding of a prompt over images of any size, [L, D] on the text encoder's device, as painting needs it.

        Raises:
            RowError: the prompt contains a special token. The null prompt is allowed.
        """
        if prompt.strip():
            check_prompt(prompt)
        seen = self.text.look([see(image, self.recipe).for_text(self.recipe) for image in images])
        return self.text.encode([seen], [prompt or NULL_PROMPT])[0].prompt

    def _decode(self, row: Row) -> DecodedRow:
        decoded = decode_row(row, self.recipe, self._max_image_px)
        sizes = [control.text_size(self.recipe) for control in decoded.controls]
        tokens = self.text.count_tokens(sizes, decoded.prompt)
        # The transformer's text positions begin behind the largest half side of an image, in patches of 2×2.
        room = MAX_POSITIONS - max(max(size) for size in (decoded.shape.target, *decoded.shape.controls)) // 4
        if tokens > room:
            raise RowError("the prompt is too long", expected=f"at most {room} tokens, images included", found=tokens)
        return decoded

    def _encode(self, rows: Sequence[Row]) -> list[Sample | RowError]:
        decoded: list[DecodedRow | RowError] = []
        for row in rows:
            try:
                decoded.append(self._decode(row))
            except RowError as error:
                decoded.append(error)
        good = [one for one in decoded if isinstance(one, DecodedRow)]
        samples = iter(self._encode_decoded(good) if good else ())
        return [next(samples) if isinstance(one, DecodedRow) else one for one in decoded]

    def _encode_decoded(self, rows: Sequence[DecodedRow]) -> list[Sample | RowError]:
        latents = self.vae.encode_together([row.target.for_vae for row in rows])
        controls = [self._controls(row) for row in rows]
        embeds = self.text.encode([control.seen for control in controls], [row.prompt for row in rows])
        results: list[Sample | RowError] = []
        for row, latent, control, embed in zip(rows, latents, controls, embeds, strict=True):
            try:
                results.append(self._sample(row, latent, control.latents, embed))
            except RowError as error:
                results.append(error)
        return results

    def _controls(self, row: DecodedRow) -> _Controls:
        """Latents and sight of a row's controls, each computed alone: whose they were before changes nothing."""
        last = self._last_controls
        if last is None or last.contents != row.row.controls:
            latents = tuple(self.vae.encode(control.for_vae) for control in row.controls)
            seen = self.text.look([control.for_text(self.recipe) for control in row.controls])
            last = self._last_controls = _Controls(row.row.controls, latents, seen)
        return last

    def _sample(
        self, row: DecodedRow, latent: torch.Tensor, controls: Sequence[torch.Tensor], embeds: PromptEmbeds
    ) -> Sample:
        prefix = embeds.shared_prefix
        pixel_latent, pixel_clipped = to_storage(latent, "the target's latent")
        stored = [to_storage(control, "a control's latent") for control in controls]
        prompt, prompt_clipped = to_storage(embeds.prompt, "the prompt's embedding")
        empty_tail, empty_clipped = to_storage(embeds.empty[prefix:], "the null prompt's embedding")
        return Sample(
            key=self.recipe.key(row.row),
            prompt=row.prompt,
            pixel_latent=pixel_latent,
            control_latent=tuple(control for control, _ in stored),
            prompt_embed=prompt,
            prompt_embeds_mask=torch.ones(len(prompt), dtype=torch.bool),
            empty_prompt_embed=torch.cat([prompt[:prefix], empty_tail]),
            empty_prompt_embeds_mask=torch.ones(prefix + len(empty_tail), dtype=torch.bool),
            shared_prefix=prefix,
            loss_mask=row.loss_mask,
            clipped=pixel_clipped + sum(count for _, count in stored) + prompt_clipped + empty_clipped,
            notes=row.notes,
        )


def to_storage(values: torch.Tensor, what: str) -> tuple[torch.Tensor, int]:
    """`values` in FP16 on the host, and how many were clipped to its range.

    The only way to FP16 in qie: cached and live training go through it alike. From bfloat16 it is exact for normal
    values within range.

    Raises:
        RowError: there are NaNs or infinities among them; `what` is named.
    """
    if not bool(torch.isfinite(values).all()):
        raise RowError(f"{what} contains NaN or infinity", hint="try cache.compute_dtype: float32")
    # In float32: bfloat16 cannot represent the limit and would round it up, to infinity in FP16.
    values = values.float()
    clipped = int((values.abs() > FP16_MAX).sum())
    return values.clamp(-FP16_MAX, FP16_MAX).to("cpu", torch.float16), clipped
