"""A page of the server: what it reads, how it is shown, and what its buttons do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qie.errors import UsageError
from qie.html_report.markup import Html

FRESH_S = 1.0
"""Facts are read again when they are older: several who look at a page read its files no more often than one."""

LiveFacts = dict[str, Any]


@dataclass(frozen=True)
class WebFile:
    """A file's bytes, and their media type."""

    content: bytes
    kind: str


def _no_picture(_: str) -> WebFile | None:
    return None


def _no_action(action: str, _: Mapping[str, Any]) -> str:
    raise UsageError("this page has no such button", found=action)


@dataclass
class LivePage:
    """See the docstring of `qie.watch` for what each of these does.

    Attributes:
        name: in the address, letters alone.
        heading: in the navigation.
        title: of the browser's tab.
        read, render, picture, act: the four functions.
        alerts: those among the facts, as `qie.watch.alerts.told_alerts` gives them; `--webhook` is told.
    """

    name: str
    heading: str
    read: Callable[[], LiveFacts]
    render: Callable[[LiveFacts], Mapping[str, Html]]
    picture: Callable[[str], WebFile | None] = _no_picture
    act: Callable[[str, Mapping[str, Any]], str] = _no_action
    alerts: Callable[[LiveFacts], Sequence[Mapping[str, Any]]] = lambda facts: ()
    title: Callable[[LiveFacts], str] = lambda facts: "qie watch"
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _found: tuple[float, LiveFacts] | None = None

    def facts(self) -> LiveFacts:
        """What is there now, or was a moment ago."""
        with self._lock:
            now = time.monotonic()
            if self._found is None or now - self._found[0] > FRESH_S:
                self._found = now, self.read()
            return self._found[1]

    def do(self, action: str, values: Mapping[str, Any]) -> str:
        """What a button does; the next facts are read anew."""
        said = self.act(action, values)
        with self._lock:
            self._found = None
        return said
