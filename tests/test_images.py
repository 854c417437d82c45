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

from qie.encode.images import (
    MAX_IMAGE_PX,
    View,
    apply_view,
    choose_view,
    decode_image,
    fit_size,
    to_loss_mask,
    to_pixels,
)
from qie.errors import RowError
from qie.image_formats import IMAGE_FORMATS, IMAGE_SUFFIXES

WHITE = "#ffffff"
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


def assert_like(content: bytes, twin: np.ndarray, *, background: str = WHITE) -> None:
    """That a file has the pixels of the RGB array `twin`, which a plain PNG of it has, too."""
    plain = decoded(saved(Image.fromarray(twin)))
    assert np.array_equal(plain, twin)
    found = decoded(content, background)
    assert found.shape == twin.shape
    assert np.array_equal(found, twin)


# Modes: tests/test_odd_images.py has them all, on white


@pytest.mark.parametrize("mode", ["RGBA", "LA", "palette", "colour key"])
def test_transparency_shows_the_stated_background(mode: str) -> None:
    shown, behind = np.array([200, 0, 0] if mode != "LA" else [9, 9, 9], np.uint8), np.array([32, 64, 96], np.uint8)
    clear, options = noise(high=2).astype(bool), {}
    colour = np.where(clear[..., None], np.uint8(77), shown)
    if mode == "palette":
        image = Image.fromarray(clear.astype(np.uint8))
        image.putpalette([*shown.tolist(), 77, 77, 77])
        options = {"transparency": 1}
    elif mode == "colour key":
        image, options = Image.fromarray(colour), {"transparency": (77, 77, 77)}
    else:
        alpha = np.where(clear, 0, 255).astype(np.uint8)
        image = Image.fromarray(np.dstack([colour if mode == "RGBA" else colour[..., 0], alpha]))
    twin = np.where(clear[..., None], behind, shown)
    assert_like(saved(image, **options), twin, background="#204060")


def test_a_cmyk_jpeg_is_not_inverted() -> None:
    """Adobe stores inks inverted; a decoder that forgets it gives a negative."""
    inks = np.zeros((16, 16, 4), dtype=np.uint8)
    inks[..., 0] = 255
    found = decoded(saved(Image.frombytes("CMYK", inks.shape[1::-1], inks.tobytes()), "JPEG", quality=95))
    assert np.abs(found.astype(int) - (0, 255, 255)).max() <= 3, "cyan, within what JPEG loses"


# What is no image


def refusal(content: bytes, what: str = "the target") -> RowError:
    with pytest.raises(RowError) as caught:
        decode_image(content, what, WHITE)
    return caught.value


@pytest.mark.parametrize("content", [b"", b"hello", b"\x00" * 100, b"<html>404</html>", b"\x89PNG", b"\xff\xd8\xff"])
def test_what_is_no_image_says_how_it_begins(content: bytes) -> None:
    error = refusal(content, "the mask")
    assert error.what == "the mask is not an image"
    assert error.found == f"{len(content)} bytes starting with {content[:8]!r}"


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
deterministic = settings(derandomize=True, deadline=None, database=None, max_examples=300)


@deterministic
@given(sides, sides, areas)
@example(1, 20_000, 1024 * 1024)
@example(20_000, 1, 1)
@example(1920, 1080, 1024 * 1024)
@example(80, 80, 80 * 80)  # 2.5 multiples: halves are rounded to even
@example(64, 441, 384 * 384)  # 31.500000000000004 multiples by one formula, 31.499999999999996 by another
def test_sizes_are_those_of_diffusers_and_never_0(width: int, height: int, area: int) -> None:
    expected = calculate_dimensions(area, width / height)
    found = fit_size(width, height, area, 32)
    assert found == tuple(max(side, 32) for side in expected)
    assert all(type(side) is int and side > 0 and side % 32 == 0 for side in found)


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


def test_the_endings_of_files_are_those_of_formats_that_the_decoder_reads() -> None:
    Image.init()
    known = Image.registered_extensions()
    assert {suffix: known[suffix] for suffix in IMAGE_SUFFIXES} == {
        suffix: name for name, suffixes in IMAGE_FORMATS.items() for suffix in suffixes
    }
