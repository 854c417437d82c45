"""A headless Chromium, told what to do over two pipes: its DevTools protocol without a port and without a library."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)

AS_3_AND_4 = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Chromium reads from file 3 and writes to file 4, whatever their numbers are here."""

Json = dict[str, Any]


class Tab:
    """A page in Chromium, and all that it asked for and complained about.

    Attributes:
        requests: URLs that were asked for, the page itself first.
        complaints: what the console shows: errors, warnings, broken policies, exceptions.
    """

    def __init__(self, commands: io.RawIOBase, answers: io.BufferedReader) -> None:
        self._commands, self._answers, self._number, self._session = commands, answers, 0, ""
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **arguments: Any) -> Json:
        """The answer to a command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": arguments}
        message |= {"sessionId": self._session} if self._session else {}
        self._commands.write(json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def open(
        self, page: Path | str, *, width: int = 1200, height: int = 900, dark: bool = False, script: bool = True
    ) -> None:
        """Load a file, or an address, and wait until all of it is there."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.resize(width, height)
        self._loaded = False
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while not self._loaded:
            self._next()

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def value(self, expression: str) -> Any:
        """What JavaScript makes of an expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self) -> np.ndarray:
        """The whole page as pixels, [h, w, 3]."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        with Image.open(io.BytesIO(base64.b64decode(shot["data"]))) as image:
            return np.asarray(image.convert("RGB"))

    def _next(self) -> Json:
        content = bytearray()
        while not content.endswith(b"\0"):
            byte = self._answers.read1(1 << 16) if not self._rest else self._rest
            assert byte, "Chromium ended"
            end = byte.find(b"\0") + 1
            content += byte[:end] if end else byte
            self._rest = byte[end:] if end else b""
        message: Json = json.loads(content[:-1])
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    _rest = b""

    def _note(self, event: str, about: Json) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Network.requestWillBeSent" and not about["request"]["url"].startswith("data:"):
            self.requests.append(about["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(str(about["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled":
            self.complaints.append(str(about["args"]))
        elif event == "Log.entryAdded":
            self.complaints.append(about["entry"]["text"])


@contextmanager
def chromium(profile: Path) -> Iterator[Tab]:
    """A tab of a Chromium of its own; `profile` is a folder for its files."""
    assert PROGRAM is not None
    its_commands, commands = os.pipe()
    answers, its_answers = os.pipe()
    ends = its_commands, its_answers
    process = subprocess.Popen(
        [sys.executable, "-c", AS_3_AND_4, *map(str, ends), PROGRAM, *FLAGS, f"--user-data-dir={profile}"],
        pass_fds=ends,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for end in ends:
        os.close(end)
    try:
        with os.fdopen(commands, "wb", buffering=0) as writing, os.fdopen(answers, "rb") as reading:
            yield Tab(writing, reading)
    finally:
        process.kill()
        process.wait()
