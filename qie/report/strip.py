"""The strip that shows which rows of a folder are covered: a bar as wide as the page, whatever their number."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from qie.report.markup import Html, join, tag
from qie.stats.summary import Coverage, Range
from qie.stats.tally import merged

CELLS = 400


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
    """What the colours of strips mean."""
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
    sizes = {"covered": _size(part.ranges), "in shards with faults": _size(part.faulty), "skipped": _size(part.skipped)}
    sizes["missing"] = stop - _size(merged([*part.ranges, *part.faulty]))
    return ", ".join(f"{count:,} {name}" for name, count in sizes.items() if count) or "none"


def _size(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


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
