"""Web servers for tests, and the errors that end what they refuse."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from qie.errors import QieError


def failure(act) -> QieError:
    """The one clear error that `act` ends in, without a second try: that would take longer than a test may."""
    with pytest.raises(QieError) as error:
        act()
    assert error.value.where
    assert "\n" not in str(error.value.found) and len(str(error.value.found)) <= 300
    assert "Debug source" not in str(error.value) and "secret" not in str(error.value)
    return error.value


@contextmanager
def serving(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


class Ranged(Quiet):
    """As a grown-up web server answers. No part of Python's own, which sends whole files."""

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        path = Path(self.translate_path(self.path))
        if asked is None or not path.is_file():
            super().do_GET()
            return
        content = path.read_bytes()
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last or len(content)) + 1, len(content))
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        self.wfile.write(content[start:stop])


@contextmanager
def answering(status: int) -> Iterator[str]:
    """A service that answers everything with one status."""

    class Handler(Quiet):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_PUT = do_HEAD = do_DELETE = do_POST = do_GET

    with serving(Handler) as url:
        yield url
