"""Write the photographs of `make demo`: pairs that teach one edit, and photographs that training never sees.

    python tools/make_demo_photos.py OUT

    OUT/photos/       48 rows to train on: squares of eight photographs, and each as an old print
    OUT/held_out/     a row of each of eight other photographs
    OUT/before.jsonl  a --batch for qie-predict, which fills OUT/before with them; after.jsonl: OUT/after

The photographs come with scikit-image and matplotlib: pip install "qie[demo]". Nothing is random. Files of an earlier
run are overwritten.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from make_photo_edits import photo_folder, png
from PIL import Image, ImageOps

PROMPT = "Turn the photo into an old brown print with a white border."
SIDE_PX = 256
BORDER = 0.08
SQUARES = 6  # of each photograph to train on

TRAINED = (
    "motorcycle_left.png",
    "retina.jpg",
    "ihc.png",
    "hubble_deep_field.jpg",
    "brick.png",
    "grass.png",
    "gravel.png",
    "page.png",
)
HELD_OUT = {
    "astronaut": "astronaut.png",
    "cat": "chelsea.png",
    "coffee": "coffee.png",
    "rocket": "rocket.jpg",
    "admiral": "grace_hopper.jpg",
    "camera": "camera.png",
    "coins": "coins.png",
    "moon": "moon.png",
}


def old_print(image: Image.Image) -> Image.Image:
    """Brown tones and a white border over the edges: the content stays where it was."""
    width = round(min(image.size) * BORDER)
    brown = ImageOps.colorize(ImageOps.grayscale(image), "#1e1206", "#fff0d0", mid="#96704a")
    return ImageOps.expand(ImageOps.crop(brown, width), width, "#fffbf0")


def iter_squares(image: Image.Image, squares: int = SQUARES, side_px: int = SIDE_PX) -> Iterator[Image.Image]:
    """So many squares from one end of the longer side to the other, large and small ones in turn, no two alike."""
    for number in range(squares):
        side = round(min(image.size) * (1.0, 0.8, 0.6)[number % 3])
        left, top = ((whole - side) * number // (squares - 1) for whole in image.size)
        square = image.resize((side_px, side_px), Image.Resampling.LANCZOS, (left, top, left + side, top + side))
        yield ImageOps.mirror(square) if number % 2 else square


def write_row(folder: Path, stem: str, image: Image.Image) -> None:
    for part, content in (("control_images", image), ("training_images", old_print(image))):
        (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / part / f"{stem}.png").write_bytes(png(content))
    (folder / "training_images" / f"{stem}.txt").write_text(f"{PROMPT}\n", encoding="utf-8")


def photograph(name: str) -> Image.Image:
    import matplotlib

    folder = photo_folder()
    if not (folder / name).exists():
        folder = Path(matplotlib.get_data_path(), "sample_data")
    with Image.open(folder / name) as source:
        image = source.convert("RGB")
    image.info.clear()
    return image


def write_demo(out: Path) -> None:
    """Everything, into a folder."""
    for name in TRAINED:
        for number, square in enumerate(iter_squares(photograph(name))):
            write_row(out / "photos", f"{number}-{Path(name).stem}", square)
    for stem, name in HELD_OUT.items():
        write_row(out / "held_out", stem, ImageOps.fit(photograph(name), (SIDE_PX, SIDE_PX), Image.Resampling.LANCZOS))
    for when in ("before", "after"):
        (out / when).mkdir(exist_ok=True)
        asked = [
            {"image": f"held_out/control_images/{stem}.png", "prompt": PROMPT, "output": f"{when}/{stem}.png"}
            for stem in HELD_OUT
        ]
        lines = "".join(f"{json.dumps(line)}\n" for line in asked)
        (out / f"{when}.jsonl").write_text(lines, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the photographs of make demo.")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write into")
    out: Path = parser.parse_args().out
    try:
        write_demo(out)
    except OSError as error:
        print(f"make_demo_photos: {error}", file=sys.stderr)
        return 2
    print(f"wrote {len(TRAINED) * SQUARES} rows of {len(TRAINED)} photographs, and {len(HELD_OUT)} others, to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
