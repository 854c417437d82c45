"""From the bytes of an image file to the pixels that a model sees."""

from __future__ import annotations

import hashlib
import io
import math
import warnings
from functools import cache

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from qie.errors import RowError

MAX_IMAGE_PX = 178_956_970
"""Larger images are refused: they are decompression bombs more often than photographs (Pillow's own limit)."""

LATENT_SCALE = 8
"""Image pixels per latent pixel, in each direction."""


def decode_image(content: bytes, what: str, background: str) -> Image.Image:
    """The RGB image in a file: upright by its EXIF orientation, transparency laid on `background`, first frame only.

    Args:
        content: the file.
        what: which image of the row this is, for messages.
        background: colour behind transparent pixels.

    Raises:
        RowError: the file is no image, is cut short or damaged, or is larger than `MAX_IMAGE_PX`.
    """
    try:
        with warnings.catch_warnings():
            # Pillow warns beyond the limit and raises at twice of it; both are the same refusal here.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            # Metadata that Pillow finds odd does not change pixels.
            warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\..*")
            with Image.open(io.BytesIO(content)) as image:
                image.load()
                return _rgb(ImageOps.exif_transpose(image), background)
    except UnidentifiedImageError as error:
        raise RowError(f"{what} is no image", found=f"{len(content)} bytes starting with {content[:8]!r}") from error
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise RowError(f"{what} is too large", expected=f"at most {MAX_IMAGE_PX} pixels", found=error) from error
    except (OSError, ValueError, SyntaxError, EOFError, IndexError) as error:
        raise RowError(f"{what} is damaged: {error}") from error


def fit_size(width_px: int, height_px: int, area_px: int, multiple_px: int) -> tuple[int, int]:
    """Width and height of about `area_px` in the proportions given, each a multiple of `multiple_px`.

    W = sqrt(A·r), H = W/r with r = width/height, both rounded: `calculate_dimensions` of diffusers' Qwen-Image-Edit
    pipelines, kept to at least one multiple.
    """
    ratio = width_px / height_px
    width = math.sqrt(area_px * ratio)
    height = width / ratio
    return tuple(max(round(side / multiple_px), 1) * multiple_px for side in (width, height))  # type: ignore[return-value]


def fit_image(image: Image.Image, area_px: int, multiple_px: int) -> Image.Image:
    """The image resized by `fit_size` with Lanczos, as `VaeImageProcessor.resize` does it."""
    return image.resize(fit_size(*image.size, area_px, multiple_px), Image.Resampling.LANCZOS)


@cache
def resampling_digest() -> str:
    """Hash of a test picture after each kind of resizing that encoding uses.

    Pillow 13 resizes some sizes otherwise than Pillow 12, by up to five levels of 255. That is another input to the
    encoders, and so part of the recipe.
    """
    height, width = np.mgrid[0:96, 0:128]
    channels = [(height * width) % 251, (height * 7 + width * 3) % 256, (height ^ width) % 256]
    picture = Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))
    digest = hashlib.sha256()
    for method in (Image.Resampling.LANCZOS, Image.Resampling.BICUBIC):
        for size in ((64, 32), (168, 84), (160, 128), (352, 288)):
            digest.update(picture.resize(size, method).tobytes())
    return digest.hexdigest()


def to_pixels(image: Image.Image) -> torch.Tensor:
    """[1, 3, H, W] float32 in [-1, 1], by the operations of `VaeImageProcessor.preprocess` in their order."""
    unit = np.array(image).astype(np.float32) / 255.0
    return 2.0 * torch.from_numpy(unit.transpose(2, 0, 1)[None]) - 1.0


def to_loss_mask(mask: Image.Image, latent_height: int, latent_width: int) -> torch.Tensor:
    """[H, W] uint8: how much of each latent pixel the mask's bright parts cover, 255 being all of it."""
    covered = mask.convert("L").resize((latent_width, latent_height), Image.Resampling.BOX)
    return torch.from_numpy(np.array(covered))


def _rgb(image: Image.Image, background: str) -> Image.Image:
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        # 16-bit grey; Pillow's own conversion clips at 255 instead of scaling.
        values = np.asarray(image, dtype=np.float64) / (257.0 if np.asarray(image).max() > 255 else 1.0)
        return Image.fromarray(values.round().clip(0, 255).astype(np.uint8)).convert("RGB")
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        image = image.convert("RGBA")
        behind = Image.new("RGBA", image.size, background)
        return Image.alpha_composite(behind, image).convert("RGB")
    return image.convert("RGB")
