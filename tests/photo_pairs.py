"""Edits of real photographs with planted faults, and how many of them the pair check finds.

    python -m tests.photo_pairs [--pairs N] [--faults N] [--seeds N] [--first-seed N] [--area-px A]

Pairs are edits of the photographs in scikit-image's wheel: colour, light, style, blur, noise, a repainted place, an
object added, removed or moved, another background, lettering. Faults are planted in some of them: a shift of 2 to 3 %
of a side, a crop of 4 to 8 % that is enlarged again, other proportions, a target that is its control saved again, and a
caption that several edits share.
"""

from __future__ import annotations

import argparse
import io
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import click
import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageEnhance, ImageFilter, ImageOps

from qie.encode.alignment import compare_pair
from qie.encode.images import fit_size
from qie.shards.index import Entry, row_inputs
from qie.stats.pairs import Pairs, PairTally
from qie.stores import File
from qie.types import Row, Shape

PHOTOS = {
    "astronaut": "astronaut.png",
    "cameraman": "camera.png",
    "cat": "chelsea.png",
    "cup of coffee": "coffee.png",
    "rocket": "rocket.jpg",
    "motorcycle": "motorcycle_left.png",
    "coins": "coins.png",
    "galaxies": "hubble_deep_field.jpg",
    "moon": "moon.png",
    "bricks": "brick.png",
    "grass": "grass.png",
    "gravel": "gravel.png",
    "tissue": "ihc.png",
    "retina": "retina.jpg",
    "page": "page.png",
    "clock": "clock_motion.png",
}
RATIOS = (1.0, 1.0, 4 / 3, 3 / 4, 3 / 2, 2 / 3, 16 / 9)
LONG_SIDE_PX = 448
MARGIN = 0.1
"""Of a photograph's part, on each side: content that a planted shift brings into the picture."""

Random = np.random.Generator
Edit = Callable[[Image.Image, Random], Image.Image]


@dataclass(frozen=True)
class Pair:
    """One row of an image-editing dataset, and the fault that was planted in it; empty if none was."""

    name: str
    target: Image.Image
    control: Image.Image
    caption: str
    fault: str = ""


@cache
def photo(name: str) -> Image.Image:
    import skimage

    with Image.open(Path(skimage.__file__).parent / "data" / PHOTOS[name]) as image:
        return image.convert("RGB")


def scene(name: str, long_side_px: int, rng: Random) -> tuple[Image.Image, tuple[int, int, int, int]]:
    """A part of a photograph with a margin, and the box of the picture within it."""
    image, ratio = photo(name), RATIOS[rng.integers(len(RATIOS))]
    room = min(image.width / ratio, image.height) * rng.uniform(0.6, 1.0)
    width, height = room * ratio, room
    left, top = rng.uniform(0, image.width - width), rng.uniform(0, image.height - height)
    part = image.crop((round(left), round(top), round(left + width), round(top + height)))
    scale = long_side_px / max(width, height) * (1 + 2 * MARGIN)
    part = part.resize((round(width * scale), round(height * scale)), Image.Resampling.LANCZOS)
    if rng.random() < 0.5:
        part = ImageOps.mirror(part)
    inset = round(part.width * MARGIN / (1 + 2 * MARGIN)), round(part.height * MARGIN / (1 + 2 * MARGIN))
    return part, (*inset, part.width - inset[0], part.height - inset[1])


def blob(size: tuple[int, int], rng: Random, least: float, most: float) -> Image.Image:
    """A soft-edged mask of one round place."""
    width, height = size
    w, h = width * rng.uniform(least, most), height * rng.uniform(least, most)
    x, y = rng.uniform(0, width - w), rng.uniform(0, height - h)
    mask = Image.new("L", size)
    ImageDraw.Draw(mask).ellipse((x, y, x + w, y + h), fill=255)
    return mask.filter(ImageFilter.GaussianBlur(rng.uniform(1, 6)))


def other(size: tuple[int, int], rng: Random) -> Image.Image:
    """Part of another photograph."""
    names = list(PHOTOS)
    return ImageOps.fit(photo(names[rng.integers(len(names))]), size, Image.Resampling.BILINEAR)


def matrix(image: Image.Image, rng: Random) -> Image.Image:
    """Another mixture of the colours."""
    mixed = np.eye(3) + rng.normal(0, 0.25, (3, 3))
    whole = np.hstack([mixed / mixed.sum(1, keepdims=True), rng.normal(0, 15, (3, 1))])
    return image.convert("RGB", tuple(whole.ravel()))


def duotone(image: Image.Image, rng: Random) -> Image.Image:
    dark, light = rng.integers(0, 90, 3), rng.integers(160, 255, 3)
    return ImageOps.colorize(ImageOps.grayscale(image), tuple(map(int, dark)), tuple(map(int, light)))


def exposed(image: Image.Image, rng: Random) -> Image.Image:
    changed = ImageEnhance.Brightness(image).enhance(rng.choice([0.4, 0.6, 1.4, 1.7]))
    return ImageEnhance.Contrast(changed).enhance(rng.uniform(0.6, 1.8))


def relit(image: Image.Image, rng: Random) -> Image.Image:
    """Light from one side, coloured."""
    height, width = np.mgrid[-1 : 1 : image.height * 1j, -1 : 1 : image.width * 1j]
    angle = rng.uniform(0, 2 * np.pi)
    light = np.clip(0.75 + 0.65 * (np.cos(angle) * width + np.sin(angle) * height), 0.1, 1.7)
    values = np.asarray(image) * light[..., None] * rng.uniform(0.8, 1.15, 3)
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))


def night(image: Image.Image, rng: Random) -> Image.Image:
    dark = ImageEnhance.Brightness(matrix(image, rng)).enhance(0.35)
    glow = Image.composite(ImageEnhance.Brightness(image).enhance(1.3), dark, blob(image.size, rng, 0.1, 0.3))
    return Image.blend(dark, glow, 0.8)


def sketched(image: Image.Image, _: Random) -> Image.Image:
    grey = ImageOps.grayscale(image)
    over, under = (np.asarray(one, np.float64) + 16 for one in (grey, grey.filter(ImageFilter.GaussianBlur(4))))
    return Image.fromarray((np.clip(over / under, 0, 1) ** 2 * 255).astype(np.uint8)).convert("RGB")


def painted(image: Image.Image, rng: Random) -> Image.Image:
    return ImageEnhance.Color(image.filter(ImageFilter.ModeFilter(int(rng.choice([5, 7]))))).enhance(rng.uniform(1, 2))


def posterised(image: Image.Image, rng: Random) -> Image.Image:
    return ImageOps.posterize(image, int(rng.integers(1, 4)))


def negative(image: Image.Image, rng: Random) -> Image.Image:
    return ImageOps.invert(image) if rng.random() < 0.5 else ImageOps.solarize(image, int(rng.integers(90, 180)))


def blurred(image: Image.Image, rng: Random) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(rng.uniform(1, 5)))


def sharpened(image: Image.Image, rng: Random) -> Image.Image:
    return image.filter(ImageFilter.UnsharpMask(rng.uniform(2, 6), 200))


def noisy(image: Image.Image, rng: Random) -> Image.Image:
    values = np.asarray(image) + rng.normal(0, rng.uniform(10, 40), (image.height, image.width, 3))
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))


def snow(image: Image.Image, rng: Random) -> Image.Image:
    flakes = Image.fromarray((rng.random((image.height // 2, image.width // 2)) > 0.985).astype(np.uint8) * 255)
    mask = flakes.resize(image.size, Image.Resampling.BICUBIC).filter(ImageFilter.GaussianBlur(1))
    return Image.composite(Image.new("RGB", image.size, "white"), Image.blend(image, duotone(image, rng), 0.4), mask)


def pixelated(image: Image.Image, rng: Random) -> Image.Image:
    step = int(rng.integers(4, 11))
    small = image.resize((image.width // step, image.height // step), Image.Resampling.BOX)
    return small.resize(image.size, Image.Resampling.NEAREST)


def repainted(image: Image.Image, rng: Random) -> Image.Image:
    """A place in other colours."""
    return Image.composite(duotone(image, rng), image, blob(image.size, rng, 0.15, 0.6))


def added(image: Image.Image, rng: Random) -> Image.Image:
    return Image.composite(other(image.size, rng), image, blob(image.size, rng, 0.15, 0.5))


def removed(image: Image.Image, rng: Random) -> Image.Image:
    """A place covered by what stands beside it, as an eraser does it."""
    x, y = int(image.width * rng.uniform(0.1, 0.3)), int(image.height * rng.uniform(-0.2, 0.2))
    return Image.composite(ImageChops.offset(image, x, y), image, blob(image.size, rng, 0.15, 0.4))


def moved(image: Image.Image, rng: Random) -> Image.Image:
    """An object a little beside where it was."""
    x, y = (int(side * rng.choice([-1, 1]) * rng.uniform(0.02, 0.06)) for side in image.size)
    mask = blob(image.size, rng, 0.2, 0.5)
    return Image.composite(ImageChops.offset(image, x, y), image, ImageChops.offset(mask, x, y))


def another_background(image: Image.Image, rng: Random) -> Image.Image:
    """An object in the middle before another photograph."""
    mask = Image.new("L", image.size)
    w, h = image.width * rng.uniform(0.25, 0.4), image.height * rng.uniform(0.25, 0.42)
    x, y = image.width / 2, image.height / 2
    ImageDraw.Draw(mask).ellipse((x - w, y - h, x + w, y + h), fill=255)
    return Image.composite(image, other(image.size, rng), mask.filter(ImageFilter.GaussianBlur(3)))


def white_background(image: Image.Image, rng: Random) -> Image.Image:
    mask = blob(image.size, rng, 0.4, 0.8)
    return Image.composite(image, Image.new("RGB", image.size, "white"), mask)


def lettered(image: Image.Image, rng: Random) -> Image.Image:
    image, x, y = image.copy(), *(rng.uniform(0, side * 0.5) for side in image.size)
    draw = ImageDraw.Draw(image)
    draw.text((x, y), "SALE 50 %", fill=tuple(map(int, rng.integers(0, 255, 3))), font_size=image.width / 8)
    return image


EDITS: dict[str, Edit] = {
    "recolour the {}": matrix,
    "tint the {} in two tones": duotone,
    "change the exposure of the {}": exposed,
    "light the {} from the side": relit,
    "show the {} at night": night,
    "draw the {} in pencil": sketched,
    "paint the {} in oil": painted,
    "print the {} as a poster": posterised,
    "turn the {} into a negative": negative,
    "blur the {}": blurred,
    "sharpen the {}": sharpened,
    "add grain to the {}": noisy,
    "let snow fall on the {}": snow,
    "pixelate the {}": pixelated,
    "repaint a part of the {}": repainted,
    "add an object to the {}": added,
    "remove an object beside the {}": removed,
    "move an object in the {}": moved,
    "place the {} before another background": another_background,
    "cut out the {}": white_background,
    "write on the {}": lettered,
}
SECOND: tuple[Edit, ...] = (matrix, exposed, relit, repainted, added)


def resaved(image: Image.Image, rng: Random) -> Image.Image:
    """As it comes from a dataset: at another size maybe, and through a lossy file maybe."""
    if rng.random() < 0.5:
        scale = rng.uniform(0.75, 1.5)
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    if rng.random() < 0.7:
        content = io.BytesIO()
        image.save(content, "JPEG", quality=int(rng.integers(75, 96)))
        image = Image.open(content).convert("RGB")
    return image


def shifted(whole: Image.Image, box: Sequence[int], rng: Random) -> Image.Image:
    """The picture moved by 2 to 3 % of one side, sometimes of both."""
    amounts = rng.choice([-1, 1], 2) * rng.uniform(0.02, 0.03, 2)
    amounts[rng.integers(2)] *= rng.random() < 0.5
    x, y = round(amounts[0] * (box[2] - box[0])), round(amounts[1] * (box[3] - box[1]))
    return whole.crop((box[0] + x, box[1] + y, box[2] + x, box[3] + y))


def cropped(whole: Image.Image, box: Sequence[int], rng: Random) -> Image.Image:
    """The picture without 4 to 8 % of each side, enlarged again."""
    width, height = box[2] - box[0], box[3] - box[1]
    part = rng.uniform(0.04, 0.08)
    left, top = box[0] + width * part * rng.random(), box[1] + height * part * rng.random()
    within = (left, top, left + width * (1 - part), top + height * (1 - part))
    return whole.resize((width, height), Image.Resampling.LANCZOS, box=within)


def of_other_proportions(whole: Image.Image, box: Sequence[int], rng: Random) -> Image.Image:
    width, height = box[2] - box[0], box[3] - box[1]
    factor = rng.choice([0.75, 0.85, 0.9])
    if rng.random() < 0.5:
        return whole.crop((box[0], box[1], box[2], box[3])).resize(
            (round(width * factor), height), Image.Resampling.LANCZOS
        )
    return whole.crop((box[0], box[1], box[2], box[1] + round(height * factor)))


PLANTED = ("shifted", "cropped", "proportions", "identical", "caption")


def make_pair(number: int, fault: str, rng: Random, long_side_px: int = LONG_SIDE_PX) -> Pair:
    """One edit of one photograph, with a fault if one is named."""
    names, edits = list(PHOTOS), list(EDITS)
    name, wording = names[number % len(names)], edits[rng.integers(len(edits))]
    whole, box = scene(name, long_side_px, rng)
    control = resaved(whole.crop(box), rng)
    edited = EDITS[wording](whole, rng)
    if rng.random() < 0.3:
        edited = SECOND[rng.integers(len(SECOND))](edited, rng)
    caption = f"{wording.format(name)}, number {number}"
    if fault == "identical":
        return Pair(f"{number}", resaved(whole.crop(box), rng), control, caption, fault)
    target = {"shifted": shifted, "cropped": cropped, "proportions": of_other_proportions}.get(
        fault, lambda whole, box, rng: whole.crop(box)
    )(edited, box, rng)
    return Pair(f"{number}", resaved(target, rng), control, caption, fault)


def make_pairs(count: int, faults: int, seed: int, long_side_px: int = LONG_SIDE_PX) -> list[Pair]:
    """`count` pairs, `faults` of them with a fault, of all kinds in turn."""
    rng = np.random.default_rng(seed)
    places = rng.choice(count, faults, replace=False)
    planted = {int(place): PLANTED[number % len(PLANTED)] for number, place in enumerate(places)}
    draws = [np.random.default_rng([seed, number]) for number in range(count)]
    pairs = [make_pair(number, planted.get(number, ""), rng, long_side_px) for number, rng in enumerate(draws)]
    shared = next((pair.caption for pair in pairs if pair.fault == "caption"), "")
    return [replace(pair, caption=shared) if pair.fault == "caption" else pair for pair in pairs]


KINDS_OF = {
    "shifted": ("shifted", "scaled"),
    "cropped": ("scaled", "shifted"),
    "proportions": ("proportions",),
    "identical": ("identical",),
    "caption": ("repeated_caption",),
}
"""The warnings that tell a planted fault: to crop at one corner is to shift, too."""


def entry_of(pair: Pair, number: int, area_px: int) -> Entry:
    """What an index would say of a pair that is encoded at an area."""
    target, control = (
        image.resize(fit_size(*image.size, area_px, 32), Image.Resampling.LANCZOS)
        for image in (pair.target, pair.control)
    )
    wider = pair.target.width / pair.target.height / (pair.control.width / pair.control.height)
    row = Row(number, pair.name, pair.target.tobytes(), (pair.control.tobytes(),), pair.caption)
    shape = Shape((target.height // 8, target.width // 8), ((control.height // 8, control.width // 8),))
    return Entry(
        row=number,
        name=pair.name,
        key=f"{number:064x}",
        shape=shape,
        tokens=1,
        empty_tokens=1,
        tensor_bytes={},
        clipped=0,
        notes=(),
        inputs=row_inputs(row),
        pair=compare_pair(target, [control], [wider]),
    )


def tallied(entries: Sequence[Entry]) -> Pairs:
    tally = PairTally()
    tally.add(File.at("shards/00000000-00000001.json"), entries)
    return tally.pairs()


def main() -> None:
    """Print what is found and what is not, by kind; captions apart, which are no matter of pictures."""
    parser = argparse.ArgumentParser(description="Measure the pair check on edits of photographs with planted faults.")
    parser.add_argument("--pairs", type=int, default=400, help="of each seed (%(default)s)")
    parser.add_argument("--faults", type=int, default=100, help="of each seed (%(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="%(default)s")
    parser.add_argument("--first-seed", type=int, default=0, help="%(default)s")
    parser.add_argument("--area-px", type=int, default=512**2, help="at which pairs would be encoded (%(default)s)")
    options = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for number, pair in enumerate(make_pairs(options.pairs, options.faults, seed)):
            worst = tallied([entry_of(pair, number, options.area_px)]).worst
            fault = pair.fault if pair.fault != "caption" else ""
            counts[fault, worst[0].kind if worst else ""] += 1
            if bool(worst) != bool(fault):
                what = f"{fault or 'no fault'}, found {worst[0].kind if worst else 'none'}"
                click.echo(f"seed {seed}: {what}: {pair.caption}")
    found = sum(count for (fault, kind), count in counts.items() if fault and kind in KINDS_OF[fault])
    planted, told = (sum(count for names, count in counts.items() if names[which]) for which in (0, 1))
    for (fault, kind), count in sorted(counts.items()):
        click.echo(f"{count:6}  planted: {fault or 'nothing':12} found: {kind or 'nothing'}")
    click.echo(f"recall {found / planted:.1%} of {planted}, precision {found / told:.1%} of {told}")


if __name__ == "__main__":
    main()
