"""Which part of an image a model sees, and at what size. Pure: sizes in, sizes out, all in pixels, (width, height).

The families' own rule is one area, with the image's own proportions. A list of areas takes the largest that does not
enlarge the image. Buckets are fixed sizes: the one of the nearest proportions, after cropping the image to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Size = tuple[int, int]

MAX_RATIO = 200
"""Longer images than this are refused, as Qwen2.5-VL's processor refuses them."""


@dataclass(frozen=True)
class View:
    """What of an image is seen, (left, top, right, bottom), and the size that the VAE sees it at."""

    box: tuple[int, int, int, int]
    size: Size


def choose_view(image: Size, areas_px: Sequence[int], buckets_px: Sequence[Size], multiple_px: int) -> View:
    """The view of an image under a recipe's sizes; buckets, if there are any, go before areas."""
    if buckets_px:
        bucket = nearest_bucket(image, buckets_px)
        return View(centre_crop(image, bucket), bucket)
    return View((0, 0, *image), fit_size(*image, choose_area(image, areas_px), multiple_px))


def choose_area(image: Size, areas_px: Sequence[int]) -> int:
    """The largest of the areas that is no larger than the image, or the smallest of them."""
    within = [area for area in areas_px if area <= image[0] * image[1]]
    return max(within) if within else min(areas_px)


def nearest_bucket(image: Size, buckets_px: Sequence[Size]) -> Size:
    """The bucket of the nearest proportions, in octaves; of equally near ones, that of the nearest area."""

    def distance(bucket: Size) -> tuple[float, float, Size]:
        shape = abs(math.log2(bucket[0] / bucket[1] * image[1] / image[0]))
        return round(shape, 9), abs(math.log2(bucket[0] * bucket[1] / (image[0] * image[1]))), bucket

    return min(buckets_px, key=distance)


def centre_crop(image: Size, proportions: Size) -> tuple[int, int, int, int]:
    """The largest box in the middle of an image that has the given proportions, to the pixel."""
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
