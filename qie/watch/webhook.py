"""Alerts to an address elsewhere, while nobody looks at the page."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from qie.errors import UsageError

CHECK_S = 10.0
POST_TIMEOUT_S = 10.0


class Webhook:
    """Posts each new alert once, as JSON. What fails is told, and tried again at the next look.

    Args:
        url: http or https.
        say: hears of failures.
        post: sends a body to the URL; raises OSError.
    """

    def __init__(
        self, url: str, say: Callable[[str], object], post: Callable[[str, bytes], None] | None = None
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise UsageError("not an address that can be posted to", where="--webhook", expected="https://…", found=url)
        self._url, self._say, self._post = url, say, post or _post
        self._told: set[tuple[str, ...]] = set()
        self._failed = False

    def look(self, found: Sequence[Mapping[str, Any]]) -> None:
        """Post those of the alerts that are new. One that went away and came again is new."""
        keys = {(str(one["place"]), str(one["kind"]), str(one["since"])): one for one in found}
        self._told &= keys.keys()
        for key, alert in keys.items():
            if key in self._told:
                continue
            words = f"{alert['run']}: {alert['text']}" + (f" {alert['advice']}" if alert["advice"] else "")
            # `text` is what Slack and Mattermost show, `content` Discord.
            body = dict(alert) | {"text": words, "content": words, "source": "qie watch"}
            try:
                self._post(self._url, json.dumps(body, ensure_ascii=False).encode())
            except (OSError, ValueError) as error:
                if not self._failed:
                    self._say(f"warning: the webhook was not told ({error}): {words}")
                self._failed = True
                return
            self._failed = False
            self._told.add(key)


def _post(url: str, body: bytes) -> None:
    request = urllib.request.Request(url, body, {"content-type": "application/json", "user-agent": "qie-watch"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=POST_TIMEOUT_S) as answer:  # noqa: S310 (its scheme is checked)
        answer.read(1)


class Lookout:
    """A thread that looks for alerts while nobody looks at the page. A context manager: leaving it ends the thread.

    Args:
        look: called every `CHECK_S` seconds.
        say: hears what went wrong.
    """

    def __init__(self, look: Callable[[], object], say: Callable[[str], object]) -> None:
        self._look, self._say, self._ended = look, say, threading.Event()
        self._thread = threading.Thread(target=self._run, name="qie-watch-alerts")

    def __enter__(self) -> Lookout:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self._look()
            except Exception as error:  # a file of a kind that nobody thought of must not end the alerts of others
                self._say(f"warning: alerts: {type(error).__name__}: {error}")
            if self._ended.wait(CHECK_S):
                return
