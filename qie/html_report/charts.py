"""Drawings as inline SVG: histograms, whiskers, and the strip of rows that shards cover.

Colours come from the page's stylesheet by class, so that they fit light, dark and paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from qie.html_report.markup import Html, join, tag
from qie.shards.grid import Range, count_within, merged_ranges

if TYPE_CHECKING:
    from qie.stats import Coverage

CELLS = 400
WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 18, 10, 44
MOST_NUMBERS = 16
"""So many have room beside each other under a drawing."""

Bin = tuple[float, float, int]
"""From, below, count."""


@dataclass(frozen=True)
class _Plot:
    """Numbers to places: x from `left` to `right` and y from `bottom` to `top` fill the drawing within its margins."""

    left: float
    right: float
    bottom: float
    top: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.left) / (self.right - self.left) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return TOP + (self.top - value) / (self.top - self.bottom) * (HEIGHT - TOP - BOTTOM)

    def across(self, value: float, kind: str) -> Html:
        return tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=self.y(value), y2=self.y(value), class_=kind)


def histogram(
    bins: Sequence[Bin], label: str, x_name: str, y_name: str, *, curve: Sequence[float] = (), whole: bool = False
) -> Html:
    """Bars over an axis of numbers.

    Args:
        bins: in order, without gaps.
        label: what the drawing shows, for those who do not see it.
        x_name, y_name: of the axes.
        curve: for each bin a count to compare with, as a dashed line.
        whole: the numbers are whole; each has a place as wide as its own bin.
    """
    ticks = round_ticks(0, max([count for _, _, count in bins] + [1]))
    plot = _Plot(bins[0][0], bins[-1][1], 0, ticks[-1])
    parts = [*_grid(plot, ticks), *_x_ticks(plot, 0.5 if whole else 0.0)]
    for start, stop, count in bins:
        x, width = plot.x(start), plot.x(stop) - plot.x(start)
        last = stop - 1 if whole else stop
        name = f"{start:,}" if start == last else f"{plain_number(start)} to {plain_number(last)}"
        words = tag("title", f"{name}: {count:,} {y_name}")
        bar = {"x": x + 0.5, "y": plot.y(count), "width": max(width - 1, 0.5), "height": plot.y(0) - plot.y(count)}
        parts.append(tag("rect", words, class_="bar", **bar))
    if curve:
        places = zip(bins, curve, strict=True)
        points = [f"{plot.x((bin_[0] + bin_[1]) / 2):.1f},{plot.y(min(count, plot.top)):.1f}" for bin_, count in places]
        parts.append(tag("polyline", points=" ".join(points), class_="curve"))
    return _drawing(label, parts, x_name, y_name)


def whiskers(means: Sequence[float], deviations: Sequence[float], label: str, x_name: str, y_name: str) -> Html:
    """For each number from 0, a mean and the deviation on both sides of it; dashed lines at 1 and -1 to compare."""
    pairs = list(zip(means, deviations, strict=True))
    ticks = round_ticks(-max(1.0, *(d - m for m, d in pairs)), max(1.0, *(m + d for m, d in pairs)))
    plot = _Plot(-0.5, len(means) - 0.5, ticks[0], ticks[-1])
    parts = [*_grid(plot, ticks), plot.across(1, "curve"), plot.across(-1, "curve"), plot.across(0, "axis")]
    radius = min(3.5, (plot.x(1) - plot.x(0)) / 2)
    numbered = range(0, len(pairs), -(-len(pairs) // MOST_NUMBERS))
    for number, (mean, deviation) in enumerate(pairs):
        x = plot.x(number)
        words = tag("title", f"channel {number}: mean {mean:.3f}, deviation {deviation:.3f}")
        line = tag("line", x1=x, x2=x, y1=plot.y(mean + deviation), y2=plot.y(mean - deviation), class_="whisker")
        dot = tag("circle", cx=x, cy=plot.y(mean), r=radius, class_="dot")
        parts.append(tag("g", words, line, dot))
        parts += [_number(str(number), x, HEIGHT - BOTTOM + 15)] if number in numbered else []
    return _drawing(label, parts, x_name, y_name)


def _drawing(label: str, parts: Sequence[Html], x_name: str, y_name: str) -> Html:
    x, y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    under = tag("text", x_name, x=x, y=HEIGHT - 8, text_anchor="middle", class_="name")
    beside = tag("text", y_name, transform=f"translate(11 {y:.0f}) rotate(-90)", text_anchor="middle", class_="name")
    view = f"0 0 {WIDTH} {HEIGHT}"
    return tag("svg", *parts, under, beside, viewBox=view, role="img", aria_label=label, class_="chart")


def _grid(plot: _Plot, ticks: Sequence[float]) -> list[Html]:
    numbers = [_number(plain_number(value), LEFT - 6, plot.y(value) + 4, "end") for value in ticks]
    return [*(plot.across(value, "grid") for value in ticks), *numbers]


def _x_ticks(plot: _Plot, shift: float) -> list[Html]:
    values = [value for value in round_ticks(plot.left, plot.right) if plot.left <= value + shift <= plot.right]
    return [_number(plain_number(value), plot.x(value + shift), HEIGHT - BOTTOM + 15) for value in values]


def _number(text: str, x: float, y: float, anchor: str = "middle") -> Html:
    return tag("text", text, x=x, y=y, text_anchor=anchor)


def round_ticks(low: float, high: float) -> list[float]:
    """About five round numbers that reach from `low` or below it to `high` or above it."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= rough * 0.999)
    if low == math.floor(low) and high == math.floor(high):  # between whole numbers there are none
        step = max(step, 1.0)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]


def plain_number(value: float) -> str:
    """1200000 -> '1.2M', 0.25 -> '0.25'."""
    sizes = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"), (0.0, 1.0, ""))
    by, letter = next((by, letter) for least, by, letter in sizes if abs(value) >= least)
    return f"{value / by:.4g}{letter}".replace("-", "−")


def coverage_strip(part: Coverage) -> Html:
    """A drawing of the rows from 0 to the last one known, and the same in words."""
    stop = max(end for _, end in [*part.ranges, *part.faulty])
    cells = min(stop, CELLS)
    edges = [(number * stop // cells, (number + 1) * stop // cells) for number in range(cells)]
    covered, faulty, skipped = (_overlaps(edges, ranges) for ranges in (part.ranges, part.faulty, part.skipped))
    states = [
        "faulty" if broken else "covered" if there == end - start else "missing"
        for (start, end), there, broken in zip(edges, covered, faulty, strict=True)
    ]
    # Faults stand out by their height, too, for those who do not tell the colours apart.
    parts = [_run(kind, at, n, *((0, 22) if kind == "faulty" else (4, 18))) for kind, at, n in _runs(states)]
    parts += [_run("skipped", at, n, 24, 8) for kind, at, n in _runs(list(map(bool, skipped))) if kind]
    return join(
        tag("h3", tag("bdi", part.folder), class_="place"),
        tag(
            "svg",
            *parts,
            class_="strip",
            viewBox=f"0 0 {cells} 32",
            preserveAspectRatio="none",
            role="img",
            aria_label=f"rows 0 to {stop:,}: {_words(part, stop)}",
        ),
        tag("p", tag("span", "0"), tag("span", _words(part, stop)), tag("span", f"{stop:,}"), class_="scale"),
    )


def legend() -> Html:
    """The meaning of the strips' colours."""
    kinds = {
        "covered": "covered",
        "missing": "missing, or in part",
        "faulty": "in a shard with a fault",
        "skipped": "has skipped rows (below the bar)",
    }
    return tag(
        "ul",
        *(
            tag("li", tag("svg", _run(kind, 0, 12, 0, 12), viewBox="0 0 12 12", aria_hidden="true"), text)
            for kind, text in kinds.items()
        ),
        class_="legend",
    )


def _words(part: Coverage, stop: int) -> str:
    sizes = {
        "covered": count_within(part.ranges),
        "in shards with faults": count_within(part.faulty),
        "skipped": count_within(part.skipped),
    }
    sizes["missing"] = stop - count_within(merged_ranges([*part.ranges, *part.faulty]))
    return ", ".join(f"{count:,} {name}" for name, count in sizes.items() if count) or "none"


def _overlaps(edges: Sequence[Range], ranges: Sequence[Range]) -> list[int]:
    """How many rows of each cell lie in ranges that are in order."""
    found, at = [], 0
    for start, stop in edges:
        while at < len(ranges) and ranges[at][1] <= start:
            at += 1
        number, count = at, 0
        while number < len(ranges) and ranges[number][0] < stop:
            count += min(stop, ranges[number][1]) - max(start, ranges[number][0])
            number += 1
        found.append(count)
    return found


def _runs(states: Sequence[object]) -> list[tuple[object, int, int]]:
    """Equal neighbours together: state, first cell, how many."""
    runs, at = [], 0
    for state, group in groupby(states):
        length = len(list(group))
        runs.append((state, at, length))
        at += length
    return runs


def _run(kind: object, at: int, length: int, y: int, height: int) -> Html:
    return tag("rect", x=at, y=y, width=length, height=height, class_=f"cell {kind}")
