#!/usr/bin/env python3
"""Write a small image-editing dataset made from the real photographs in scikit-image's wheel.

    python tools/make_photo_edits.py OUT [--rows N]

    OUT/control_images/<stem>.png    the photograph
    OUT/training_images/<stem>.png   the same photograph, edited
    OUT/training_images/<stem>.txt   the instruction that asks for the edit

A stem names the photograph and the edit: `astronaut-sepia`. Nothing is downloaded and nothing is random: the same
libraries write the same bytes each run. OUT may hold an earlier run, whose surplus rows are removed; the tool leaves an
OUT with other files alone. Needs scikit-image: pip install "qie[demo]".
"""

from __future__ import annotations

import argparse
import io
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

LONG_SIDE = 512
DEFAULT_ROWS = 96
CONTROL, TARGET = "control_images", "training_images"
PART = ".part"  # suffix of a file still being written

# From RGB to RGB, as Image.convert takes it: 3×4, row by row.
WARM = (1.18, 0, 0, 0, 0, 1.02, 0, 0, 0, 0, 0.75, 0)
COOL = (0.75, 0, 0, 0, 0, 0.98, 0, 0, 0, 0, 1.2, 0)


@dataclass(frozen=True)
class Photo:
    """A photograph in skimage/data, or the part of one inside `box` (left, top, right, bottom)."""

    name: str
    file: str
    subject: str
    box: tuple[int, int, int, int] | None = None
    grey: bool = False


@dataclass(frozen=True)
class Edit:
    name: str
    instructions: tuple[str, ...]  # wordings of one request; photographs take turns with them
    apply: Callable[[Image.Image], Image.Image]
    needs_colour: bool = False


def crop_centre(image: Image.Image) -> Image.Image:
    """The middle of the image, 60% as wide and as high."""
    left, top = round(image.width * 0.2), round(image.height * 0.2)
    return image.crop((left, top, image.width - left, image.height - top))


def add_border(image: Image.Image) -> Image.Image:
    """Paint the frame over the edges, so that the image keeps its size and its content stays where it was."""
    width = round(min(image.size) * 0.07)
    return ImageOps.expand(ImageOps.crop(image, width), width, "white")


def pixelate(image: Image.Image) -> Image.Image:
    small = image.resize((max(1, image.width // 12), max(1, image.height // 12)), Image.Resampling.BOX)
    return small.resize(image.size, Image.Resampling.NEAREST)


def sketch(image: Image.Image) -> Image.Image:
    """Pencil lines: grey over its own blur is white where the image is flat and dark along its edges."""
    grey = ImageOps.grayscale(image)
    # The offset keeps the noise in deep shadows, where both are near zero, from turning into lines.
    over = np.asarray(grey, dtype=np.float64) + 16
    under = np.asarray(grey.filter(ImageFilter.GaussianBlur(4)), dtype=np.float64) + 16
    lines = np.clip(over / under, 0, 1) ** 2 * 255
    return Image.fromarray(lines.round().astype(np.uint8)).convert("RGB")


PHOTOS = (
    Photo("astronaut", "astronaut.png", "the astronaut"),
    Photo("cat", "chelsea.png", "the cat"),
    Photo("coffee", "coffee.png", "the cup of coffee"),
    Photo("rocket_wide", "rocket.jpg", "the rocket", (0, 67, 640, 427)),
    Photo("camera", "camera.png", "the man with the camera", grey=True),
    Photo("motorcycle", "motorcycle_left.png", "the motorcycle"),
    Photo("astronaut_portrait", "astronaut.png", "the astronaut", (40, 0, 424, 512)),
    Photo("coins", "coins.png", "the old coins", grey=True),
    Photo("rocket", "rocket.jpg", "the rocket"),
    Photo("coffee_portrait", "coffee.png", "the cup of coffee", (140, 0, 460, 400)),
    Photo("galaxies", "hubble_deep_field.jpg", "the galaxies"),
    Photo("rocket_tall", "rocket.jpg", "the rocket", (198, 0, 438, 427)),
    Photo("moon", "moon.png", "the moon's surface", grey=True),
)

# fmt: off
EDITS = (
    Edit("black_and_white", ("Make the photo black and white.", "Remove all the colour from this picture of {}."),
         lambda im: ImageOps.grayscale(im).convert("RGB"), needs_colour=True),
    Edit("sepia", ("Give the photo a brown sepia tone.", "Make this picture of {} look like an old sepia photograph."),
         lambda im: ImageOps.colorize(ImageOps.grayscale(im), "#1e1206", "#fff0d0", mid="#96704a")),
    Edit("mirrored", ("Mirror the photo left to right.", "Flip this picture of {} horizontally."), ImageOps.mirror),
    Edit("upside_down", ("Turn the photo upside down.", "Rotate this picture of {} by 180 degrees."),
         lambda im: im.transpose(Image.Transpose.ROTATE_180)),
    Edit("quarter_turn", ("Rotate the photo 90 degrees clockwise.", "Turn this picture of {} a quarter to the right."),
         lambda im: im.transpose(Image.Transpose.ROTATE_270)),  # Pillow counts anticlockwise
    Edit("blurred", ("Blur the whole photo heavily.", "Make this picture of {} strongly out of focus."),
         lambda im: im.filter(ImageFilter.GaussianBlur(6))),
    Edit("brighter", ("Brighten the photo.", "Make this picture of {} much lighter."),
         lambda im: ImageEnhance.Brightness(im).enhance(1.6)),
    Edit("darker", ("Darken the photo.", "Turn down the brightness of this picture of {}."),
         lambda im: ImageEnhance.Brightness(im).enhance(0.45)),
    Edit("high_contrast", ("Make the contrast a lot stronger.", "Give this picture of {} much more contrast."),
         lambda im: ImageEnhance.Contrast(im).enhance(1.9)),
    Edit("cropped", ("Crop the photo to its centre.", "Cut the outer parts off this picture of {}."), crop_centre),
    Edit("warmer", ("Make the colours warmer.", "Give this picture of {} a warm, golden light."),
         lambda im: im.convert("RGB", WARM), needs_colour=True),
    Edit("cooler", ("Make the colours cooler.", "Give this picture of {} a cold, bluish light."),
         lambda im: im.convert("RGB", COOL), needs_colour=True),
    Edit("posterised", ("Posterise the photo.", "Reduce this picture of {} to a few flat tones, like a poster."),
         lambda im: im.point(lambda level: round(level / 85) * 85)),
    Edit("negative", ("Invert the photo.", "Show this picture of {} as a photographic negative."), ImageOps.invert),
    Edit("white_border", ("Put a white border around the photo.", "Frame this picture of {} in white."), add_border),
    Edit("pixelated", ("Pixelate the photo.", "Turn this picture of {} into big square pixels."), pixelate),
    Edit("sketch", ("Turn the photo into a pencil sketch.", "Draw this picture of {} as pencil outlines."), sketch),
)
# fmt: on


@dataclass(frozen=True)
class Row:
    photo: Photo
    edit: Edit
    instruction: str

    @property
    def files(self) -> tuple[Path, Path, Path]:
        """Where control, target and instruction lie, relative to the dataset."""
        stem = f"{self.photo.name}-{self.edit.name}"
        return Path(CONTROL, f"{stem}.png"), Path(TARGET, f"{stem}.png"), Path(TARGET, f"{stem}.txt")


def all_rows() -> list[Row]:
    """Every sensible photograph and edit, ordered so that any first N are spread evenly over both."""
    rows = []
    lap = math.lcm(len(PHOTOS), len(EDITS))
    for i in range(len(PHOTOS) * len(EDITS)):
        # Walking both tables at once meets each pair once per lap; the shift after a lap leads on to new pairs.
        p, e = i % len(PHOTOS), (i + i // lap) % len(EDITS)
        photo, edit = PHOTOS[p], EDITS[e]
        if not (edit.needs_colour and photo.grey):
            wording = edit.instructions[(p + e) % len(edit.instructions)]
            rows.append(Row(photo, edit, wording.format(photo.subject)))
    return rows


def load_photo(photo: Photo, data: Path) -> Image.Image:
    with Image.open(data / photo.file) as source:
        image = source.convert("RGB").crop(photo.box)
    image.thumbnail((LONG_SIDE, LONG_SIDE), Image.Resampling.LANCZOS)
    image.info.clear()  # some edits drop the file's metadata: without any, control and target decode alike
    return image


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def write_aside(path: Path, content: bytes) -> None:
    """Write under another name, then rename: whoever reads the folder never meets half a file."""
    part = path.with_name(path.name + PART)
    part.write_bytes(content)
    part.replace(path)


def earlier_files(out: Path, known: set[Path]) -> list[Path]:
    """The files under `out`, once it is certain that all of them are this tool's own."""
    found = []
    for folder in sorted(out.iterdir()) if out.exists() else []:
        plain = folder.name in (CONTROL, TARGET) and folder.is_dir() and not folder.is_symlink()
        for path in sorted(folder.iterdir()) if plain else [folder]:
            name = path.relative_to(out)
            # An interrupted run may have left a file aside.
            if name.with_name(name.name.removesuffix(PART)) not in known or path.is_symlink() or not path.is_file():
                fail(f"{out} holds {name}, which this tool did not write: name a new or an empty folder")
            found.append(path)
    return found


def write_dataset(out: Path, rows: list[Row], earlier: list[Path], data: Path) -> None:
    for folder in (CONTROL, TARGET):
        (out / folder).mkdir(parents=True, exist_ok=True)
    photos: dict[Photo, tuple[Image.Image, bytes]] = {}  # each control is encoded once and written many times
    for row in rows:
        if row.photo not in photos:
            image = load_photo(row.photo, data)
            photos[row.photo] = image, png(image)
        image, encoded = photos[row.photo]
        control, target, instruction = row.files
        write_aside(out / control, encoded)
        write_aside(out / instruction, f"{row.instruction}\n".encode())
        write_aside(out / target, png(row.edit.apply(image)))
    written = {out / file for row in rows for file in row.files}
    for file in earlier:
        if file not in written:
            file.unlink(missing_ok=True)  # a file left aside is gone where this run wrote the same one


def photo_folder() -> Path:
    try:
        import skimage
    except ImportError as error:
        fail(f'scikit-image, whose photographs this tool edits, is missing ({error}): pip install "qie[demo]"')
    return Path(skimage.__file__).parent / "data"


def fail(message: str) -> NoReturn:
    print(f"make_photo_edits: {message}", file=sys.stderr)
    raise SystemExit(2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write an image-editing dataset from scikit-image's photographs.")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write: new, empty, or from an earlier run")
    parser.add_argument(
        "--rows", metavar="N", type=int, default=DEFAULT_ROWS, help="number of rows to write (%(default)s)"
    )
    args = parser.parse_args()
    out: Path = args.out
    available = all_rows()
    if not 1 <= args.rows <= len(available):
        fail(f"--rows {args.rows}: there are {len(available)} rows, so N must lie between 1 and {len(available)}")
    data = photo_folder()
    rows = available[: args.rows]
    try:
        earlier = earlier_files(out, {file for row in available for file in row.files})
        write_dataset(out, rows, earlier, data)
    except OSError as error:
        fail(str(error))
    print(f"wrote {len(rows)} rows from {len({row.photo.file for row in rows})} photographs to {out}")


if __name__ == "__main__":
    main()
