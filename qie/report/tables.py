"""Tables and lists of the page, none of them longer than can be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qie.report.charts import part_bar
from qie.report.markup import Html, cut, join, tag

MOST_CHARACTERS = 300
"""Of a name, a reason or a fault."""


def panel(*children: str, class_: str = "panel") -> Html:
    return tag("div", *children, class_=class_)


def long_list(name: str, content: Html) -> Html:
    """Content in a box of limited height, which may be scrolled; by keyboard, too."""
    return tag("div", content, class_="long", tabindex=0, role="region", aria_label=name)


def note(text: str) -> Html:
    return tag("p", text, class_="soft")


def foreign(text: str, most: int = MOST_CHARACTERS) -> Html:
    """Text from a shard: cut, and unable to turn the direction of what stands around it."""
    return tag("bdi", cut(text, most))


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = (), sort: bool = False
) -> Html:
    """A table whose first column names its rows.

    Args:
        heads: names of columns.
        rows: cells; text is escaped.
        numbers: columns that are numbers, and stand to the right.
        sort: a click on a head may sort it.
    """

    def kind(column: int) -> str | None:
        return "number" if column in numbers else None

    top = tag("tr", *(tag("th", head, scope="col", class_=kind(column)) for column, head in enumerate(heads)))
    lines = [tag("tr", *(_cell(cell, column, kind(column)) for column, cell in enumerate(row))) for row in rows]
    made = tag("table", tag("thead", top), tag("tbody", *lines), data_sort="" if sort else None)
    return tag("div", made, class_="wide")


def counted(
    counts: Mapping[str, float], name: str, unit: str, most: int, words: Mapping[str, str] | None = None
) -> Html:
    """Names and how much there is of each, with bars; of many, the first.

    Args:
        counts: in order.
        name, unit: heads of the columns.
        most: how many are listed.
        words: what stands for each number, if not the number itself.
    """
    top = max([*counts.values(), 1])
    shown = list(counts.items())[:most]
    rows = [(foreign(key), words[key] if words else f"{count:,}", part_bar(count / top)) for key, count in shown]
    body = table((name, unit, ""), rows, numbers=(1,))
    left = len(counts) - len(shown)
    if not left:
        return body
    rest = sum(list(counts.values())[most:])
    return join(body, note(f"and {left:,} more" + (f", {rest:,} {unit} in all" if not words else "")))


def _cell(cell: str, column: int, kind: str | None) -> Html:
    if column == 0:
        return tag("th", cell, scope="row", class_=kind)
    return tag("td", cell, class_="bar-cell" if cell.startswith("<svg") and isinstance(cell, Html) else kind)
