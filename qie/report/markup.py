"""HTML as values: whatever is not markup already is escaped, so no text of a shard can become any."""

from __future__ import annotations

import html

from qie.errors import shown

_VOID = {"br", "img", "link", "meta"}


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
    """Parts one behind the other; text among them is escaped."""
    return Html("".join(part if isinstance(part, Html) else _text(part) for part in parts))


def cut(text: str, most: int) -> str:
    """A text of at most `most` characters; of a longer one, its beginning and how long it is."""
    return text if len(text) <= most else f"{text[:most].rstrip()} … ({len(text):,} characters)"


def _text(text: str) -> str:
    return html.escape(shown(text))


def _number(value: str | float) -> str:
    """Numbers of drawings, to a hundredth."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
