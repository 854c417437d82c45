"""What is to be painted, embedded: after this, painting needs no encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image

from qie.encode.encoder import Encoder
from qie.encode.rows import see
from qie.encode.sizes import choose_area
from qie.encode.text import MAX_POSITIONS
from qie.errors import RowError, UsageError
from qie.recipe import FAMILIES


@dataclass(frozen=True, eq=False)
class Scene:
    """Images and prompts for one painting.

    Attributes:
        images: upright RGB controls.
        area_px: area of the painted image.
        prompt, negative: embeddings, [L, D], in host memory; without `negative` there is no guidance.
    """

    images: tuple[Image.Image, ...]
    area_px: int
    prompt: torch.Tensor
    negative: torch.Tensor | None


def embed_scene(encoder: Encoder, images: Sequence[Image.Image], prompt: str, negative_prompt: str | None) -> Scene:
    """Images and prompts, embedded; `negative_prompt` None does without guidance.

    Raises:
        UsageError: the family does not take so many images.
        RowError: a prompt contains a special token, or is too long.
    """
    recipe = encoder.recipe
    check_controls(recipe.family, len(images))
    pictures = [see(image, recipe) for image in images]
    # The pipelines take the proportions of the first (edit) or last control.
    shaping = pictures[0] if FAMILIES[recipe.family].max_controls == 1 else pictures[-1]
    width, height = shaping.view.size
    area_px = choose_area(shaping.image.size, recipe.areas_px) if recipe.areas_px else width * height
    # The transformer's text positions begin behind the largest half side of an image, in patches of 2×2.
    room = MAX_POSITIONS - max(max(picture.latent_size) for picture in pictures) // 4
    embeds = [_embed(encoder, images, text, room) for text in (prompt, negative_prompt) if text is not None]
    return Scene(tuple(images), area_px, embeds[0], embeds[1] if len(embeds) > 1 else None)


def check_controls(family: str, count: int, where: str | None = None) -> None:
    """Raise UsageError when the family does not take `count` images."""
    limit = FAMILIES[family].max_controls
    if limit is not None and count > limit:
        raise UsageError(
            "more images than the model takes",
            where=where,
            expected=f"{limit} for family {family}",
            found=count,
            hint="an edit_plus model takes several",
        )


def _embed(encoder: Encoder, images: Sequence[Image.Image], prompt: str, room: int) -> torch.Tensor:
    embed = encoder.embed(images, prompt).cpu()
    if len(embed) > room:
        raise RowError("the prompt is too long", expected=f"at most {room} tokens, images included", found=len(embed))
    return embed
