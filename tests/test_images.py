"""From the bytes of an image file to pixels: every way of storing an image gives the pixels of its plain RGB twin.

Where no tolerance is stated, all bits are equal.
"""

from __future__ import annotations

import io
import struct
import subprocess
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from qie.encode.images import MAX_IMAGE_PX, apply_view, decode_image, to_loss_mask, to_pixels
from qie.encode.sizes import View, choose_view, fit_size
from qie.errors import RowError

WHITE = "#ffffff"
ROUNDING = 1  # of 255: conversions that compute with 8 bits may round a channel up or down
HEIGHT, WIDTH = 12, 20


def noise(*channels: int, seed: int = 0, high: int = 256) -> np.ndarray:
    return np.random.default_rng(seed).integers(
        0, high, (HEIGHT, WIDTH, *channels), dtype=np.uint16 if high > 256 else np.uint8
    )


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def decoded(content: bytes, background: str = WHITE) -> np.ndarray:
    image = decode_image(content, "the target", background)
    assert image.mode == "RGB"
    return np.asarray(image)


def assert_like(content: bytes, twin: np.ndarray, *, within: int = 0, background: str = WHITE) -> None:
    """That a file has the pixels of the RGB array `twin`, which a plain PNG of it has, too."""
    plain = decoded(saved(Image.fromarray(twin)))
    assert np.array_equal(plain, twin)
    found = decoded(content, background)
    assert found.shape == twin.shape
    assert np.abs(found.astype(int) - twin.astype(int)).max() <= within


# Orientation

TURNED = {  # how a camera has stored the upright image that it marks with this orientation
    1: lambda image: image,
    2: lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    3: lambda image: image.transpose(Image.Transpose.ROTATE_180),
    4: lambda image: image.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
    5: lambda image: image.transpose(Image.Transpose.TRANSPOSE),
    6: lambda image: image.transpose(Image.Transpose.ROTATE_90),
    7: lambda image: image.transpose(Image.Transpose.TRANSVERSE),
    8: lambda image: image.transpose(Image.Transpose.ROTATE_270),
}


@pytest.mark.parametrize("orientation", TURNED)
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
def test_an_image_is_turned_upright_by_its_exif_orientation(orientation: int, kind: str) -> None:
    upright = noise(3)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    content = saved(TURNED[orientation](Image.fromarray(upright)), kind, exif=exif, **options)
    assert_like(content, upright)


def test_a_jpeg_is_turned_upright_by_its_exif_orientation() -> None:
    stored = Image.fromarray(noise(3))
    exif = Image.Exif()
    exif[0x0112] = 6
    plain, turned = decoded(saved(stored, "JPEG")), decoded(saved(stored, "JPEG", exif=exif))
    assert np.array_equal(turned, np.rot90(plain, -1))


def test_an_unknown_orientation_changes_nothing() -> None:
    exif = Image.Exif()
    exif[0x0112] = 9
    assert_like(saved(Image.fromarray(noise(3)), exif=exif), noise(3))


# Modes


def paletted(index: np.ndarray, palette: np.ndarray) -> Image.Image:
    image = Image.fromarray(index)
    image.putpalette(palette.ravel().tolist())
    return image


def test_a_palette_gives_its_colours() -> None:
    palette, index = noise(3).reshape(-1, 3)[:64], noise(high=64)
    image = paletted(index, palette)
    for kind in ("PNG", "GIF", "BMP"):
        assert_like(saved(image, kind), palette[index])


def test_grey_gives_three_equal_channels() -> None:
    grey = noise()
    twin = np.stack([grey] * 3, axis=-1)
    for kind in ("PNG", "TIFF", "BMP"):
        assert_like(saved(Image.fromarray(grey), kind), twin)


def test_one_bit_gives_black_and_white() -> None:
    bits = noise(high=2).astype(bool)
    assert_like(saved(Image.fromarray(bits)), np.stack([bits * np.uint8(255)] * 3, axis=-1))


def over(colour: np.ndarray, alpha: np.ndarray, background: tuple[int, int, int]) -> np.ndarray:
    share = alpha[..., None] / 255.0
    return (colour * share + np.array(background) * (1 - share)).round().astype(np.uint8)


@pytest.mark.parametrize(("name", "background"), [(WHITE, (255, 255, 255)), ("#204060", (32, 64, 96))])
@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_is_laid_on_the_stated_background(mode: str, name: str, background: tuple[int, int, int]) -> None:
    content = noise(4 if mode == "RGBA" else 2)
    content[0, :, -1], content[1, :, -1] = 0, 255
    colour = content[..., :3] if mode == "RGBA" else np.repeat(content[..., :1], 3, axis=-1)
    twin = over(colour, content[..., -1], background)
    assert (twin[0] == background).all() and (twin[1] == colour[1]).all()
    assert_like(saved(Image.fromarray(content)), twin, within=ROUNDING, background=name)
    assert np.array_equal(decoded(saved(Image.fromarray(content)), name)[:2], twin[:2]), "the ends are exact"


def test_a_transparent_palette_entry_shows_the_background() -> None:
    palette, index = np.array([[9, 9, 9], [200, 0, 0], [0, 200, 0], [0, 0, 200]], dtype=np.uint8), noise(high=4)
    image = paletted(index, palette)
    palette[0] = 32, 64, 96
    for kind in ("PNG", "GIF"):
        assert_like(saved(image, kind, transparency=0), palette[index], background="#204060")


def test_a_transparent_colour_shows_the_background() -> None:
    colours = noise(3, high=2) * np.uint8(255)
    twin = colours.copy()
    twin[(colours == 0).all(axis=-1)] = 32, 64, 96
    assert (twin != colours).any()
    assert_like(saved(Image.fromarray(colours), transparency=(0, 0, 0)), twin, background="#204060")


def test_cmyk_gives_the_colour_that_its_inks_leave() -> None:
    inks = noise(4)
    light = 255 - inks.astype(float)
    twin = (light[..., :3] * light[..., 3:] / 255).round().astype(np.uint8)
    assert_like(saved(Image.frombytes("CMYK", inks.shape[1::-1], inks.tobytes()), "TIFF"), twin, within=ROUNDING)


def test_cmyk_without_black_is_the_inverse_of_its_inks() -> None:
    inks = noise(4)
    inks[..., 3] = 0
    assert_like(saved(Image.frombytes("CMYK", inks.shape[1::-1], inks.tobytes()), "TIFF"), 255 - inks[..., :3])


def test_a_cmyk_jpeg_is_not_inverted() -> None:
    """Adobe stores inks inverted; a decoder that forgets it paints a negative."""
    inks = np.zeros((16, 16, 4), dtype=np.uint8)
    inks[..., 0] = 255
    found = decoded(saved(Image.frombytes("CMYK", inks.shape[1::-1], inks.tobytes()), "JPEG", quality=95))
    assert np.abs(found.astype(int) - (0, 255, 255)).max() <= 3, "cyan, within what JPEG loses"


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_grey_is_scaled_to_8_bits(kind: str) -> None:
    grey = noise()
    content = saved(Image.fromarray(grey.astype(np.uint16) * 257), kind)
    assert_like(content, np.stack([grey] * 3, axis=-1))


def test_16_bit_grey_is_rounded_to_the_nearest_of_8_bits() -> None:
    grey = noise(high=65536)
    twin = (grey / 257).round().astype(np.uint8)
    assert_like(saved(Image.fromarray(grey)), np.stack([twin] * 3, axis=-1))


def test_big_endian_16_bit_grey_is_scaled_alike() -> None:
    grey = noise(high=65536)
    image = Image.frombytes("I;16B", (WIDTH, HEIGHT), grey.astype(">u2").tobytes())
    twin = (grey / 257).round().astype(np.uint8)
    assert_like(saved(image, "TIFF"), np.stack([twin] * 3, axis=-1))


def test_dark_16_bit_grey_stays_dark() -> None:
    """Its scale follows from what the file says, not from its brightest pixel."""
    grey = noise(high=256).astype(np.uint16)
    assert_like(saved(Image.fromarray(grey)), np.stack([(grey / 257).round().astype(np.uint8)] * 3, axis=-1))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_of_an_animation_the_first_frame_counts(kind: str) -> None:
    frames = []
    for colour in ("red", "lime", "blue"):
        frame = Image.new("RGB", (WIDTH, HEIGHT), colour)
        ImageDraw.Draw(frame).rectangle((2, 2, 6, 8), "black")
        frames.append(frame)
    options = {"lossless": True} if kind == "WEBP" else {}
    content = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    with Image.open(io.BytesIO(content)) as image:
        assert image.n_frames == 3
    assert_like(content, np.asarray(frames[0]))


def test_of_a_multi_picture_jpeg_the_first_picture_counts() -> None:
    """Phones store depth or a thumbnail behind the photograph; Pillow calls the format MPO, but opens it as a JPEG."""
    first, second = Image.fromarray(noise(3)), Image.new("RGB", (WIDTH, HEIGHT), "red")
    content = saved(first, "MPO", save_all=True, append_images=[second])
    assert_like(content, decoded(saved(first, "JPEG")))


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF"])
def test_the_container_does_not_count(kind: str) -> None:
    assert_like(saved(Image.fromarray(noise(3)), kind), noise(3))


def test_odd_metadata_changes_no_pixel_and_warns_of_nothing() -> None:
    """filterwarnings=error makes a warning that gets out a failure."""
    content = saved(Image.fromarray(noise(3)), "PNG", exif=b"Exif\x00\x00II*\x00\x08\x00\x00\x00\xff\xff broken")
    assert_like(content, noise(3))


# What is no image


def refusal(content: bytes, what: str = "the target") -> RowError:
    with pytest.raises(RowError) as caught:
        decode_image(content, what, WHITE)
    return caught.value


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_truncated_image_is_called_damaged(kind: str, share: float) -> None:
    content = saved(Image.fromarray(noise(3)).resize((200, 160)), kind)
    error = refusal(content[: int(len(content) * share)], "control 2")
    assert error.what.startswith("control 2 is damaged: ") or error.what == "control 2 is no image"
    if kind in ("JPEG", "PNG"):
        assert error.what.startswith("control 2 is damaged: ")


def test_a_flipped_bit_in_a_png_is_called_damaged() -> None:
    content = bytearray(saved(Image.fromarray(noise(3))))
    content[content.index(b"IDAT") + 40] ^= 1
    assert refusal(bytes(content)).what.startswith("the target is damaged: ")


@pytest.mark.parametrize("content", [b"", b"hello", b"\x00" * 100, b"<html>404</html>", b"\x89PNG", b"\xff\xd8\xff"])
def test_what_is_no_image_says_how_it_begins(content: bytes) -> None:
    error = refusal(content, "the mask")
    assert error.what == "the mask is no image"
    assert error.found == f"{len(content)} bytes starting with {content[:8]!r}"


@pytest.mark.parametrize("size", [(101, 1), (11, 10), (15, 15), (1000, 1000)])
def test_an_image_beyond_the_limit_is_called_too_large(size: tuple[int, int]) -> None:
    with pytest.raises(RowError, match="the target is too large") as caught:
        decode_image(saved(Image.new("RGB", size)), "the target", WHITE, max_px=100)
    assert caught.value.expected == "at most 100 pixels"
    assert caught.value.found == f"{size[0]}×{size[1]}"


def test_an_image_at_the_limit_is_decoded() -> None:
    assert decode_image(saved(Image.new("RGB", (10, 10))), "the target", WHITE, max_px=100).size == (10, 10)


@pytest.mark.parametrize("size", [(15, 15), (1000, 1000)])
def test_a_decompression_bomb_by_pillows_own_limit_is_too_large(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow only warns up to twice its limit, which is ours, and raises beyond, where it cannot be raised."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert "too large" in refusal(saved(Image.new("RGB", size))).what


def claimed(side: int) -> bytes:
    """A PNG that says it is a black and white square of this side, and ends where its pixels would begin."""
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return content + struct.pack(">I", 100) + b"IDAT"


@pytest.mark.parametrize("side", [9_000, 10_000, 13_377, 13_378, 100_000])
def test_an_image_is_too_large_only_beyond_the_limit_that_is_stated(side: int) -> None:
    assert ("too large" in refusal(claimed(side)).what) == (side**2 > MAX_IMAGE_PX)


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError])
def test_whatever_a_decoder_raises_is_a_damaged_image(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged AVIF raises RuntimeError, an odd DDS NotImplementedError: one row must not end a run."""

    def fail(*_: object) -> None:
        raise error("Decoding of color planes failed")

    content = saved(Image.fromarray(noise(3)))
    monkeypatch.setattr(Image.Image, "load", fail)
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", fail)
    assert refusal(content).what.startswith("the target is damaged: ")


def test_no_image_starts_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    content = saved(Image.fromarray(noise(3)), "EPS")
    started: list[object] = []

    def record(command: object, *_: object, **__: object) -> None:
        started.append(command)
        raise OSError("no program is started in tests")

    for name in ("Popen", "call", "check_call", "check_output", "run"):
        monkeypatch.setattr(subprocess, name, record)
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    assert refusal(content)
    assert started == []


# Sizes

sides = st.integers(1, 20_000)
areas = st.sampled_from([1024 * 1024, 384 * 384, 256 * 256, 128 * 128, 1, 640 * 480]) | st.integers(1, 4_000_000)
deterministic = settings(derandomize=True, deadline=None, database=None, max_examples=1000)


@deterministic
@given(sides, sides, areas)
@example(1, 20_000, 1024 * 1024)
@example(20_000, 1, 1)
@example(80, 80, 80 * 80)  # 2.5 multiples: halves are rounded to even
@example(64, 441, 384 * 384)  # 31.500000000000004 multiples by one formula, 31.499999999999996 by another
def test_sizes_are_those_of_diffusers_and_never_0(width: int, height: int, area: int) -> None:
    expected = calculate_dimensions(area, width / height)
    found = fit_size(width, height, area, 32)
    assert found == tuple(max(side, 32) for side in expected)
    assert all(type(side) is int and side > 0 and side % 32 == 0 for side in found)


def test_sizes_of_photographs_are_those_of_diffusers() -> None:
    """All of them, from narrow to wide, without the minimum coming in."""
    for width in range(100, 2000, 37):
        for height in range(100, 2000, 41):
            for area in (1024 * 1024, 384 * 384):
                assert fit_size(width, height, area, 32) == calculate_dimensions(area, width / height)


@pytest.mark.parametrize(
    ("size", "area", "fitted"),
    [
        ((1024, 1024), 1024 * 1024, (1024, 1024)),
        ((1920, 1080), 1024 * 1024, (1376, 768)),
        ((1080, 1920), 1024 * 1024, (768, 1376)),
        ((512, 512), 384 * 384, (384, 384)),
        ((1, 1), 1024 * 1024, (1024, 1024)),
    ],
)
def test_some_sizes(size: tuple[int, int], area: int, fitted: tuple[int, int]) -> None:
    assert fit_size(*size, area, 32) == fitted


# Pixels


@pytest.mark.parametrize("size", [(20, 12), (333, 517), (64, 64), (700, 90), (1, 50)])
@pytest.mark.parametrize("area", [128 * 128, 384 * 384])
def test_pixels_are_those_of_diffusers_image_processor_bit_for_bit(size: tuple[int, int], area: int) -> None:
    processor = VaeImageProcessor(vae_scale_factor=16)  # as the pipelines of Qwen-Image-Edit build it
    values = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(values)
    width, height = fit_size(*size, area, 32)
    theirs = processor.resize(image, height, width)
    ours = apply_view(image, choose_view(image.size, [area], [], 32))
    assert ours.tobytes() == theirs.tobytes() and ours.size == theirs.size == (width, height)
    expected = processor.preprocess(theirs, height, width)
    found = to_pixels(ours)
    assert found.dtype == expected.dtype == torch.float32
    assert found.shape == (1, 3, height, width)
    # A quotient, a product and a difference of each value, which IEEE 754 defines to the bit.
    assert torch.equal(found, expected)


def test_every_8_bit_value_has_the_pixel_that_diffusers_gives_it() -> None:
    image = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16)).convert("RGB")
    found = to_pixels(image)
    assert torch.equal(found, VaeImageProcessor(vae_scale_factor=16).preprocess(image))
    assert (found.min(), found.max()) == (-1.0, 1.0)
    assert len(found.unique()) == 256


# Masks


@pytest.mark.parametrize(
    ("paint", "expected"),
    [
        (lambda draw: None, [[0, 0], [0, 0], [0, 0]]),
        (lambda draw: draw.rectangle((0, 0, 15, 23), "white"), [[255, 255], [255, 255], [255, 255]]),
        (lambda draw: draw.rectangle((0, 0, 7, 7), "white"), [[255, 0], [0, 0], [0, 0]]),
        (lambda draw: draw.rectangle((8, 16, 15, 23), "white"), [[0, 0], [0, 0], [0, 255]]),
        (lambda draw: draw.rectangle((0, 0, 3, 7), "white"), [[128, 0], [0, 0], [0, 0]]),
        (lambda draw: draw.rectangle((0, 0, 15, 23), "#808080"), [[128, 128], [128, 128], [128, 128]]),
    ],
)
def test_a_loss_mask_is_how_much_of_each_latent_pixel_is_bright(
    paint: Callable[[ImageDraw.ImageDraw], object], expected: list[list[int]]
) -> None:
    mask = Image.new("RGB", (16, 24))
    paint(ImageDraw.Draw(mask))
    found = to_loss_mask(mask, mask.size, View((0, 0, 16, 24), (16, 24)))
    assert found.dtype == torch.uint8
    assert found.tolist() == expected
