#!/usr/bin/env python3
"""The diagram of the documentation's first page, docs/data.svg: what becomes of rows.

python tools/pictures.py data.svg
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

TITLE = "The way of the data"
ABOUT = (
    "Rows are encoded by qie-precompute and written as shards. qie-train reads batches from shards, or from rows that "
    "are encoded live, and writes checkpoints. qie-predict generates images with them. qie-stats reads the shards' "
    "indexes."
)
STYLE = """
    .page { fill: #ffffff; }
    .box { fill: #eef3f6; stroke: #4f6d7a; stroke-width: 1.5; }
    .store { fill: #fff7e6; stroke: #a9762a; stroke-width: 1.5; }
    .once { fill: none; stroke: #4f6d7a; stroke-width: 1; stroke-dasharray: 5 4; }
    .line { fill: none; stroke: #37474f; stroke-width: 1.8; }
    .thin { stroke-dasharray: 6 4; }
    .head { fill: #37474f; }
    text { fill: #1f2a30; font-size: 14px; }
    .name { font-weight: 600; font-size: 15px; }
    .small { font-size: 12.5px; fill: #44545c; }
    .mid { text-anchor: middle; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #1b2226; }
      .box { fill: #26333a; stroke: #8fb0be; }
      .store { fill: #3a301e; stroke: #d9a75a; }
      .once { stroke: #8fb0be; }
      .line { stroke: #c3d0d6; }
      .head { fill: #c3d0d6; }
      text { fill: #eef3f5; }
      .small { fill: #b9c7cd; }
    }
  """
ARROW = """
    <marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">
      <path class="head" d="M0 0 L10 5 L0 10 z"/>
    </marker>
  """
SIZE = 960, 470


@dataclass(frozen=True)
class Box:
    """A thing: `words` stand in its middle, each with how far below its upper edge, and its class of letters."""

    kind: str
    place: tuple[int, int, int, int]
    words: Sequence[tuple[int, str, str]]

    def svg(self) -> Iterator[str]:
        x, y, width, height = self.place
        yield f'<rect class="{self.kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>'
        for below, letters, words in self.words:
            yield text(x + width // 2, y + below, letters, words)


@dataclass(frozen=True)
class Arrow:
    path: str
    thin: bool = False

    def svg(self) -> Iterator[str]:
        yield f'<path class="line{" thin" if self.thin else ""}" d="{self.path}" marker-end="url(#arrow)"/>'


@dataclass(frozen=True)
class Note:
    at: tuple[int, int]
    words: str

    def svg(self) -> Iterator[str]:
        yield text(*self.at, "small", self.words)


def text(x: int, y: int, letters: str, words: str) -> str:
    return f'<text class="{f"{letters} mid".strip()}" x="{x}" y="{y}">{escape(words, quote=False)}</text>'


DRAWN = (
    Box(
        "store",
        (20, 100, 170, 132),
        (
            (26, "name", "rows"),
            (49, "small", "target, controls,"),
            (67, "small", "prompt, mask"),
            (90, "small", "folder, table,"),
            (108, "small", "Hugging Face, raw tars"),
        ),
    ),
    Box(
        "box",
        (250, 60, 210, 212),
        (
            (26, "name", "qie-precompute"),
            (46, "small", "once, on its own GPUs"),
            (194, "small", "only what has no record yet"),
        ),
    ),
    Box(
        "once",
        (262, 118, 186, 112),
        (
            (20, "small", "encoder, row by row"),
            (42, "", "decode, size, key"),
            (64, "", "VAE: latents"),
            (85, "", "Qwen-VL: text"),
            (104, "small", "rounded to 16 bits"),
        ),
    ),
    Box(
        "store",
        (520, 100, 170, 132),
        (
            (26, "name", "shards"),
            (49, "small", "00000000-00000064.tar"),
            (67, "small", "and its index, .json"),
            (90, "small", "in a folder or a bucket,"),
            (108, "small", "records by content key"),
        ),
    ),
    Box(
        "box",
        (750, 60, 190, 212),
        (
            (26, "name", "qie-train"),
            (46, "small", "every epoch"),
            (149, "", "transformer + LoRA,"),
            (168, "", "or all its weights"),
            (194, "small", "no encoder in memory"),
        ),
    ),
    Box("once", (768, 118, 154, 52), ((22, "", "stream"), (40, "small", "plan, batches, position"))),
    Arrow("M845 170 V190"),
    Arrow("M190 166 H248"),
    Arrow("M460 166 H518"),
    Arrow("M690 144 H766"),
    Arrow("M105 100 V30 H845 V58", thin=True),
    Note((480, 22), "cache.use_cache: false: the same encoder within qie-train, the same batches bit for bit"),
    Arrow("M605 232 V300 H355 V274", thin=True),
    Note((480, 318), "unchanged records are kept or copied: same key"),
    Box("box", (520, 370, 170, 70), ((28, "name", "qie-stats"), (50, "small", "reads the indexes"))),
    Arrow("M640 232 V368"),
    Box(
        "store",
        (750, 330, 190, 110),
        (
            (28, "name", "checkpoints"),
            (52, "small", "adapter or weights,"),
            (70, "small", "as diffusers reads them;"),
            (88, "small", "state to go on from"),
        ),
    ),
    Arrow("M845 272 V328"),
    Box("box", (250, 370, 210, 70), ((28, "name", "qie-predict"), (50, "small", "diffusers' own pipeline"))),
    Arrow("M845 440 V456 H355 V442"),
    Arrow("M250 405 H192"),
    Box("store", (20, 370, 170, 70), ((40, "name", "images"),)),
)


def data_diagram() -> str:
    width, height = SIZE
    drawn = "\n  ".join(line for thing in DRAWN for line in thing.svg())
    fonts = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-labelledby="title desc" font-family="{fonts}">\n'
        f'  <title id="title">{TITLE}</title>\n  <desc id="desc">{ABOUT}</desc>\n  <style>{STYLE}</style>\n'
        f'  <defs>{ARROW}</defs>\n  <rect class="page" width="{width}" height="{height}" rx="8"/>\n  {drawn}\n</svg>\n'
    )
