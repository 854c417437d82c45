"""Odd image files: the models get of each what they get of its plain RGB twin, or it is skipped with a reason.

The twin is a plain PNG of what a person sees, computed here with numpy from what was put into the odd file; only lossy
decompression and colour management are left to the libraries. Compared, bit for bit, is a row decoded and resized: what
both models and the sample get of its images.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms, TiffImagePlugin, features

from qie.encode import Encoder
from qie.encode.encoder import PreparedRow, decode_row
from qie.errors import RowError
from qie.shards.record import encode as to_record
from qie.types import Row, Sample
from tests.builders import assert_prepared_alike, prepared

HEIGHT, WIDTH = 24, 40
ORIENTATION = 0x0112
WHITE_IS_ZERO = {262: 0}

Picture = np.ndarray


def saved(image: Image.Image | Picture, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, kind, **options)
    return buffer.getvalue()


def stored(content: bytes) -> Picture:
    """What a file's decompression gives, for lossy ones, of which nobody else can say what they show."""
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image)


def careless(content: bytes) -> Picture:
    """What reading a file without a thought for metadata, depth or transparency gives."""
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image.convert("RGB"))


def scene(seed: int) -> Picture:
    """Smooth colours under some noise: turning it, or another scene, is another picture."""
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 256, (2, 3, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(corners).resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR)).astype(int)
    return (smooth + rng.integers(-20, 21, smooth.shape)).clip(0, 255).astype(np.uint8)


def grey3(grey: Picture) -> Picture:
    return np.stack([grey] * 3, axis=-1)


def on_white(colour: Picture, alpha: Picture) -> Picture:
    """Exact: 255 is odd, so no share of it is a half."""
    share = alpha.astype(int)
    return ((colour * share + 255 * (255 - share) + 127) // 255).astype(np.uint8)


def from_inks(inks: Picture) -> Picture:
    light = 255 - inks.astype(int)
    return ((light[..., :3] * light[..., 3:] + 127) // 255).astype(np.uint8)


# Files that Pillow cannot write


def png(pixels: Picture, depth: int, colour: int, extra: bytes = b"", *, interlaced: bool = False) -> bytes:
    """A PNG of an array of its own depth; `extra` are chunks before the pixels, or a part of the file."""
    passes = [(0, 0, 1, 1)]
    if interlaced:
        passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
    wide = pixels.astype(">u2" if depth == 16 else np.uint8)
    lines = [b"\0" + line.tobytes() for x, y, dx, dy in passes for line in wide[y::dy, x::dx]]
    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], depth, colour, 0, 0, int(interlaced))
    pixel_chunk = chunk(b"IDAT", zlib.compress(b"".join(lines)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + pixel_chunk + chunk(b"IEND", b"")


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def fixed(*values: float) -> bytes:
    return struct.pack(f">{len(values)}i", *(round(value * 65536) for value in values))


def profile(name: str, space: bytes, tags: dict[bytes, bytes], pcs: bytes = b"XYZ ", kind: bytes = b"mntr") -> bytes:
    """An ICC profile, version 2."""
    text = name.encode() + b"\0"
    tags = {
        b"desc": b"desc\0\0\0\0" + struct.pack(">I", len(text)) + text + bytes(78),
        b"cprt": b"text\0\0\0\0none\0",
        b"wtpt": b"XYZ \0\0\0\0" + fixed(0.9642, 1, 0.8249),
        **tags,
    }
    table, body, start = struct.pack(">I", len(tags)), b"", 128 + 4 + 12 * len(tags)
    for tag, content in tags.items():
        table += tag + struct.pack(">II", start + len(body), len(content))
        body += content + bytes(-len(content) % 4)
    head = struct.pack(">I4sI4s4s4s", start + len(body), b"lcms", 0x02400000, kind, space, pcs)
    head += struct.pack(">6H", 2020, 1, 1, 0, 0, 0) + b"acsp" + bytes(28) + fixed(0.9642, 1, 0.8249)
    return head + bytes(128 - len(head)) + table + body


def curve(gamma: float) -> bytes:
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256))


def rgb_profile(name: str, primaries: Picture, gamma: float) -> bytes:
    """`primaries`: a column of XYZ under D50 for each of red, green, blue."""
    colours = {tag: b"XYZ \0\0\0\0" + fixed(*column) for tag, column in zip(RGB_COLOURS, primaries.T, strict=True)}
    return profile(name, b"RGB ", colours | dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve(gamma)))


def cmyk_profile() -> bytes:
    """A press: a table of Lab for the 16 ways of printing none or all of each ink."""
    identity = bytes(range(256))
    inks = np.stack(np.meshgrid(*[[0, 1]] * 4, indexing="ij"), axis=-1).reshape(-1, 4)
    cyan, magenta, yellow, black = inks.T
    lightness = 100 * (1 - 0.4 * cyan) * (1 - 0.5 * magenta) * (1 - 0.1 * yellow) * (1 - 0.85 * black)
    a, b = (70 * magenta - 35 * cyan) * (1 - black), (80 * yellow - 45 * cyan) * (1 - black)
    table = np.stack([lightness * 2.55, a + 128, b + 128], axis=-1).round().clip(0, 255).astype(np.uint8)
    lut = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + fixed(1, 0, 0, 0, 1, 0, 0, 0, 1)
    lut += identity * 4 + table.tobytes() + identity * 3
    return profile("Press", b"CMYK", {b"A2B0": lut}, pcs=b"Lab ", kind=b"prtr")


RGB_COLOURS = (b"rXYZ", b"gXYZ", b"bXYZ")
ADOBE_XYZ = np.array([[0.60974, 0.20528, 0.14919], [0.31111, 0.62567, 0.06322], [0.01947, 0.06087, 0.74457]])
SRGB_XYZ = np.array([[0.43607, 0.38515, 0.14307], [0.22249, 0.71687, 0.06061], [0.01392, 0.09708, 0.71410]])
ADOBE = rgb_profile("Adobe RGB (1998)", ADOBE_XYZ, 563 / 256)
LINEAR_SRGB = rgb_profile("GIMP built-in Linear sRGB", SRGB_XYZ, 1.0)
LINEAR_GREY = profile("Linear grey", b"GRAY", {b"kTRC": curve(1.0)})
SRGB, LAB, XYZ = (ImageCms.ImageCmsProfile(ImageCms.createProfile(name)).tobytes() for name in ("sRGB", "LAB", "XYZ"))


def managed(image: Image.Image | Picture, icc: bytes) -> Picture:
    source = image if isinstance(image, Image.Image) else Image.fromarray(image)
    profiles = ImageCms.ImageCmsProfile(io.BytesIO(icc)), ImageCms.createProfile("sRGB")
    return np.asarray(ImageCms.profileToProfile(source, *profiles, outputMode="RGB"))


# The table

TURNED: dict[int, Callable[[Picture], Picture]] = {
    1: lambda stored: stored,
    2: np.fliplr,
    3: lambda stored: np.rot90(stored, 2),
    4: np.flipud,
    5: lambda stored: stored.swapaxes(0, 1),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: np.rot90(stored, 2).swapaxes(0, 1),
    8: np.rot90,
}


def oriented(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


def table() -> dict[str, tuple[bytes, Picture]]:
    """Odd files, and what is in them: colours, and opacity as a fourth channel where some of it is transparent."""
    rng = np.random.default_rng(9)
    colour, other = scene(0), scene(1)
    grey, alpha = colour[..., 0], np.tile(np.linspace(0, 255, WIDTH).round().astype(np.uint8), (HEIGHT, 1))
    deep = rng.integers(0, 1000, (HEIGHT, WIDTH)).astype(np.uint16) + 250 * grey
    dark = grey.astype(np.uint16) * 4
    ifd = TiffImagePlugin.ImageFileDirectory_v2()
    ifd.update(WHITE_IS_ZERO)

    def shallow(values: Picture) -> Picture:
        return grey3(((values.astype(int) + 128) // 257).astype(np.uint8))

    palette, index = rng.integers(0, 256, (16, 3), dtype=np.uint8), (grey // 16).astype(np.uint8)
    paletted, behind = Image.fromarray(index), Image.fromarray(15 - index)
    paletted.putpalette(palette.ravel().tolist())
    behind.putpalette((255 - palette).ravel().tolist())
    key, graded = (np.arange(16) != 5) * np.uint8(255), rng.integers(0, 256, 16, dtype=np.uint8)
    paletted_alpha = Image.merge("PA", [Image.fromarray(index), Image.fromarray(alpha)])
    paletted_alpha.putpalette(palette.ravel().tolist())
    keyed = np.where(grey[..., None] > 120, np.array([10, 20, 30], dtype=np.uint8), colour)

    inks = np.dstack([colour, other[..., :1] // 2])
    cmyk = Image.frombytes("CMYK", inks.shape[1::-1], inks.tobytes())
    cmyk_jpeg, jpeg = saved(cmyk, "JPEG", quality=90), saved(colour, "JPEG", quality=90)
    progressive = saved(colour, "JPEG", quality=70, progressive=True)
    grey_jpeg = saved(grey, "JPEG", quality=80)
    lab = ImageCms.profileToProfile(
        Image.fromarray(colour), *(ImageCms.ImageCmsProfile(io.BytesIO(icc)) for icc in (SRGB, LAB)), outputMode="LAB"
    )
    films = {
        kind: saved(colour, kind, save_all=True, append_images=[Image.fromarray(other)], **options)
        for kind, options in {"WEBP": {"lossless": True}, "PNG": {}, "TIFF": {}, "MPO": {"quality": 90}}.items()
    }
    film = saved(paletted, "GIF", save_all=True, append_images=[behind], optimize=False, disposal=1)
    second = film.rindex(b"\x21\xf9\x04") + 8  # behind the control block of the second frame
    broken_mpo = films["MPO"].replace(b"MPF\0", b"MPF\0XXXX", 1)
    black, blue, dot = np.zeros((1, 1, 3), np.uint8), np.array([[[7, 99, 201]]], np.uint8), np.array([[130]], np.uint8)

    exif_ends_early = b"Exif\0\0II*\0\x08\0\0\0\xff\xff broken"
    table = {
        f"JPEG, orientation {orientation}": (
            saved(colour, "JPEG", quality=90, exif=oriented(orientation)),
            turn(stored(jpeg)),
        )
        for orientation, turn in TURNED.items()
    }
    table |= {
        "PNG, orientation 6": (saved(np.rot90(colour), exif=oriented(6)), colour),
        "16-bit grey PNG, orientation 6": (saved(np.rot90(deep), exif=oriented(6)), shallow(deep)),
        "16-bit grey TIFF, orientation 8": (saved(np.rot90(deep, -1), "TIFF", exif=oriented(8)), shallow(deep)),
        "palette PNG, orientation 3": (
            saved(paletted.rotate(180), exif=oriented(3), transparency=5),
            np.dstack([palette[index], key[index]]),
        ),
        "orientation 9, which there is not": (saved(colour, exif=oriented(9)), colour),
        "progressive JPEG": (progressive, stored(progressive)),
        "grey JPEG": (grey_jpeg, grey3(stored(grey_jpeg))),
        "several pictures: MPO": (films["MPO"], stored(jpeg)),
        "MPO with a broken index": (broken_mpo, stored(jpeg)),
        # Inks
        "CMYK JPEG": (cmyk_jpeg, from_inks(stored(cmyk_jpeg))),
        "CMYK TIFF": (saved(cmyk, "TIFF"), from_inks(inks)),
        "CMYK TIFF with a profile": (saved(cmyk, "TIFF", icc_profile=cmyk_profile()), managed(cmyk, cmyk_profile())),
        "CMYK TIFF with a broken profile": (saved(cmyk, "TIFF", icc_profile=b"broken"), from_inks(inks)),
        # Palettes and transparency
        "palette PNG": (saved(paletted), palette[index]),
        "palette GIF": (saved(paletted, "GIF"), palette[index]),
        "palette BMP": (saved(paletted, "BMP"), palette[index]),
        "palette PNG, one entry transparent": (
            saved(paletted, transparency=5),
            np.dstack([palette[index], key[index]]),
        ),
        "palette GIF, one entry transparent": (
            saved(paletted, "GIF", transparency=5),
            np.dstack([palette[index], key[index]]),
        ),
        "palette PNG, entries half transparent": (
            saved(paletted, transparency=graded.tobytes()),
            np.dstack([palette[index], graded[index]]),
        ),
        "one colour transparent": (
            saved(keyed, transparency=(10, 20, 30)),
            np.dstack([keyed, (keyed != (10, 20, 30)).any(axis=-1) * np.uint8(255)]),
        ),
        "RGBA PNG": (saved(np.dstack([colour, alpha])), np.dstack([colour, alpha])),
        "RGBA PNG, opaque": (saved(np.dstack([colour, alpha * 0 + 255])), colour),
        "RGBA WebP, lossless": (
            saved(np.dstack([colour, alpha]), "WEBP", lossless=True, exact=True),
            np.dstack([colour, alpha]),
        ),
        "RGBA TIFF": (saved(np.dstack([colour, alpha]), "TIFF"), np.dstack([colour, alpha])),
        "RGBA, all transparent": (saved(np.dstack([colour, alpha * 0])), np.dstack([colour, alpha * 0])),
        "grey with alpha": (saved(np.dstack([grey, alpha])), np.dstack([grey3(grey), alpha])),
        "palette TIFF with alpha": (saved(paletted_alpha, "TIFF"), np.dstack([palette[index], alpha])),
        # Depths
        "grey PNG": (saved(grey), grey3(grey)),
        "1 bit": (saved(grey > 120), grey3((grey > 120) * np.uint8(255))),
        "16-bit grey PNG": (saved(deep), shallow(deep)),
        "16-bit grey PNG, dark": (saved(dark), shallow(dark)),
        "16-bit grey TIFF, little-endian": (saved(deep, "TIFF"), shallow(deep)),
        "16-bit grey TIFF, big-endian": (
            saved(Image.frombytes("I;16B", (WIDTH, HEIGHT), deep.astype(">u2").tobytes()), "TIFF"),
            shallow(deep),
        ),
        "16-bit grey TIFF, white is zero": (saved(deep, "TIFF", tiffinfo=ifd), 255 - shallow(deep)),
        "16-bit grey PNG, one level transparent": (
            png(keyed[..., 0].astype(int) * 257, 16, 0, chunk(b"tRNS", struct.pack(">H", 10 * 257))),
            np.dstack([grey3(keyed[..., 0]), (keyed[..., 0] != 10) * np.uint8(255)]),
        ),
        "16-bit RGB PNG": (png(colour.astype(int) * 257, 16, 2), colour),
        # Several frames
        "animated GIF": (film, palette[index]),
        "animated GIF, cut short in its second frame's size": (film[: second + 5], palette[index]),
        "animated GIF, cut short in its second frame's palette": (film[: second + 30], palette[index]),
        "animated GIF, cut short in its second frame's pixels": (film[:-40], palette[index]),
        "animated WebP": (films["WEBP"], colour),
        "animated PNG": (films["PNG"], colour),
        "several pages: TIFF": (films["TIFF"], colour),
        # Containers
        "interlaced PNG": (png(colour, 8, 2, interlaced=True), colour),
        "lossless WebP": (saved(colour, "WEBP", lossless=True), colour),
        "BMP": (saved(colour, "BMP"), colour),
        "PPM": (saved(colour, "PPM"), colour),
        "LZW TIFF": (saved(colour, "TIFF", compression="tiff_lzw"), colour),
        # Profiles
        "sRGB profile": (saved(colour, icc_profile=SRGB), colour),
        "sRGB profile in JPEG": (saved(colour, "JPEG", quality=90, icc_profile=SRGB), stored(jpeg)),
        "wide profile": (saved(colour, icc_profile=ADOBE), managed(colour, ADOBE)),
        "wide profile in JPEG": (
            saved(colour, "JPEG", quality=90, icc_profile=ADOBE),
            managed(stored(jpeg), ADOBE),
        ),
        "wide profile, transparent": (
            saved(np.dstack([colour, alpha]), icc_profile=ADOBE),
            np.dstack([managed(colour, ADOBE), alpha]),
        ),
        "wide profile, palette": (saved(paletted, icc_profile=ADOBE), managed(palette[index], ADOBE)),
        "linear profile that has sRGB in its name": (
            saved(colour, icc_profile=LINEAR_SRGB),
            managed(colour, LINEAR_SRGB),
        ),
        "grey profile": (saved(grey, icc_profile=LINEAR_GREY), managed(grey, LINEAR_GREY)),
        "grey profile, transparent": (
            saved(np.dstack([grey, alpha]), icc_profile=LINEAR_GREY),
            np.dstack([managed(grey, LINEAR_GREY), alpha]),
        ),
        "grey profile, 16 bit": (
            saved(grey.astype(np.uint16) * 257, icc_profile=LINEAR_GREY),
            managed(grey, LINEAR_GREY),
        ),
        "Lab TIFF": (saved(lab, "TIFF", icc_profile=LAB), managed(lab, LAB)),
        "profile of another mode: RGB for grey": (saved(grey, icc_profile=ADOBE), grey3(grey)),
        "profile of another mode: Lab for RGB": (saved(colour, icc_profile=LAB), colour),
        "profile of another mode: XYZ for RGB": (saved(colour, icc_profile=XYZ), colour),
        "broken profile": (saved(colour, icc_profile=b"no profile"), colour),
        "profile cut short": (saved(colour, icc_profile=ADOBE[:200]), colour),
        # EXIF that means nothing
        "EXIF is junk, PNG": (saved(colour, exif=b"Exif\0\0" + b"junk" * 9), colour),
        "EXIF is junk, JPEG": (saved(colour, "JPEG", quality=90, exif=b"Exif\0\0" + b"junk" * 9), stored(jpeg)),
        "EXIF ends early, PNG": (saved(colour, exif=exif_ends_early), colour),
        "EXIF ends early, JPEG": (saved(colour, "JPEG", quality=90, exif=exif_ends_early), stored(jpeg)),
        # Sizes
        "1 pixel": (saved(blue), np.full((8, 8, 3), blue[0, 0])),
        "1 pixel, 1 bit": (saved(black[..., 0] > 0), np.zeros((4, 4, 3), np.uint8)),
        "1 pixel, grey GIF": (saved(dot, "GIF"), np.full((2, 2, 3), 130, np.uint8)),
    }
    if features.check("avif"):
        avif = saved(colour, "AVIF", quality=90)
        table["AVIF"] = avif, stored(avif)
    return table


def refused() -> dict[str, tuple[bytes, str]]:
    """Files that are skipped, and the reason, which follows the name of the image."""
    colour, grey = scene(0), scene(0)[..., 0]
    big = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    psd = b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, HEIGHT, WIDTH, 8, 3) + bytes(14) + colour.tobytes()

    def cut(kind: str, share: float = 0.5, **options: Any) -> bytes:
        content = saved(big, kind, **options)
        return content[: int(len(content) * share)]

    return {
        "longer than 1:200, lying": (saved(np.zeros((1, 250, 3), np.uint8)), " is too long"),
        "longer than 1:200, standing": (saved(np.zeros((1005, 5, 3), np.uint8), "JPEG"), " is too long"),
        **{
            f"{share} of a {kind}": (cut(kind, share), " is damaged: ")
            for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
            for share in (0.3, 0.6, 0.9)
        },
        "half a progressive JPEG": (cut("JPEG", progressive=True), " is damaged: "),
        "PNG with a wrong checksum": (png(colour, 8, 2).replace(b"IDAT", b"IDAT\0", 1), " is damaged: "),
        "PNG with a flipped bit": (png(colour, 8, 2, chunk(b"IDAT", b"flip")), " is damaged: "),
        "a PNG's first bytes": (saved(colour)[:8], " is not an image"),
        "text": (b"a photograph of a cat\n", " is not an image"),
        "empty": (b"", " is not an image"),
        "HTML": (b"<!doctype html><title>404 Not Found</title>", " is not an image"),
        "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>', " is not an image"),
        "ZIP": (b"PK\x03\x04" + bytes(60), " is not an image"),
        "EPS": (saved(colour, "EPS"), " is not an image"),
        "PSD": (psd, " is not an image"),
        "PDF": (b"%PDF-1.4\n%%EOF\n", " is not an image"),
        "32-bit TIFF": (saved(grey.astype(np.int32) * 65536, "TIFF"), " is greyscale"),
        "floating-point TIFF": (saved(grey.astype(np.float32) / 255, "TIFF"), " is greyscale"),
    }


TABLE, REFUSED = table(), refused()
TRANSPARENT = {name: (content, twin) for name, (content, twin) in TABLE.items() if twin.shape[2] == 4}
# What a person sees of each, on a white page.
SEEN = TABLE | {
    name: (content, on_white(*np.split(twin, [3], axis=2))) for name, (content, twin) in TRANSPARENT.items()
}
SEVERAL_FRAMES = [name for name in SEEN if name.startswith(("animated", "several"))]


def row_of(target: bytes, control: bytes, mask: bytes | None = None) -> Row:
    return Row(0, "odd", target, (control,), "make it night", mask)


@pytest.fixture(scope="module")
def plain(encoder: Encoder) -> Callable[[Picture], PreparedRow]:
    """A row whose images are both the plain PNG of a picture."""

    def prepare(picture: Picture) -> PreparedRow:
        content = saved(np.ascontiguousarray(picture))
        return prepared(encoder, row_of(content, content))

    return prepare


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Mean difference, in deviations."""
    return float((one.float() - other.float()).abs().mean() / one.float().std())


@pytest.mark.parametrize("name", SEEN)
def test_an_odd_image_is_seen_as_its_plain_twin(
    name: str, encoder: Encoder, plain: Callable[[Picture], PreparedRow]
) -> None:
    content, twin = SEEN[name]
    row, expected = row_of(content, content), plain(twin)
    found = prepared(encoder, row)
    assert_prepared_alike(found, expected)
    assert encoder.inspect(row)[1:] == encoder.inspect(expected.row)[1:]
    said = ["has several frames: the first is used"] if name in SEVERAL_FRAMES else []
    said += ["has transparent parts: the model gets them as #ffffff (data.background)"] if name in TRANSPARENT else []
    assert found.notes == tuple(f"{image} {what}" for what in said for image in ("the target", "control 1"))


@pytest.mark.parametrize("name", TRANSPARENT)
def test_a_family_with_opacity_is_given_it_however_a_file_holds_it(name: str, encoder_21: Encoder) -> None:
    content, twin = TRANSPARENT[name]
    plain = saved(np.ascontiguousarray(twin))
    row = row_of(content, content)
    found = prepared(encoder_21, row)
    assert_prepared_alike(found, prepared(encoder_21, row_of(plain, plain)))
    assert found.notes == () and found.target[0, 3].min() < 1


def test_what_is_seen_alike_is_encoded_alike_and_another_picture_clearly_otherwise(encoder: Encoder) -> None:
    def record(sample: Sample) -> bytes:
        return to_record(replace(sample, key="0" * 64), "0" * 16)

    content, twin = SEEN["animated WebP"]
    row = row_of(content, content)
    sample, expected, other = (
        encoder.encode(one) for one in (row, row_of(*[saved(twin)] * 2), row_of(*[saved(scene(1))] * 2))
    )
    assert record(sample) == record(expected)
    assert encoder.inspect(row)[:3] == (sample.key, sample.shape, len(sample.prompt_embed))
    assert sample.notes == prepared(encoder, row).notes != ()
    assert distance(sample.pixel_latent, other.pixel_latent) > CLEARLY


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_seen_is_skipped_with_its_reason_as_target_and_as_control(name: str, encoder: Encoder) -> None:
    content, reason = REFUSED[name]
    good = saved(scene(0))
    for what, row in {"the target": row_of(content, good), "control 1": row_of(good, content)}.items():
        assert_refused(encoder, row, what + reason)


def assert_refused(encoder: Encoder, row: Row, reason: str) -> RowError:
    """That `encode` and `inspect` refuse a row for the same reason."""
    with pytest.raises(RowError) as encoding:
        encoder.encode(row)
    with pytest.raises(RowError) as inspecting:
        encoder.inspect(row)
    assert encoding.value.what.startswith(reason)
    assert str(inspecting.value) == str(encoding.value)
    return encoding.value


@pytest.mark.parametrize("size", [(11, 10), (101, 1), (1, 101), (1000, 1000)])
def test_an_image_of_too_many_pixels_is_skipped_and_one_at_the_limit_is_not(
    encoder: Encoder, size: tuple[int, int]
) -> None:
    at, beyond = (saved(Image.new("RGB", size)) for size in ((10, 10), size))
    cpu = torch.device("cpu")
    limited = Encoder(encoder.pretrained, encoder.recipe, cpu, cpu, max_image_px=100)
    for what, row in {
        "the target": row_of(beyond, at),
        "control 1": row_of(at, beyond),
        "the mask": row_of(at, at, beyond),
    }.items():
        error = assert_refused(limited, row, f"{what} is too large")
        assert (error.expected, error.found) == ("at most 100 pixels", f"{size[0]}×{size[1]}")
    decode_row(row_of(at, at, at), encoder.recipe, 100)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (saved(np.zeros((WIDTH, HEIGHT), np.uint8)), "the mask and the target have different proportions"),
        (saved(np.zeros((HEIGHT, 2 * WIDTH), np.uint8)), "the mask and the target have different proportions"),
        (saved(np.zeros((HEIGHT, WIDTH), np.int32), "TIFF"), "the mask is greyscale"),
        (saved(scene(0))[:500], "the mask is damaged: "),
        (b"", "the mask is not an image"),
    ],
)
def test_a_row_is_skipped_for_its_mask(mask: bytes, reason: str, encoder: Encoder) -> None:
    good = saved(scene(0))
    assert_refused(encoder, row_of(good, good, mask), reason)


def test_an_odd_mask_weighs_as_its_plain_twin(encoder: Encoder) -> None:
    """A mask's own orientation, depth and palette count, too."""
    good, white = saved(scene(0)), scene(0)[..., 0] > 120
    levels = white.astype(np.uint8) * 255
    masks = [
        saved(grey3(levels)),
        saved(white),
        saved(levels.astype(np.uint16) * 257),
        saved(np.rot90(levels), exif=oriented(6)),
        saved(levels, "GIF"),
    ]
    weights = [decode_row(row_of(good, good, mask), encoder.recipe, 10_000).loss_mask for mask in masks]
    assert 0 < (weights[0] > 127).float().mean() < 1
    assert all(torch.equal(one, weights[0]) for one in weights)


# That the comparison above can fail


@pytest.mark.parametrize(
    "name",
    [
        *(f"JPEG, orientation {orientation}" for orientation in (2, 3, 4, 6)),
        "CMYK TIFF with a profile",
        "palette PNG, one entry transparent",
        "palette PNG, entries half transparent",
        "RGBA PNG",
        "grey with alpha",
        "16-bit grey PNG",
        "16-bit grey TIFF, big-endian",
        "16-bit grey TIFF, white is zero",
        "wide profile",
        "linear profile that has sRGB in its name",
        "grey profile, 16 bit",
    ],
)
def test_what_a_careless_reader_sees_is_another_picture(name: str, plain: Callable[[Picture], PreparedRow]) -> None:
    content, twin = SEEN[name]
    one, other = plain(careless(content)).target, plain(twin).target
    assert one.shape != other.shape or distance(one, other) > CLEARLY


CLEARLY = 0.02


def test_a_wide_profile_gives_the_colours_that_its_primaries_and_gamma_say() -> None:
    """Colour management by hand, which the library's is within rounding of."""
    colour = scene(0)
    linear = (colour / 255.0) ** (563 / 256) @ ADOBE_XYZ.T @ np.linalg.inv(SRGB_XYZ).T
    linear = linear.clip(0, 1)
    curved = np.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear ** (1 / 2.4) - 0.055)
    found = managed(colour, ADOBE).astype(int)
    assert np.abs(found - curved * 255).max() < 2
    assert np.abs(found - colour).max() > 20
