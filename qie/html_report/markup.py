"""HTML as values: whatever is not markup is escaped, so no text of a shard can become any. Lists are never too long."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from qie.errors import shown

MOST_CHARACTERS = 300
"""Of a name, a reason or a fault."""

_VOID = {"br", "img", "input", "link", "meta"}


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: str | float | None) -> Html:
    """An element.

    Args:
        name: of the element.
        children: text, which is escaped, or `Html`, which is not.
        attributes: by their names, `_` for `-`, and one at the end to avoid Python's words. None leaves one out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_text(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{given}>") if name in _VOID else Html(f"<{name}{given}>{join(*children)}</{name}>")


def join(*parts: str) -> Html:
    """Parts one after the other; text among them is escaped."""
    return Html("".join(part if isinstance(part, Html) else _text(part) for part in parts))


def cut(text: str, most: int) -> str:
    """A text of at most `most` characters; of a longer one, its beginning and how long it is."""
    return text if len(text) <= most else f"{text[:most].rstrip()} … ({len(text):,} characters)"


def part_bar(part: float) -> Html:
    """A bar as long as a part of 1, for the cell of a table that says the number, too."""
    bar = tag("rect", class_="bar", width=max(min(part, 1.0), 0.0) * 100, height=10)
    return tag("svg", bar, class_="part", viewBox="0 0 100 10", preserveAspectRatio="none", aria_hidden="true")


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


def _text(text: str) -> str:
    return html.escape(shown(text))


def _number(value: str | float) -> str:
    """Numbers of drawings, to a hundredth."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
