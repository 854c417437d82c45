"""The part of an image that a model gets, and its size. Pure: sizes in, sizes out, all in pixels, (width, height).

The families' own rule is one area, in the image's own proportions. Of a list of areas, an image takes the largest that
does not enlarge it. Buckets are fixed sizes: an image is cropped to the one of the nearest proportions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Size = tuple[int, int]

MAX_RATIO = 200
"""Limit of an image's sides, long to short, as in Qwen2.5-VL's processor."""


@dataclass(frozen=True)
class View:
    """A box of an image, (left, top, right, bottom), and its size for the VAE."""

    box: tuple[int, int, int, int]
    size: Size


def choose_view(image: Size, areas_px: Sequence[int], buckets_px: Sequence[Size], multiple_px: int) -> View:
    """The view of an image under a recipe's sizes; buckets take precedence over areas."""
    if buckets_px:
        bucket = nearest_bucket(image, buckets_px)
        return View(centre_crop(image, bucket), bucket)
    return View((0, 0, *image), fit_size(*image, choose_area(image, areas_px), multiple_px))


def choose_area(image: Size, areas_px: Sequence[int]) -> int:
    """The largest area that does not exceed the image's, or the smallest of all."""
    within = [area for area in areas_px if area <= image[0] * image[1]]
    return max(within) if within else min(areas_px)


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
