"""Pictures beside each other, for benchmarks whose findings are to be looked at."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageDraw

LINE = 16
"""Pixels of a line of words."""


def sheet(
    titles: Sequence[str],
    rows: Sequence[Sequence[tuple[Image.Image, str]]],
    side: int = 128,
    resampling: Image.Resampling = Image.Resampling.LANCZOS,
) -> Image.Image:
    """Rows of pictures, `side` pixels each, with words under each picture and a title over each column."""
    page = Image.new("RGB", (len(titles) * side, len(rows) * (side + LINE) + LINE), "white")
    pen = ImageDraw.Draw(page)
    for column, title in enumerate(titles):
        pen.text((column * side + 4, 2), title, "black")
    for number, row in enumerate(rows):
        top = LINE + number * (side + LINE)
        for column, (image, words) in enumerate(row):
            page.paste(image.convert("RGB").resize((side, side), resampling), (column * side, top))
            pen.text((column * side + 4, top + side + 2), words, "black")
    return page
