"""Curves over steps as inline SVG: what a run's numbers did, whole, however long the run is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from qie.html_report.charts import plain_number, round_ticks
from qie.html_report.markup import Html, join, tag

NARROW, WIDE, HEIGHT = 360, 520, 220
"""Of a drawing, in units that are about a pixel."""
LEFT, RIGHT, TOP, BOTTOM = 62, 22, 12, 40
LEAST = 1e-8
"""Differences below it are not drawn: `round_ticks` writes so many digits."""
POINTS = 240
"""Of a curve: so many have room beside each other."""
KINDS = 6
"""So many curves have colours of their own; see `live.css`."""


@dataclass(frozen=True)
class Curve:
    """Numbers by step, for at most `POINTS` places.

    Attributes:
        name: in the legend; "" for none.
        steps: in order. values: as many, None where there is none.
        low, high: of the steps that a place stands for, a band behind the curve; empty for none.
        kind: the number of its colour. dots: a dot for each value. faint: behind another curve.
    """

    name: str
    steps: Sequence[float]
    values: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    kind: int = 0
    dots: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Chart:
    """A drawing of curves.

    Attributes:
        title, unit: over it. what: it shows, for those who do not see it.
        number: writes a value. zero: the axis starts at 0.
    """

    title: str
    unit: str
    curves: Sequence[Curve]
    number: Callable[[float], str] = plain_number
    zero: bool = False

    @property
    def there(self) -> list[Curve]:
        """The curves that have a value."""
        return [curve for curve in self.curves if any(value is not None for value in curve.values)]


def thinned(name: str, steps: Sequence[int], values: Sequence[float], *, band: bool = False, kind: int = 0) -> Curve:
    """A curve of mean values: each place stands for equally many steps, the last one perhaps for fewer.

    Args:
        name, kind: of the curve.
        steps, values: as many; NaN for no value.
        band: with the least and the most of each place's values.
    """
    size = max(1, -(-len(steps) // POINTS))
    places, means, low, high = [], [], [], []
    for start in range(0, len(steps), size):
        there = [value for value in values[start : start + size] if not math.isnan(value)]
        places.append(float(steps[min(start + size, len(steps)) - 1]))
        means.append(sum(there) / len(there) if there else None)
        low.append(min(there, default=None))
        high.append(max(there, default=None))
    return Curve(name, places, means, low if band else (), high if band else (), kind)


def smoothed(values: Sequence[float], span: int) -> list[float]:
    """The mean of each value and the `span` - 1 before it that are numbers; NaN before the first number."""
    found, total, count = [], 0.0, 0
    for number, value in enumerate(values):
        if not math.isnan(value):
            total, count = total + value, count + 1
        if number >= span and not math.isnan(values[number - span]):
            total, count = total - values[number - span], count - 1
        found.append(total / count if count else math.nan)
    return found


def drawn(chart: Chart, last: float = 0, *, width: int = NARROW) -> Html:
    """The drawing, with its heading, a legend if there are several curves, and the numbers that a pointer finds.

    Args:
        last: the step where all drawings of a page end.
    """
    there = chart.there
    head = tag("h3", chart.title, tag("small", chart.unit) if chart.unit else "")
    if not there:
        return join(head, tag("p", "No number yet.", class_="soft"))
    plot = _Plot.around(chart, there, last, width)
    parts = [*plot.grid(chart.number)]
    for curve in there:
        parts += plot.curve(curve)
    label = f"{chart.title}: " + "; ".join(_told(curve, chart.number) for curve in there)
    found = [
        {"name": curve.name, "kind": curve.kind, "x": [round(plot.x(step), 1) for step in curve.steps]}
        | {"step": [int(step) for step in curve.steps]}
        | {"text": [None if value is None else chart.number(value) for value in curve.values]}
        for curve in there
    ]
    view = f"0 0 {width} {HEIGHT}"
    data = json.dumps(found, separators=(",", ":"))
    drawing = tag("svg", *parts, viewBox=view, role="img", aria_label=label, class_="chart curves", data_found=data)
    return join(head, _legend(there), drawing)


def _told(curve: Curve, number: Callable[[float], str]) -> str:
    last = next(value for value in reversed(curve.values) if value is not None)
    return f"{curve.name or 'now'} {number(last)} at step {int(curve.steps[-1]):,}"


def _legend(curves: Sequence[Curve]) -> Html:
    if not any(curve.name for curve in curves):
        return join()
    sample = "0 0 14 10"
    items = [
        tag(
            "li",
            tag("svg", tag("line", x1=0, x2=14, y1=5, y2=5, class_=_classes(curve)), viewBox=sample),
            tag("bdi", curve.name),
        )
        for curve in curves
    ]
    return tag("ul", *items, class_="legend")


def _classes(curve: Curve) -> str:
    return f"line k{curve.kind}" + (" faint" if curve.faint else "")


@dataclass(frozen=True)
class _Plot:
    """Numbers to places."""

    left: float
    right: float
    bottom: float
    top: float
    width: int

    @classmethod
    def around(cls, chart: Chart, curves: Sequence[Curve], last: float, width: int) -> _Plot:
        # Of the curves, not of their bands: one spike would press everything else to the ground. It is cut at the edge.
        values = sorted(value for curve in curves for value in curve.values if value is not None)
        low, high = values[0], values[-1]
        low = min(low, 0.0) if chart.zero else low
        if high - low < 1e-9 * max(abs(high), abs(low)):  # equal, as far as a drawing shows
            low, high = (0.0, high) if low >= 0 else (low, 0.0)
        if high - low < LEAST:
            low, high = 0.0, 1.0
        marks = round_ticks(low, high)
        steps = [step for curve in curves for step in (curve.steps[0], curve.steps[-1])]
        left, right = min(steps), max(*steps, last)
        left = 0 if left < right / 4 else left
        return cls(left, right if right > left else left + 1, marks[0], marks[-1], width)

    def x(self, step: float) -> float:
        return LEFT + (step - self.left) / (self.right - self.left) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        value = min(max(value, self.bottom), self.top)
        return TOP + (self.top - value) / (self.top - self.bottom) * (HEIGHT - TOP - BOTTOM)

    def grid(self, number: Callable[[float], str]) -> Iterable[Html]:
        for value in round_ticks(self.bottom, self.top):
            if self.bottom <= value <= self.top:
                yield tag("line", x1=LEFT, x2=self.width - RIGHT, y1=self.y(value), y2=self.y(value), class_="grid")
                yield tag("text", number(value), x=LEFT - 6, y=self.y(value) + 4, text_anchor="end")
        for step in round_ticks(self.left, self.right):
            if self.left <= step <= self.right:
                yield tag("text", plain_number(step), x=self.x(step), y=HEIGHT - BOTTOM + 17, text_anchor="middle")
        middle = (LEFT + self.width - RIGHT) / 2
        yield tag("text", "step", x=middle, y=HEIGHT - 6, text_anchor="middle", class_="name")

    def curve(self, curve: Curve) -> Iterable[Html]:
        if curve.low:
            edges = [edge for edge in zip(curve.steps, curve.low, curve.high, strict=True) if edge[1] is not None]
            there = [f"{self.x(step):.1f},{self.y(high or 0.0):.1f}" for step, _, high in edges]
            back = [f"{self.x(step):.1f},{self.y(low):.1f}" for step, low, _ in reversed(edges) if low is not None]
            yield tag("polygon", points=" ".join([*there, *back]), class_=f"band k{curve.kind}")
        for run in _unbroken(curve):
            points = " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in run)
            yield tag("polyline", points=points, class_=_classes(curve))
            if curve.dots or len(run) == 1:
                for step, value in run:
                    yield tag("circle", cx=self.x(step), cy=self.y(value), r=2.6, class_=f"point k{curve.kind}")


def _unbroken(curve: Curve) -> list[list[tuple[float, float]]]:
    """The parts of a curve between which there is no value."""
    runs: list[list[tuple[float, float]]] = [[]]
    for step, value in zip(curve.steps, curve.values, strict=True):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((step, value))
    return [run for run in runs if run]
