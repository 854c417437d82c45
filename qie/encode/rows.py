"""From a row's bytes to what the models are to see of it: everything before the first weight is used."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from PIL import Image

from qie.encode.images import (
    LATENT_SCALE,
    augmented,
    decode_image,
    has_more_frames,
    require_proportions,
    show,
    to_loss_mask,
)
from qie.encode.sizes import Size, View, choose_view, fit_size
from qie.encode.text import Patches, check_prompt
from qie.errors import RowError
from qie.recipe import FAMILIES, Recipe, normal_prompt
from qie.types import Row, Shape


@dataclass(frozen=True)
class Picture:
    """A decoded image, and what is seen of it."""

    image: Image.Image
    view: View

    @property
    def for_vae(self) -> Image.Image:
        return show(self.image, self.view)

    def text_size(self, recipe: Recipe) -> Size:
        """Size at which Qwen2.5-VL sees it: the VAE's, where the family has one image for both."""
        if recipe.text_area_px is None:
            return self.view.size
        left, top, right, bottom = self.view.box
        return fit_size(right - left, bottom - top, recipe.text_area_px, recipe.multiple_px)

    def for_text(self, recipe: Recipe) -> Image.Image:
        return show(self.image, View(self.view.box, self.text_size(recipe)))

    @property
    def latent_size(self) -> Size:
        """(H, W)."""
        return self.view.size[1] // LATENT_SCALE, self.view.size[0] // LATENT_SCALE


@dataclass(frozen=True)
class DecodedRow:
    """A row, decoded and checked. `notes` say what was done to it that its owner may want to know."""

    row: Row
    prompt: str
    target: Picture
    controls: tuple[Picture, ...]
    loss_mask: torch.Tensor | None
    notes: tuple[str, ...]

    @property
    def shape(self) -> Shape:
        return Shape(self.target.latent_size, tuple(control.latent_size for control in self.controls))


@dataclass(frozen=True, eq=False)
class PreparedRow:
    """A row, decoded, checked and brought to the sizes that the models see: all that needs no weights."""

    row: Row
    prompt: str
    target: torch.Tensor
    controls: tuple[torch.Tensor, ...]
    patches: Patches
    loss_mask: torch.Tensor | None
    thumbnail: torch.Tensor | None
    notes: tuple[str, ...]


def decode_row(row: Row, recipe: Recipe, max_image_px: int) -> DecodedRow:
    """Decode and check a row.

    Raises:
        RowError: an image cannot be decoded, the prompt is refused, or the family takes another number of controls.
    """
    limit = FAMILIES[recipe.family].max_controls
    if not row.controls or (limit is not None and len(row.controls) > limit):
        raise RowError(
            f"{len(row.controls)} control images for a model of family {recipe.family}",
            expected="1 or more" if limit is None else f"exactly {limit}",
            hint="an edit_plus model takes several" if row.controls else "every row needs an image to edit",
        )
    check_prompt(row.prompt)
    images = {"the target": row.target} | {f"control {n}": content for n, content in enumerate(row.controls, start=1)}
    decoded = {what: decode_image(content, what, recipe.background, max_image_px) for what, content in images.items()}
    target, *controls = (see(augmented(image, row.augment), recipe) for image in decoded.values())
    loss_mask = None
    if row.mask is not None:
        mask = decode_image(row.mask, "the mask", recipe.background, max_image_px)
        if row.augment is not None:
            # At the target's size, so that the same pixels are cut off it.
            require_proportions(mask, decoded["the target"].size)
            mask = augmented(mask.resize(decoded["the target"].size, Image.Resampling.BOX), row.augment)
        loss_mask = to_loss_mask(mask, target.image.size, target.view)
    notes = tuple(
        f"{what} has several frames: the first is used" for what, content in images.items() if has_more_frames(content)
    )
    return DecodedRow(row, normal_prompt(row.prompt), target, tuple(controls), loss_mask, notes)


def see(image: Image.Image, recipe: Recipe) -> Picture:
    """An image under a recipe's sizes."""
    return Picture(image, choose_view(image.size, recipe.areas_px, recipe.buckets_px, recipe.multiple_px))
