"""The README's chart, drawn from the stored rows: memory of a training GPU with and without the encoders on it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

from measuring import Row

CARDS_GB = (24, 32, 48, 80)
BASES = {"None": "bf16", "fp8": "fp8", "nf4": "nf4"}
LEFT, TOP, GB_PX, BAR, GAP = 150, 56, 8.5, 22, 34
STYLE = """
    .page { fill: #ffffff; }
    .shards { fill: #2f7f6f; }
    .live { fill: #c9a25f; }
    .card { stroke: #8a949b; stroke-width: 1; stroke-dasharray: 4 4; }
    text { fill: #1f2a30; font-size: 14px; }
    .name { font-weight: 600; }
    .soft { fill: #5b676e; font-size: 12.5px; }
    .mid { text-anchor: middle; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #1b2226; }
      .shards { fill: #58b5a2; }
      .live { fill: #b98f48; }
      text { fill: #eef3f5; }
      .soft { fill: #b4c0c6; }
    }
  """


def memory_chart(rows: Iterable[Row]) -> str:
    """An SVG of the estimates of benchmarks/claims.py, a group of two bars for each way to store the base."""
    found = {row.key: row for row in rows}
    parts, y = list[str](), TOP + 18
    for key, name in BASES.items():
        shards, live = _gigabytes(found[f"computed memory plain {key}"].detail)
        parts.append(f'<text class="name" x="20" y="{y + BAR + 4}">{name} base</text>')
        for gigabytes, kind, words in ((shards, "shards", "from shards"), (live, "live", "with the encoders on it")):
            width = gigabytes * GB_PX
            parts.append(f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{width:g}" height="{BAR - 3}" rx="2"/>')
            parts.append(f'<text x="{LEFT + width + 6:g}" y="{y + BAR - 8}">{gigabytes} GB {words}</text>')
            y += BAR
        y += GAP - BAR
    height = y + 34
    lines = [
        f'<line class="card" x1="{LEFT + card * GB_PX:g}" x2="{LEFT + card * GB_PX:g}" y1="{TOP}" y2="{y}"/>'
        f'<text class="soft mid" x="{LEFT + card * GB_PX:g}" y="{TOP - 6}">{card} GB</text>'
        for card in CARDS_GB
    ]
    title = "Memory of the training GPU"
    about = "LoRA of Qwen-Image-Edit, 1024², batch 1, recomputed activations; estimated, not measured"
    description = escape(f"{title}: {about}. " + "; ".join(re.findall(r">(\d+ GB [a-z ]+)<", "".join(parts))))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {height}" role="img" aria-labelledby="title desc"'
        " font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\">\n"
        f'  <title id="title">{title}</title>\n  <desc id="desc">{description}</desc>\n  <style>{STYLE}</style>\n'
        f'  <rect class="page" width="900" height="{height}"/>\n'
        f'  <text class="name" x="20" y="24">{title}</text>\n  <text class="soft" x="262" y="24">{about}</text>\n  '
        + "\n  ".join([*lines, *parts])
        + "\n</svg>\n"
    )


def _gigabytes(detail: str) -> tuple[int, int]:
    """('48 GB, peer 65 GB') -> (48, 65)."""
    ours, theirs = re.findall(r"(\d+) GB", detail)
    return int(ours), int(theirs)
