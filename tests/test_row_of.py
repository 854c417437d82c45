"""`Row.of`: rows of paths, bytes, PIL images and arrays."""

from __future__ import annotations

import io
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from qie.encode.images import decode_image, decode_layers
from qie.errors import RowError
from qie.types import Row
from tests.builders import RECIPE

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 4), np.uint8)
DARK = np.full((4, 4, 3), 40, np.uint8)


def decoded(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)))


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def test_a_path_gives_the_row_of_its_bytes_with_the_same_key(tmp_path: Path) -> None:
    content = saved(Image.fromarray(DARK), "JPEG")
    (tmp_path / "cat.jpg").write_bytes(content)
    of_bytes = Row.of(target=content, controls=[content, content], prompt="p", mask=content)
    for place in (tmp_path / "cat.jpg", str(tmp_path / "cat.jpg")):
        row = Row.of(target=place, controls=[place, content], prompt="p", mask=place)
        assert RECIPE.key(row) == RECIPE.key(of_bytes) == RECIPE.key(Row(7, "x", content, (content,) * 2, "p", content))
        assert row.name == "cat"


@pytest.mark.parametrize("shape", [(20, 30), (20, 30, 1), (20, 30, 2), (20, 30, 3), (20, 30, 4), (1, 1, 3)])
def test_pixels_of_an_array_come_back_as_they_were(shape: tuple[int, ...]) -> None:
    pixels = PIXELS[: shape[0], : shape[1], : shape[2]] if len(shape) == 3 else PIXELS[..., 0]
    row = Row.of(target=pixels, prompt="")
    assert np.array_equal(decoded(row.target), pixels.squeeze(-1) if shape[-1] == 1 else pixels)
    assert row.controls == ()


def test_the_png_of_an_array_is_one_of_known_bytes_and_longer_than_a_block_of_deflate() -> None:
    """Keys follow from them: no library of this machine may decide them."""
    row = Row.of(target=DARK, prompt="")
    assert f"{zlib.crc32(row.target):08x}" == "a03684a2"
    large = np.random.default_rng(1).integers(0, 256, (200, 300, 3), np.uint8)
    assert np.array_equal(decoded(Row.of(target=large, prompt="").target), large)


def test_a_mask_of_truth_values_is_white_where_it_is_true() -> None:
    mask = PIXELS[..., 0] > 128
    found = decoded(Row.of(target=DARK, mask=mask, prompt="").mask or b"")
    assert np.array_equal(found, np.where(mask, 255, 0))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA"])
def test_a_pil_image_is_decoded_as_the_file_of_it_would_be(mode: str) -> None:
    image = Image.fromarray(PIXELS).convert(mode)
    row = Row.of(target=image, controls=image, prompt="")
    assert row.controls == (row.target,)
    assert np.array_equal(
        decoded(row.target), np.asarray(image.convert({"1": "L", "P": "RGB", "PA": "RGBA"}.get(mode, mode)))
    )


@pytest.mark.parametrize("options", [{"transparency": (1, 2, 3)}, {"transparency": 3}], ids=["RGB", "P"])
def test_a_transparent_colour_of_a_pil_image_stays_transparent(options: dict) -> None:
    image = Image.fromarray(np.array([[[1, 2, 3], [9, 9, 9]]], np.uint8))
    image = image if isinstance(options["transparency"], tuple) else image.quantize(4)
    content = saved(image, "PNG", **options)
    from_file, from_image = (
        decode_layers(one, "it") for one in (content, Row.of(target=Image.open(io.BytesIO(content)), prompt="").target)
    )
    assert np.array_equal(from_file.rgba, from_image.rgba)


def test_orientation_and_colour_profile_of_a_pil_image_count_as_those_of_its_file() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("XYZ")).tobytes()
    content = saved(Image.fromarray(PIXELS[..., :3]), "PNG", exif=exif, icc_profile=profile)
    row = Row.of(target=Image.open(io.BytesIO(content)), prompt="")
    of_file, of_image = (np.asarray(decode_image(one, "it", "white")) for one in (content, row.target))
    assert of_file.shape == (30, 20, 3) and np.array_equal(of_file, of_image)
    assert Image.open(io.BytesIO(row.target)).info["icc_profile"] == profile


@pytest.mark.parametrize(
    ("image", "what", "found"),
    [
        (Path("no/such.png"), "cannot be read", "no/such.png"),
        ("https://host/a.png", "cannot be read", "fetch the file of a URL first"),
        ("a\0b", "cannot be read", "null"),
        (PIXELS.astype(np.float32), "another kind", r"\(array \* 255\)"),
        (PIXELS.transpose(2, 0, 1), "another kind", "channels last"),
        (PIXELS.astype(np.uint16), "another kind", "uint16"),
        (PIXELS[:0], "another kind", r"\[0, 30, 4\]"),
        (Image.new("CMYK", (4, 4)), "of a mode", "CMYK"),
        (Image.new("F", (4, 4)), "of a mode", "found: +F"),
        (torch.zeros(3, 4, 4), "is no image", r"permute\(1, 2, 0\)"),
        (12, "is no image", "builtins.int"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_image_without_loss_is_refused_by_its_place_in_the_row(image, what: str, found: str) -> None:
    for place, given in {
        "the target": {"target": image},
        "control 2": {"target": DARK, "controls": [DARK, image]},
        "the mask": {"target": DARK, "mask": image},
    }.items():
        with pytest.raises(RowError, match=f"^{place} .*{what}") as error:
            Row.of(prompt="", **given)
        assert error.match(found)


def test_a_pil_image_whose_file_is_cut_or_closed_is_refused() -> None:
    content = saved(Image.fromarray(PIXELS), "PNG")
    with pytest.raises(RowError, match="the target is damaged"):
        Row.of(target=Image.open(io.BytesIO(content[: len(content) // 2])), prompt="")
    with Image.open(io.BytesIO(content)) as image:
        pass
    with pytest.raises(RowError, match="its file was closed"):
        Row.of(target=image, prompt="")
