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
from qie.encode.images import apply_view
from qie.encode.sizes import MAX_RATIO, Size, View, centre_crop, choose_area, choose_view, fit_size, nearest_bucket
from qie.recipe import Recipe
from qie.types import Row

deterministic = settings(derandomize=True, deadline=None, database=None, max_examples=500)
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
@example((100, 100), [10_000, 10_001])
def test_the_area_is_the_largest_that_does_not_enlarge_or_else_the_smallest(image: Size, areas_px: list[int]) -> None:
    found = choose_area(image, areas_px)
    assert found in areas_px
    own = image[0] * image[1]
    if found > own:
        assert found == min(areas_px)
    else:
        assert not any(found < area <= own for area in areas_px)


@deterministic
@given(images, areas, st.randoms(use_true_random=False))
def test_neither_order_nor_repetition_of_areas_counts(image: Size, areas_px: list[int], random) -> None:
    shuffled = areas_px * 2
    random.shuffle(shuffled)
    assert choose_area(image, shuffled) == choose_area(image, areas_px)


@pytest.mark.parametrize(
    ("image", "area"),
    [
        ((1023, 1024), 768 * 768),
        ((1024, 1024), 1024 * 1024),
        ((4096, 256), 1024 * 1024),  # the area counts, not the sides
        ((4000, 3000), 1024 * 1024),
        ((512, 512), 512 * 512),
        ((511, 512), 512 * 512),
        ((1, 1), 512 * 512),
    ],
)
def test_some_areas(image: Size, area: int) -> None:
    assert choose_area(image, [512 * 512, 1024 * 1024, 768 * 768]) == area


# Buckets


@deterministic
@given(images, buckets)
@example((1, 20_000), SDXL)
@example((20_000, 1), SDXL)
def test_no_bucket_has_nearer_proportions_and_no_equally_near_one_a_nearer_area(
    image: Size, buckets_px: list[Size]
) -> None:
    found = nearest_bucket(image, buckets_px)
    assert found in buckets_px
    for other in buckets_px:
        assert octaves(found, image) <= octaves(other, image) + 1e-8
        if other[0] * found[1] == other[1] * found[0]:
            assert area_octaves(found, image) <= area_octaves(other, image) + 1e-8


@deterministic
@given(images, buckets, st.randoms(use_true_random=False))
@example((512, 512), [(1024, 512), (512, 1024)], None)  # equally near, and of one area
@example((512, 512), [(64, 64), (4096, 4096)], None)  # equally near in area, too
def test_neither_order_nor_repetition_of_buckets_counts(image: Size, buckets_px: list[Size], random) -> None:
    shuffled = (buckets_px * 2)[::-1]
    if random is not None:
        random.shuffle(shuffled)
    assert nearest_bucket(image, shuffled) == nearest_bucket(image, buckets_px)


@pytest.mark.parametrize(
    ("image", "bucket"),
    [
        ((3000, 3000), (1024, 1024)),
        ((10, 10), (1024, 1024)),
        ((1920, 1080), (1344, 768)),
        ((1080, 1920), (768, 1344)),
        ((4000, 3000), (1152, 896)),
        ((3000, 4000), (896, 1152)),
        ((20_000, 100), (1536, 640)),
        ((100, 20_000), (640, 1536)),
    ],
)
def test_some_buckets(image: Size, bucket: Size) -> None:
    assert nearest_bucket(image, SDXL) == bucket


def test_proportions_are_compared_in_octaves() -> None:
    """By differences of width / height, 142:100 would go to 1:1, and 100:141 to 1:2."""
    assert nearest_bucket((100, 142), [(512, 512), (512, 1024)]) == (512, 1024)
    assert nearest_bucket((100, 141), [(512, 512), (512, 1024)]) == (512, 512)
    assert nearest_bucket((142, 100), [(512, 512), (1024, 512)]) == (1024, 512)
    assert nearest_bucket((141, 100), [(512, 512), (1024, 512)]) == (512, 512)


def test_of_buckets_of_one_shape_the_one_nearest_in_area_is_taken() -> None:
    squares = [(256, 256), (512, 512), (1024, 1024)]
    assert [nearest_bucket((side, side), squares) for side in (10, 362, 363, 724, 725, 9000)] == [
        (256, 256),
        (256, 256),
        (512, 512),
        (512, 512),
        (1024, 1024),
        (1024, 1024),
    ]


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


@deterministic
@given(images, st.integers(1, 50))
def test_an_image_of_a_buckets_proportions_is_not_cropped(image: Size, times: int) -> None:
    bucket = image[0] * times, image[1] * times
    assert centre_crop(image, bucket) == (0, 0, *image)
    assert centre_crop(bucket, image) == (0, 0, *bucket)


@pytest.mark.parametrize(
    ("image", "proportions", "box"),
    [
        ((300, 200), (1, 1), (50, 0, 250, 200)),
        ((200, 300), (1, 1), (0, 50, 200, 250)),
        ((301, 200), (64, 64), (50, 0, 250, 200)),
        ((200, 200), (2, 1), (0, 50, 200, 150)),
        ((200, 200), (1024, 768), (0, 25, 200, 175)),
        ((1, 200), (4, 1), (0, 99, 1, 100)),
        ((200, 1), (1, 200), (99, 0, 100, 1)),
        ((1, 1), (3, 2), (0, 0, 1, 1)),
    ],
)
def test_some_crops(image: Size, proportions: Size, box: tuple[int, int, int, int]) -> None:
    assert centre_crop(image, proportions) == box


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


def test_the_text_model_of_edit_sees_the_vaes_image(encoder: Encoder) -> None:
    for recipe in (encoder.recipe, bucketed(encoder, (96, 64), (64, 96))):
        picture = Picture.of(gradient(300, 100), recipe)
        assert picture.for_text(recipe).size == picture.view.size
        assert picture.for_text(recipe).tobytes() == picture.for_vae.tobytes()


def test_the_text_model_of_edit_plus_sees_the_same_crop_at_its_own_area(encoder_plus: Encoder) -> None:
    image = gradient(300, 100)
    recipe = replace(bucketed(encoder_plus, (128, 128)), text_area_px=64 * 64)
    picture = Picture.of(image, recipe)
    crop = image.crop((100, 0, 200, 100))
    assert picture.for_vae.tobytes() == crop.resize((128, 128), Image.Resampling.LANCZOS).tobytes()
    assert picture.for_text(recipe).tobytes() == crop.resize((64, 64), Image.Resampling.LANCZOS).tobytes()


def test_the_text_models_size_follows_from_the_crop_and_not_from_the_image(encoder_plus: Encoder) -> None:
    recipe = replace(bucketed(encoder_plus, (64, 256)), text_area_px=128 * 128)
    assert Picture.of(gradient(1000, 400), recipe).text_size(recipe) == (64, 256)


def test_a_list_of_areas_enlarges_no_image_that_is_large_enough_for_one(encoder: Encoder) -> None:
    recipe = replace(encoder.recipe, areas_px=(64 * 64, 128 * 128, 256 * 256))
    sizes = [Picture.of(gradient(side, side), recipe).view.size for side in (20, 64, 127, 128, 255, 256, 1000)]
    assert sizes == [(side, side) for side in (64, 64, 64, 128, 128, 256, 256)]


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


def test_a_loss_mask_of_a_painted_box_lies_over_the_same_box_of_the_seen_target(encoder: Encoder) -> None:
    """The mask, and a target painted like it, by two ways through the same crop."""
    painted = halves((260, 120), (90, 24, 170, 72))
    decoded = decode_row(
        row_of(painted.convert("RGB"), gradient(9, 9), mask=painted), bucketed(encoder, (96, 64)), 10**6
    )
    target = np.asarray(decoded.target.for_vae.convert("L").resize((12, 8), Image.Resampling.BOX)).astype(int)
    assert np.abs(target - decoded.loss_mask.numpy()).max() < 16
    assert 0 < decoded.loss_mask.float().mean() < 255


def test_a_view_of_the_whole_image_is_resized_without_cropping() -> None:
    image = gradient(90, 60)
    assert (
        apply_view(image, View((0, 0, 90, 60), (96, 64))).tobytes()
        == image.resize((96, 64), Image.Resampling.LANCZOS).tobytes()
    )
