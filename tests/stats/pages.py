"""What tests of the page share: a page taken apart, and shards with pictures that are known."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import torch
from click.testing import CliRunner, Result
from PIL import Image

from qie.cli import stats
from qie.recipe import Recipe
from tests.builders import make_recipe, make_sample, write_shard

SMALL = make_recipe(thumbnail_px=48)
SCRIPT = "<script>alert(1)</script>"
COLOURS = [(200, 30, 30), (30, 160, 40), (40, 60, 210), (220, 190, 20), (150, 40, 170), (20, 170, 180)]


def write_colours(folder: Path, prompts: Sequence[str | None], *, start: int = 0, recipe: Recipe = SMALL) -> None:
    """A shard whose thumbnails have one of `COLOURS` each; None is a row that is skipped."""
    samples = [
        None
        if prompt is None
        else replace(
            make_sample(start + number, target=(6, 8), controls=((6, 8),), prompt=prompt, recipe=recipe),
            thumbnail=torch.tensor(COLOURS[number % len(COLOURS)], dtype=torch.uint8).expand(36, 48, 3).contiguous(),
        )
        for number, prompt in enumerate(prompts)
    ]
    write_shard(folder, samples, start=start, recipe=recipe)


def run(*arguments: object, code: int = 0) -> Result:
    """qie-stats; its exit code is checked."""
    result = CliRunner().invoke(stats.main, [*map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def page_of(*arguments: object, page: Path, code: int = 0) -> Page:
    """The page that qie-stats writes."""
    run(*arguments, "--html", page, code=code)
    return Page(page.read_text("utf-8"))


class Page(HTMLParser):
    """A page as a browser would take it apart.

    Attributes:
        source: as it was written.
        tags: of all elements, with their attributes.
        inside: text of script and style elements, by tag.
        text: all other text.
    """

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self._texts: list[str] = []
        self.feed(source)
        self.close()
        self.text = re.sub(r"[ \n]+", " ", " ".join(self._texts))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attributes}))

    def handle_data(self, data: str) -> None:
        self.inside.get(self.tags[-1][0] if self.tags else "", self._texts).append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.inside:
            self.tags.append(("", {}))  # what follows is text again

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def pictures(self) -> list[np.ndarray]:
        """Pixels of each picture in it."""
        contents = [image["src"].removeprefix("data:image/jpeg;base64,") for image in self.all("img")]
        return [np.asarray(Image.open(io.BytesIO(base64.b64decode(content)))) for content in contents]
