"""A web server with the latency and the bandwidth of a store far away, in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CHUNK = 1 << 18
COUNTS = "counts"


def sent(url: str) -> tuple[int, int]:
    """Requests for parts of tars so far, and their bytes."""
    with urllib.request.urlopen(url + COUNTS) as answer:
        requests, size = json.load(answer)
    return requests, size


@contextmanager
def serving(folder: Path, latency_s: float, bytes_per_s: float) -> Iterator[str]:
    """The URL of a folder that is served so slowly; all requests share the bandwidth."""
    code = f"import slow_server; slow_server.serve({str(folder)!r}, {latency_s}, {bytes_per_s})"
    server = subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}/"
    finally:
        server.kill()
        server.communicate()


def serve(folder: str, latency_s: float, bytes_per_s: float) -> None:
    """Print a port, and serve there until someone ends the process."""
    link, free, counts = threading.Lock(), [time.monotonic()], [0, 0]

    def through(size: int) -> float:
        """When so many bytes are."""
        with link:
            free[0] = max(free[0], time.monotonic()) + size / bytes_per_s
            return free[0]

    def count(size: int) -> None:
        with link:
            counts[0] += 1
            counts[1] += size

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Nothing: standard error is the benchmark's."""

        def do_HEAD(self) -> None:
            self._answer(head=True)

        def do_GET(self) -> None:
            if self.path.endswith(f"/{COUNTS}"):
                content = json.dumps(counts).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            else:
                self._answer(head=False)

        def _answer(self, *, head: bool) -> None:
            time.sleep(latency_s)
            path = Path(folder) / self.path.rpartition("/")[2]
            size = path.stat().st_size if path.is_file() else 0
            part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            start = int(part[1]) if part else 0
            stop = min(int(part[2]) + 1 if part and part[2] else size, size)
            self.send_response(404 if not path.is_file() else 206 if part else 200)
            self.send_header("Content-Length", str(stop - start))
            if part:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
            self.end_headers()
            if head or not path.is_file():
                return
            if path.suffix == ".tar":
                count(stop - start)
            with path.open("rb") as file:
                file.seek(start)
                for at in range(start, stop, CHUNK):
                    content = file.read(min(CHUNK, stop - at))
                    time.sleep(max(through(len(content)) - time.monotonic(), 0))
                    self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
