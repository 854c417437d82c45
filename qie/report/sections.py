"""The parts of the page that follow from the summary, each a function of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from qie.quantities import human_bytes
from qie.report.markup import Html, cut, join, tag
from qie.report.strip import coverage_strip, legend
from qie.report.tables import counted, foreign, long_list, note, panel, table
from qie.stats import Summary

MOST_FAULTS = 100
MOST_SKIPPED = 200
MOST_FOLDERS = 12
MOST_NAMES = 20
MOST_RECIPES = 4
MOST_PLACES = 3
MOST_PATH = 120

PARTS = {
    "coverage": "Rows covered",
    "distributions": "Distributions",
    "samples": "Samples",
    "skipped": "Skipped rows",
    "recipe": "Recipe",
}
"""The page's parts and their headings; faults stand before them, if there are any."""

_HASH_SHOWN = 16


def header(summary: Summary, places: Sequence[str], *, verified: bool, looked_at: int) -> Html:
    """What it is about, whether all is well, and the counts."""
    title = ", ".join(cut(place, MOST_PATH) for place in places[:MOST_PLACES])
    if len(places) > MOST_PLACES:
        title += f" and {len(places) - MOST_PLACES:,} more"
    return tag(
        "header",
        tag("p", "What these shards hold", class_="soft"),
        tag("h1", tag("bdi", title)),
        _verdict(summary, verified, looked_at),
        _tiles(summary),
        tag("nav", tag("ul", *(tag("li", tag("a", text, href=f"#{name}")) for name, text in PARTS.items()))),
    )


def faults(summary: Summary) -> Html:
    """What is wrong; nothing if nothing is."""
    if not summary.faults:
        return join()
    lines = [tag("li", foreign(fault, 1000)) for fault in summary.faults[:MOST_FAULTS]]
    left = len(summary.faults) - len(lines)
    body = [
        long_list("Faults", tag("ol", *lines)),
        note(f"and {left:,} more faults: qie-stats prints them all") if left else "",
    ]
    return section("faults", panel(*body, class_="panel faults"))


def coverage(summary: Summary) -> Html:
    """Which rows are there, folder by folder."""
    shown = summary.coverage[:MOST_FOLDERS]
    parts = [coverage_strip(part) for part in shown]
    if len(summary.coverage) > len(shown):
        parts.append(note(f"and {len(summary.coverage) - len(shown):,} more folders"))
    return section("coverage", panel(*parts, legend()))


def sizes(summary: Summary) -> Html:
    """How large targets and controls are, and what each tensor takes."""
    shapes = counted(summary.shapes, "target from controls", "samples", MOST_NAMES)
    totals = {name: f"{human_bytes(size)}" for name, size in summary.tensor_bytes.items()}
    tensors = counted(summary.tensor_bytes, "tensor", "a sample", MOST_NAMES, totals)
    parts = [panel(tag("h3", "Sizes"), shapes), panel(tag("h3", "Bytes in a sample"), tensors)]
    if len(summary.sources) > 1:
        parts.append(panel(tag("h3", "Sources"), counted(summary.sources, "source", "samples", MOST_NAMES)))
    if summary.notes:
        parts.append(panel(tag("h3", "Notes of the encoder"), counted(summary.notes, "note", "samples", MOST_NAMES)))
    return tag("div", *parts, class_="pair")


def skipped(summary: Summary) -> Html:
    """Rows that are in no shard, and why."""
    if not summary.skipped_rows:
        return section("skipped", note("No row was skipped."))
    rows = [
        (str(row), foreign(name), foreign(reason), foreign(shard, MOST_PATH))
        for shard, row, name, reason in summary.skipped_rows[:MOST_SKIPPED]
    ]
    left = len(summary.skipped_rows) - len(rows)
    return section(
        "skipped",
        panel(tag("h3", "By reason"), counted(summary.skipped, "reason", "rows", MOST_NAMES)),
        panel(
            long_list("Skipped rows", table(("row", "name", "reason", "shard"), rows, sort=True)),
            note(f"and {left:,} more skipped rows: qie-stats --json lists them all") if left else "",
        ),
    )


def recipes(summary: Summary) -> Html:
    """How the samples were made."""
    shown = list(summary.recipe_fields.items())[:MOST_RECIPES]
    parts = [
        panel(tag("h3", f"{digest}, in {_count(summary.recipes[digest], 'shard')}", class_="code"), _fields(fields))
        for digest, fields in shown
    ]
    if len(summary.recipe_fields) > len(shown):
        parts.append(note(f"and {len(summary.recipe_fields) - len(shown):,} more recipes"))
    return section("recipe", *parts) if parts else join()


def section(name: str, *children: str) -> Html:
    """A part of the page under its heading, which the page links to."""
    return tag("section", tag("h2", PARTS.get(name, name.capitalize())), *children, id=name)


def _verdict(summary: Summary, verified: bool, looked_at: int) -> Html:
    if summary.faults:
        words = tag("strong", _count(len(summary.faults), "fault"))
        return tag("p", words, " ", tag("a", "See below.", href="#faults"), class_="verdict bad")
    how = (
        "Every shard was rehashed."
        if verified
        else (f"Indexes were read, and {_count(looked_at, 'record')} checked; --verify rehashes every shard.")
    )
    return tag("p", tag("strong", "No fault found."), " ", tag("span", how), class_="verdict good")


def _tiles(summary: Summary) -> Html:
    tokens = summary.tokens
    tiles = {
        "samples": (f"{summary.samples:,}", f"{summary.duplicates:,} repeat others" if summary.duplicates else ""),
        "rows": (
            f"{summary.rows:,}",
            f"{len(summary.skipped_rows):,} skipped" if summary.skipped_rows else "none skipped",
        ),
        "shards": (f"{summary.shards:,}", human_bytes(summary.bytes)),
        "a sample": (human_bytes(summary.bytes_per_sample), _count(len(summary.shapes), "shape")),
        "prompt tokens": (f"{tokens['median']:,}", f"{tokens['min']:,} to {tokens['max']:,}") if tokens else ("–", ""),
        "clipped": (f"{summary.clipped:,}", f"values, in {_count(summary.clipped_samples, 'sample')}"),
    }
    pairs = [
        tag("div", tag("dt", name), tag("dd", large, tag("small", small))) for name, (large, small) in tiles.items()
    ]
    return tag("dl", *pairs, class_="tiles")


def _fields(fields: Mapping[str, object]) -> Html:
    rows = [(name, tag("span", foreign(_plain(value)), class_="code")) for name, value in fields.items()]
    return table(("field", "value"), rows)


def _plain(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{text[:_HASH_SHOWN]}…" if len(text) == 64 else text


def _count(count: int, unit: str) -> str:
    return f"{count:,} {unit}{'' if count == 1 else 's'}"
