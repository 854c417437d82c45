"""From the bytes of an image file to the pixels for a model: decoding, cropping, resizing.

Sizes are in pixels, (width, height). The families' own rule is one area, in the image's own proportions. Of a list of
areas, an image takes the largest that does not enlarge it. Buckets are fixed sizes: an image is cropped to the one of
the nearest proportions.
"""

from __future__ import annotations

import hashlib
import io
import math
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

from qie.errors import RowError
from qie.image_formats import IMAGE_FORMATS
from qie.recipe import choose_area
from qie.types import Augment

Size = tuple[int, int]

MAX_RATIO = 200
"""Limit of an image's sides, long to short, as in Qwen2.5-VL's processor."""

MAX_IMAGE_PX = 178_956_970
"""Pillow's own limit. Larger files are more often decompression bombs than photographs."""

_PHOTOMETRIC = 262  # the tag of TIFF
_SRGB_TOLERANCE = 16

# Odd metadata is no fault, and `_require_size` checks the size. Set once: decoding runs in threads, where warnings
# cannot be caught.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


@dataclass(frozen=True)
class View:
    """A box of an image, (left, top, right, bottom), and its size for the VAE."""

    box: tuple[int, int, int, int]
    size: Size


@dataclass(frozen=True, eq=False)
class Layers:
    """The colours of a decoded image, and how opaque each of its pixels is; None where all are."""

    rgb: Image.Image
    opacity: Image.Image | None

    def on(self, background: str) -> Image.Image:
        """RGB, with a colour behind transparent pixels."""
        if self.opacity is None:
            return self.rgb
        return Image.composite(self.rgb, Image.new("RGB", self.rgb.size, background), self.opacity)

    @property
    def rgba(self) -> Image.Image:
        whole = self.rgb.copy()
        whole.putalpha(255 if self.opacity is None else self.opacity)
        return whole


def decode_image(content: bytes, what: str, background: str, max_px: int = MAX_IMAGE_PX) -> Image.Image:
    """The RGB image in a file, on `background`; see `decode_layers`."""
    return decode_layers(content, what, max_px).on(background)


def decode_layers(content: bytes, what: str, max_px: int = MAX_IMAGE_PX) -> Layers:
    """The image in a file, as a viewer shows it: upright by its EXIF orientation, converted to sRGB by its embedded
    profile. An animation gives its first frame.

    Args:
        content: the file.
        what: which image of the row this is, for messages.
        max_px: larger images are refused before they are decoded.

    Raises:
        RowError: the file is not an image, is cut or damaged, larger than `max_px`, longer than 200 times its width,
            or of a depth whose range is unknown.
    """
    try:
        with _open(content) as image:
            _require_size(image.size, what, max_px)
            image.load()
            white_is_zero = getattr(image, "tag_v2", {}).get(_PHOTOMETRIC) == 0
            return _layers(_levels(_upright(image), white_is_zero), what)
    except RowError:
        raise
    except UnidentifiedImageError as error:
        raise RowError(
            f"{what} is not an image", found=f"{len(content)} bytes starting with {content[:8]!r}"
        ) from error
    except Image.DecompressionBombError as error:
        raise RowError(f"{what} is too large", expected=f"at most {max_px} pixels", found=error) from error
    except Exception as error:
        # Pillow's decoders raise whatever they meet: OSError, SyntaxError, RuntimeError, struct.error …
        raise RowError(f"{what} is damaged: {error}") from error


def has_more_frames(content: bytes) -> bool:
    """Whether an image file has further frames or pages, which decoding drops."""
    with _open(content) as image:
        try:
            return bool(getattr(image, "is_animated", False))
        except Exception:
            return True  # the second frame is damaged, which is no fault of the first


def _open(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content), formats=tuple(IMAGE_FORMATS))


def _require_size(size: Size, what: str, max_px: int) -> None:
    width, height = size
    if width * height > max_px:
        raise RowError(
            f"{what} is too large",
            expected=f"at most {max_px} pixels",
            found=f"{width}×{height}",
        )
    if max(size) > MAX_RATIO * min(size):
        raise RowError(f"{what} is too long", expected=f"sides of at most 1:{MAX_RATIO}", found=f"{width}×{height}")


def _levels(image: Image.Image, white_is_zero: bool) -> Image.Image:
    """16-bit grey as 8-bit grey, with its transparency and metadata; other images unchanged."""
    if not image.mode.startswith("I;16"):
        return image
    # Pillow's own conversion clips at 255 instead of scaling.
    deep = np.asarray(image)
    levels = (deep.astype(np.float64) / 257).round().astype(np.uint8)
    if white_is_zero:  # Pillow inverts only 8 bits
        levels = 255 - levels
    grey = Image.fromarray(levels)
    key = image.info.get("transparency")
    if key is not None:
        grey.putalpha(Image.fromarray(np.where(deep == key, 0, 255).astype(np.uint8)))
    grey.info = {name: value for name, value in image.info.items() if name != "transparency"}
    return grey


def _upright(image: Image.Image) -> Image.Image:
    """Rotated by its EXIF orientation; unchanged when its EXIF is unreadable."""
    try:
        return ImageOps.exif_transpose(image)
    except (SyntaxError, ValueError, TypeError, KeyError, struct.error):
        return image


def _layers(image: Image.Image, what: str) -> Layers:
    if image.mode in ("I", "F"):
        raise RowError(
            f"{what} is greyscale, and the range of its values is unknown", hint="save it as PNG with 8 or 16 bits"
        )
    alpha = None
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        grey = image.mode in ("L", "LA", "La")  # kept grey: its profile is one for grey
        image = image.convert("LA" if grey else "RGBA")
        alpha = image.getchannel("A")
        image = image.convert("L" if grey else "RGB")
        if alpha.getextrema() == (255, 255):
            alpha = None
    return Layers(_srgb(image), alpha)


def _srgb(image: Image.Image) -> Image.Image:
    """RGB by the image's colour profile; unchanged without a usable one, or with sRGB."""
    content = image.info.get("icc_profile")
    if image.mode in ("P", "RGBA", "1"):
        image = image.convert("RGB")
    if not content:
        return image.convert("RGB")
    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(content))
        # Nearly all profiles in use; converting would only move values by rounding.
        if "sRGB" in ImageCms.getProfileDescription(profile) and _changes_little(profile):
            return image.convert("RGB")
        converted = ImageCms.profileToProfile(image, profile, ImageCms.createProfile("sRGB"), outputMode="RGB")
    except (ImageCms.PyCMSError, OSError):
        return image.convert("RGB")
    assert converted is not None
    return converted


def _changes_little(profile: ImageCms.ImageCmsProfile) -> bool:
    """Whether grey stays grey: a linear profile, too, has sRGB in its name, and means far brighter colours."""
    ramp = Image.merge("RGB", [Image.linear_gradient("L")] * 3)
    converted = ImageCms.profileToProfile(ramp, profile, ImageCms.createProfile("sRGB"), outputMode="RGB")
    return bool(np.abs(np.asarray(converted, dtype=int) - np.asarray(ramp)).max() < _SRGB_TOLERANCE)


def augmented(image: Image.Image, augment: Augment | None) -> Image.Image:
    """A decoded image, cropped and flipped as `augment` says; the image itself without."""
    if augment is None:
        return image
    left, top, right, bottom = augment.box
    width, height = image.size
    x, y = min(round(left * width), width - 1), min(round(top * height), height - 1)
    box = (x, y, max(round(right * width), x + 1), max(round(bottom * height), y + 1))
    image = image if box == (0, 0, width, height) else image.crop(box)
    return ImageOps.mirror(image) if augment.flip else image


def choose_view(image: Size, areas_px: Sequence[int], buckets_px: Sequence[Size], multiple_px: int) -> View:
    """The view of an image under a recipe's sizes; buckets take precedence over areas."""
    if buckets_px:
        bucket = nearest_bucket(image, buckets_px)
        return View(centre_crop(image, bucket), bucket)
    return View((0, 0, *image), fit_size(*image, choose_area(image, areas_px), multiple_px))


def nearest_bucket(image: Size, buckets_px: Sequence[Size]) -> Size:
    """The bucket of the nearest proportions, in octaves; among equals, the one of the nearest area."""

    def distance(bucket: Size) -> tuple[float, float, Size]:
        shape = abs(math.log2(bucket[0] / bucket[1] * image[1] / image[0]))
        return round(shape, 9), abs(math.log2(bucket[0] * bucket[1] / (image[0] * image[1]))), bucket

    return min(buckets_px, key=distance)


def centre_crop(image: Size, proportions: Size) -> tuple[int, int, int, int]:
    """The largest centred box of the given proportions in an image, to the pixel."""
    width = min(image[0], max(round(image[1] * proportions[0] / proportions[1]), 1))
    height = min(image[1], max(round(image[0] * proportions[1] / proportions[0]), 1))
    left, top = (image[0] - width) // 2, (image[1] - height) // 2
    return left, top, left + width, top + height


def fit_size(width_px: int, height_px: int, area_px: int, multiple_px: int) -> Size:
    """Width and height of about `area_px` in the proportions given, each a multiple of `multiple_px`.

    W = sqrt(A·r), H = W/r with r = width/height, both rounded: `calculate_dimensions` of diffusers' Qwen-Image-Edit
    pipelines, kept to at least one multiple.
    """
    ratio = width_px / height_px
    width = math.sqrt(area_px * ratio)
    height = width / ratio
    return max(round(width / multiple_px), 1) * multiple_px, max(round(height / multiple_px), 1) * multiple_px


def apply_view(image: Image.Image, view: View) -> Image.Image:
    """The image cropped to a view, and resized with Lanczos as `VaeImageProcessor.resize` does it."""
    cropped = image if view.box == (0, 0, *image.size) else image.crop(view.box)
    return cropped.resize(view.size, Image.Resampling.LANCZOS)


@cache
def resampling_digest() -> str:
    """Hash of a test picture after each kind of resizing that the encoders' inputs go through.

    Pillow 13 resizes some sizes differently from Pillow 12, by up to five levels of 255. The encoders get another
    input, so the hash is part of the recipe.
    """
    height, width = np.mgrid[0:96, 0:128]
    channels = [(height * width) % 251, (height * 7 + width * 3) % 256, (height ^ width) % 256]
    picture = Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))
    digest = hashlib.sha256()
    for method in (Image.Resampling.LANCZOS, Image.Resampling.BICUBIC):
        for size in ((64, 32), (168, 84), (160, 128), (352, 288)):
            digest.update(picture.resize(size, method).tobytes())
    return digest.hexdigest()


def on_background(image: Image.Image, background: str) -> Image.Image:
    """The image without transparency, as diffusers' QwenImage21Pipeline puts it on white for the text encoder."""
    if image.mode != "RGBA":
        return image
    whole = Image.new("RGB", image.size, background)
    whole.paste(image, mask=image.getchannel("A"))
    return whole


def to_pixels(image: Image.Image) -> torch.Tensor:
    """[1, channels, H, W] float32 in [-1, 1], channels last in memory, by the operations of
    `VaeImageProcessor.preprocess` in their order."""
    unit = np.array(image).astype(np.float32)
    unit /= 255.0  # in place: each new array of this size costs more than the arithmetic
    return torch.from_numpy(unit)[None].mul_(2.0).sub_(1.0).permute(0, 3, 1, 2)


def to_thumbnail(image: Image.Image, size: tuple[int, int]) -> torch.Tensor:
    """[h, w, 3] uint8: the image at a small size, given as (height, width)."""
    return torch.from_numpy(np.array(image.resize((size[1], size[0]), Image.Resampling.LANCZOS)))


def to_small(image: Image.Image, most_px: int) -> Image.Image:
    """The image, its longest side at most `most_px`; the other is rounded to the nearest pixel, halves up."""
    longest = max(image.size)
    px = min(most_px, longest)
    width, height = (max((2 * side * px + longest) // (2 * longest), 1) for side in image.size)
    # The gap lets it first take every few pixels together: a fifth of the time, and no eye sees it.
    return image.resize((width, height), Image.Resampling.LANCZOS, reducing_gap=2.0)


def require_proportions(other: Image.Image, image: Size, what: str = "the mask") -> None:
    """Raise RowError when the proportions of a mask, or of `what`, and its image differ by more than a pixel."""
    if abs(other.width * image[1] - other.height * image[0]) > max(*other.size, *image):
        raise RowError(f"{what} and the target have different proportions", expected=image, found=other.size)


def to_loss_mask(mask: Image.Image, image: Size, view: View, scale: int = 8) -> torch.Tensor:
    """[H, W] uint8: the mask's mean brightness over each latent pixel, of `scale` pixels, of a view of its image.

    Raises:
        RowError: the proportions of mask and image differ by more than a pixel.
    """
    require_proportions(mask, image)
    scale_x, scale_y = mask.width / image[0], mask.height / image[1]
    left, top, right, bottom = view.box
    box = (left * scale_x, top * scale_y, right * scale_x, bottom * scale_y)
    width, height = view.size[0] // scale, view.size[1] // scale
    return torch.from_numpy(np.array(mask.convert("L").resize((width, height), Image.Resampling.BOX, box=box)))
