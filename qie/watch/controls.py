"""Buttons of a page: what a click sends to the server."""

from __future__ import annotations

import json

from qie.html_report.markup import Html, tag


def button(label: str, action: str, *, ask: str | None = None, kind: str | None = None, **values: object) -> Html:
    """A button.

    Args:
        label: on it.
        action, values: what `LivePage.act` gets.
        ask: a question to be answered with yes first.
        kind: its class in the stylesheet.
    """
    return tag(
        "button", label, type="button", data_do=action, data_values=json.dumps(values), data_ask=ask, class_=kind
    )


def copied(shown: str, text: str | None = None) -> Html:
    """A command or a path, and a button that copies it; or `text`, of which it is the short form."""
    copy = tag("button", "copy", type="button", data_copy=text or "", aria_label=f"copy {text or shown}")
    return tag("p", tag("code", shown), copy, class_="command")
