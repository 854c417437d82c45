"""Row -> Sample: the one way from images and a prompt to what is stored and trained on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from PIL import Image

from qie.devices import resolve_dtype
from qie.encode.images import LATENT_SCALE, decode_image, fit_image, fit_size, resampling_digest, to_loss_mask
from qie.encode.text import PromptEncoder, check_prompt
from qie.encode.vae import VaeEncoder
from qie.errors import RowError
from qie.pretrained import Checkpoint, content_hash, processor_hash
from qie.recipe import FAMILIES, NULL_PROMPT, Recipe, normal_prompt, template_digest
from qie.types import Row, Sample, Shape

FP16_MAX = torch.finfo(torch.float16).max


class Encoder:
    """Both frozen encoders under one recipe. Their weights are loaded when the first row is encoded.

    Rows are encoded one at a time: the last bits of a result depend on what else is in a batch, and a last bit can
    decide an FP16 rounding, so a batch would make a sample depend on its neighbours.
    """

    def __init__(
        self, checkpoint: Checkpoint, recipe: Recipe, vae_device: torch.device, text_device: torch.device
    ) -> None:
        self.checkpoint, self.recipe = checkpoint, recipe
        self._vae_device, self._text_device = vae_device, text_device

    @classmethod
    def open(
        cls,
        checkpoint: Checkpoint,
        *,
        vae_device: torch.device,
        text_device: torch.device,
        compute_dtype: str = "auto",
        area_px: int | None = None,
        text_area_px: int | None = None,
    ) -> Encoder:
        """The encoder of a checkpoint. Its recipe is made now, from the content of the files.

        Args:
            checkpoint: with all of `ENCODERS`.
            vae_device, text_device: where the encoders compute; they may be the same.
            compute_dtype: name of a dtype, or auto: bfloat16 on a GPU, float32 on the CPU.
            area_px, text_area_px: image areas for the VAE and for Qwen2.5-VL; None is the family's own.
        """
        family = checkpoint.family
        recipe = Recipe(
            family=family.name,
            vae=content_hash(checkpoint.component("vae")),
            text_encoder=content_hash(checkpoint.component("text_encoder")),
            tokenizer=content_hash(checkpoint.component("tokenizer")),
            processor=processor_hash(checkpoint),
            area_px=area_px or family.area_px,
            text_area_px=text_area_px or family.text_area_px,
            vae_dtype=resolve_dtype(compute_dtype, vae_device),
            text_dtype=resolve_dtype(compute_dtype, text_device),
            template=template_digest(family),
            resampling=resampling_digest(),
            multiple_px=family.multiple_px,
        )
        return cls(checkpoint, recipe, vae_device, text_device)

    @cached_property
    def vae(self) -> VaeEncoder:
        return VaeEncoder(self.checkpoint.component("vae"), self._vae_device, getattr(torch, self.recipe.vae_dtype))

    @cached_property
    def text(self) -> PromptEncoder:
        return PromptEncoder(self.checkpoint, self._text_device, getattr(torch, self.recipe.text_dtype))

    def inspect(self, row: Row) -> tuple[str, Shape]:
        """Key and shape of a row, from decoding its images alone. Raises RowError as `encode` would."""
        target, controls, _ = self._decode(row)
        return self.recipe.key(row), Shape(self._latent_size(target), tuple(map(self._latent_size, controls)))

    def encode(self, row: Row) -> Sample:
        """The row's sample, in host memory.

        Raises:
            RowError: an image cannot be decoded, the prompt or the number of controls is refused, or an encoder gives
                NaN or infinity.
        """
        target, controls, mask = self._decode(row)
        prompt = normal_prompt(row.prompt)
        pixel_latent, clipped = to_storage(self.vae.encode(self._for_vae(target)), "the target's latent")
        control_latent = []
        for control in controls:
            latent, more = to_storage(self.vae.encode(self._for_vae(control)), "a control's latent")
            control_latent.append(latent)
            clipped += more
        embeds = self.text.encode([self._for_text(control) for control in controls], prompt)
        prompt_embed, more = to_storage(embeds.prompt, "the prompt's embedding")
        empty_tail, tail_clipped = to_storage(embeds.empty[embeds.shared_prefix :], "the null prompt's embedding")
        return Sample(
            key=self.recipe.key(row),
            prompt=prompt,
            pixel_latent=pixel_latent,
            control_latent=tuple(control_latent),
            prompt_embed=prompt_embed,
            prompt_embeds_mask=torch.ones(len(prompt_embed), dtype=torch.bool),
            empty_prompt_embed=torch.cat([prompt_embed[: embeds.shared_prefix], empty_tail]),
            empty_prompt_embeds_mask=torch.ones(embeds.shared_prefix + len(empty_tail), dtype=torch.bool),
            shared_prefix=embeds.shared_prefix,
            loss_mask=None if mask is None else to_loss_mask(mask, *pixel_latent.shape[-2:]),
            clipped=clipped + more + tail_clipped,
        )

    def embed(self, images: Sequence[Image.Image], prompt: str) -> torch.Tensor:
        """Embedding of a prompt over images of any size, [L, D] on the text encoder's device, as painting needs it.

        Raises:
            RowError: the prompt contains a special token. The null prompt is allowed.
        """
        if prompt.strip():
            check_prompt(prompt)
        return self.text.encode([self._for_text(image) for image in images], prompt or NULL_PROMPT).prompt

    def _decode(self, row: Row) -> tuple[Image.Image, list[Image.Image], Image.Image | None]:
        limit = FAMILIES[self.recipe.family].max_controls
        if not row.controls or (limit is not None and len(row.controls) > limit):
            raise RowError(
                f"{len(row.controls)} control images for a model of family {self.recipe.family}",
                expected="1 or more" if limit is None else f"{limit}",
            )
        check_prompt(row.prompt)
        background = self.recipe.background
        target = decode_image(row.target, "the target", background)
        controls = [
            decode_image(content, f"control {number}", background)
            for number, content in enumerate(row.controls, start=1)
        ]
        return target, controls, decode_image(row.mask, "the mask", background) if row.mask is not None else None

    def _for_vae(self, image: Image.Image) -> Image.Image:
        return fit_image(image, self.recipe.area_px, self.recipe.multiple_px)

    def _for_text(self, image: Image.Image) -> Image.Image:
        """Qwen2.5-VL's view: the VAE's own image where the family has one image for both, else from the original."""
        if self.recipe.text_area_px is None:
            return self._for_vae(image)
        return fit_image(image, self.recipe.text_area_px, self.recipe.multiple_px)

    def _latent_size(self, image: Image.Image) -> tuple[int, int]:
        width, height = fit_size(*image.size, self.recipe.area_px, self.recipe.multiple_px)
        return height // LATENT_SCALE, width // LATENT_SCALE


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
