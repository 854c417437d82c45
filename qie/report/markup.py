"""HTML as values: whatever is not markup already is escaped, so no text of a shard can become any."""

from __future__ import annotations

import html
import unicodedata

_VOID = {"br", "img", "link", "meta"}

_JOINERS = "\u200c\u200d"
"""Without these two, emoji fall apart and Persian is misspelt."""


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


def shown(text: str) -> str:
    r"""Text in which what cannot be seen, or turns the direction of what follows, is written as \u202e and the like.

    Spaces of all kinds, line ends, and what joins letters stay.
    """
    return "".join(char if _stays(char) else _code(char) for char in text)


def cut(text: str, most: int) -> str:
    """A text of at most `most` characters; of a longer one, its beginning and how long it is."""
    return text if len(text) <= most else f"{text[:most].rstrip()} … ({len(text):,} characters)"


def _text(text: str) -> str:
    return html.escape(shown(text))


def _number(value: str | float) -> str:
    """Numbers of drawings, to a hundredth."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _stays(char: str) -> bool:
    return char.isprintable() or char in "\n\t" or char in _JOINERS or unicodedata.category(char) == "Zs"


def _code(char: str) -> str:
    return repr(char)[1:-1]
