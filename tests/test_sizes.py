"""Which part of an image is seen, and at what size: the rules themselves, and that the encoder keeps to them."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from qie.encode import Encoder
from qie.encode.encoder import Picture, decode_row
from qie.encode.images import (
    MAX_RATIO,
    Size,
    View,
    apply_view,
    centre_crop,
    choose_view,
    fit_size,
    nearest_bucket,
)
from qie.recipe import Recipe, choose_area
from qie.types import Row

deterministic = settings(derandomize=True, deadline=None, database=None, max_examples=200)
sides = st.integers(1, 20_000)
images = st.tuples(sides, sides)
areas = st.lists(st.integers(1, 4_000_000), min_size=1, max_size=6)
buckets = st.lists(st.tuples(st.integers(1, 128), st.integers(1, 128)), min_size=1, max_size=8).map(
    lambda sizes: [(width * 32, height * 32) for width, height in sizes]
)
SDXL = [(1024, 1024), (1152, 896), (896, 1152), (1344, 768), (768, 1344), (1536, 640), (640, 1536)]


def octaves(one: Size, other: Size) -> float:
    """How many times the proportions of one must be doubled to be those of the other."""
    return abs(math.log2(one[0] / one[1]) - math.log2(other[0] / other[1]))


def area_octaves(one: Size, other: Size) -> float:
    return abs(math.log2(one[0] * one[1]) - math.log2(other[0] * other[1]))


# Areas


@deterministic
@given(images, areas)
@example((1, 1), [2])
@example((2, 1), [1, 2])
@example((100, 100), [10_000, 10_001])
def test_the_area_is_the_largest_that_does_not_enlarge_or_else_the_smallest(image: Size, areas_px: list[int]) -> None:
    found = choose_area(image, areas_px)
    assert found in areas_px
    assert choose_area(image, areas_px[::-1] * 2) == found, "neither order nor repetition counts"
    own = image[0] * image[1]
    if found > own:
        assert found == min(areas_px)
    else:
        assert not any(found < area <= own for area in areas_px)


# Buckets


@deterministic
@given(images, buckets)
@example((1, 20_000), SDXL)
@example((20_000, 1), SDXL)
@example((512, 512), [(1024, 512), (512, 1024)])  # equally near, and of one area
@example((512, 512), [(64, 64), (4096, 4096)])  # equally near in area, too
def test_no_bucket_has_nearer_proportions_and_no_equally_near_one_a_nearer_area(
    image: Size, buckets_px: list[Size]
) -> None:
    found = nearest_bucket(image, buckets_px)
    assert found in buckets_px
    assert nearest_bucket(image, buckets_px[::-1] * 2) == found, "neither order nor repetition counts"
    for other in buckets_px:
        assert octaves(found, image) <= octaves(other, image) + 1e-8
        if other[0] * found[1] == other[1] * found[0]:
            assert area_octaves(found, image) <= area_octaves(other, image) + 1e-8


@deterministic
@given(images, buckets)
def test_a_turned_image_fits_turned_buckets_as_well(image: Size, buckets_px: list[Size]) -> None:
    """Not always the turned bucket: of two that fit equally, one is taken by its width."""
    found, turned = nearest_bucket(image, buckets_px), nearest_bucket(turn(image), [turn(size) for size in buckets_px])
    assert octaves(turned, turn(image)) == pytest.approx(octaves(found, image), abs=1e-8)
    assert area_octaves(turned, image) == pytest.approx(area_octaves(found, image), abs=1e-8)


def turn(size: Size) -> Size:
    return size[1], size[0]


# Crops


@deterministic
@given(images, images)
@example((1, 20_000), (20_000, 1))
@example((20_000, 1), (1, 20_000))
@example((1, 1), (1, 20_000))
@example((3, 3), (2, 1))
def test_a_crop_is_the_largest_box_of_its_proportions_in_the_middle(image: Size, proportions: Size) -> None:
    left, top, right, bottom = centre_crop(image, proportions)
    width, height = right - left, bottom - top
    assert 0 <= left < right <= image[0] and 0 <= top < bottom <= image[1]
    # In the middle: what is left over is the same on both sides, to the pixel.
    assert (image[0] - right) - left in (0, 1) and (image[1] - bottom) - top in (0, 1)
    # The largest: one side is the image's.
    assert width == image[0] or height == image[1]
    # Of its proportions: the other is what follows from it, to half a pixel, and at least one.
    ideal_width, ideal_height = (
        image[1] * proportions[0] / proportions[1],
        image[0] * proportions[1] / proportions[0],
    )
    assert abs(width - min(max(ideal_width, 1), image[0])) <= 0.5
    assert abs(height - min(max(ideal_height, 1), image[1])) <= 0.5


# Views


@deterministic
@given(images, areas, buckets)
def test_buckets_go_before_areas(image: Size, areas_px: list[int], buckets_px: list[Size]) -> None:
    view = choose_view(image, areas_px, buckets_px, 32)
    assert view == choose_view(image, [], buckets_px, 64)
    assert view == View(centre_crop(image, view.size), view.size)
    assert view.size == nearest_bucket(image, buckets_px)


@deterministic
@given(images, areas, st.sampled_from([16, 32, 64, 112]))
@example((1, 20_000), [1], 32)
@example((20_000, 1), [4_000_000], 112)
def test_by_areas_the_whole_image_is_seen_at_multiples_of_its_fitted_size(
    image: Size, areas_px: list[int], multiple: int
) -> None:
    view = choose_view(image, areas_px, [], multiple)
    assert view.box == (0, 0, *image)
    assert view.size == fit_size(*image, choose_area(image, areas_px), multiple)
    assert all(type(side) is int and side >= multiple and side % multiple == 0 for side in view.size)


@pytest.mark.parametrize("area", [128 * 128, 1024 * 1024])
@pytest.mark.parametrize("image", [(MAX_RATIO, 1), (1, MAX_RATIO), (20_000, 100), (100, 20_000)])
def test_the_longest_images_that_are_taken_keep_about_their_area_and_never_vanish(image: Size, area: int) -> None:
    width, height = choose_view(image, [area], [], 32).size
    assert min(width, height) == (32 if area == 128 * 128 else 64)
    assert max(width, height) == pytest.approx(math.sqrt(area * MAX_RATIO), abs=16)


# In the encoder


def gradient(width: int, height: int) -> Image.Image:
    """Red grows to the right, green downwards: every crop looks different."""
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([x * 255 // max(width - 1, 1), y * 255 // max(height - 1, 1), (x + y) % 256], axis=-1)
    return Image.fromarray(pixels.astype(np.uint8))


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def row_of(target: Image.Image, *controls: Image.Image, mask: Image.Image | None = None) -> Row:
    return Row(0, "row", png(target), tuple(map(png, controls)), "make it night", mask and png(mask))


def bucketed(encoder: Encoder, *buckets_px: Size) -> Recipe:
    return replace(encoder.recipe, areas_px=(), buckets_px=buckets_px)


def halves(size: Size, white: Sequence[int]) -> Image.Image:
    """A black mask whose box `white` is white."""
    mask = Image.new("L", size)
    mask.paste(255, tuple(white))
    return mask


def test_with_buckets_every_latent_has_the_size_of_its_images_own_bucket(encoder_plus: Encoder) -> None:
    recipe = bucketed(encoder_plus, (128, 96), (96, 128), (160, 64))
    row = row_of(gradient(400, 300), gradient(30, 41), gradient(1000, 300))
    shape = decode_row(row, recipe, 10**6).shape
    assert shape.target == (12, 16)
    assert shape.controls == ((16, 12), (8, 20))


def test_the_shape_by_buckets_is_that_of_the_encoded_latents(encoder: Encoder) -> None:
    recipe = bucketed(encoder, (96, 64), (64, 64))
    other = Encoder(encoder.pretrained, recipe, torch.device("cpu"), torch.device("cpu"))
    row = row_of(gradient(90, 50), gradient(50, 55))
    sample = other.encode(row)
    assert sample.pixel_latent.shape[-2:] == (8, 12)
    assert [latent.shape[-2:] for latent in sample.control_latent] == [(8, 8)]
    assert other.inspect(row)[:3] == (sample.key, sample.shape, len(sample.prompt_embed))


def test_a_bucket_sees_what_an_image_cropped_by_hand_shows(encoder: Encoder) -> None:
    image = gradient(300, 100)
    picture, by_hand = (Picture.of(one, bucketed(encoder, (64, 64))) for one in (image, image.crop((100, 0, 200, 100))))
    assert picture.view == View((100, 0, 200, 100), (64, 64))
    assert by_hand.view == View((0, 0, 100, 100), (64, 64))
    assert picture.for_vae.tobytes() == by_hand.for_vae.tobytes()


def test_the_text_model_of_edit_sees_the_vaes_image_which_is_resized_once(encoder: Encoder) -> None:
    for recipe in (encoder.recipe, bucketed(encoder, (96, 64), (64, 96))):
        picture = Picture.of(gradient(300, 100), recipe)
        assert picture.for_text(recipe).size == picture.view.size
        assert picture.for_text(recipe) is picture.for_vae
        assert picture.for_vae.tobytes() == apply_view(picture.image, picture.view).tobytes()


def test_the_text_model_of_edit_plus_sees_the_same_crop_at_its_own_area(encoder_plus: Encoder) -> None:
    recipe = replace(bucketed(encoder_plus, (64, 256)), text_area_px=128 * 128)
    assert Picture.of(gradient(1000, 400), recipe).text_size(recipe) == (64, 256), "in the crop's proportions"
    image = gradient(300, 100)
    recipe = replace(bucketed(encoder_plus, (128, 128)), text_area_px=64 * 64)
    picture = Picture.of(image, recipe)
    crop = image.crop((100, 0, 200, 100))
    assert picture.for_vae.tobytes() == crop.resize((128, 128), Image.Resampling.LANCZOS).tobytes()
    assert picture.for_text(recipe).tobytes() == crop.resize((64, 64), Image.Resampling.LANCZOS).tobytes()


@pytest.mark.parametrize("scale", [1, 2])
def test_a_loss_mask_follows_the_crop_of_its_target(scale: int, encoder: Encoder) -> None:
    """The middle third is seen, of which the mask's white left half covers the left half; at any size of the mask."""
    mask = halves((300 * scale, 100 * scale), (0, 0, 150 * scale, 100 * scale))
    row = row_of(gradient(300, 100), gradient(50, 50), mask=mask)
    seen = decode_row(row, bucketed(encoder, (64, 64)), 10**6).loss_mask
    assert seen.tolist() == [[255] * 4 + [0] * 4] * 8


def test_without_buckets_a_loss_mask_covers_the_whole_target(encoder: Encoder) -> None:
    mask = halves((192, 64), (0, 0, 96, 64))
    decoded = decode_row(row_of(gradient(192, 64), gradient(50, 50), mask=mask), encoder.recipe, 10**6)
    height, width = decoded.shape.target
    assert decoded.loss_mask.tolist() == [[255] * (width // 2) + [0] * (width // 2)] * height


def test_a_view_of_the_whole_image_is_resized_without_cropping() -> None:
    image = gradient(90, 60)
    assert (
        apply_view(image, View((0, 0, 90, 60), (96, 64))).tobytes()
        == image.resize((96, 64), Image.Resampling.LANCZOS).tobytes()
    )
