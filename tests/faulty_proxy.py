"""A proxy in front of an HTTP server that injects faults by a schedule, as a bad network or a busy store would.

    with FaultyProxy(endpoint, every(3, ["500", "reset", "cut"])) as proxy:
        ...                             # requests to proxy.url
    assert proxy.count("reset") > 0

The Host header is passed on as the client sent it, so that signatures stay valid.
"""

from __future__ import annotations

import http.client
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

FAULTS = {
    "500": "answers 500 InternalError; the server sees nothing",
    "503": "answers 503 SlowDown; the server sees nothing",
    "reset": "resets the connection; the server sees nothing",
    "lost": "passes the request on, then resets the connection: the client cannot know whether it was done",
    "lost_500": "passes the request on, then answers 500",
    "reset_body": "resets the connection in the middle of the answer's body",
    "cut": "closes the connection in the middle of the answer's body",
    "slow": "answers after `delay_s`",
}

Schedule = Callable[[int, str, str], "str | None"]
"""What happens to a request, by its number, method and path; None: it is passed on unharmed."""

_ERRORS = {"500": (500, "InternalError"), "503": (503, "SlowDown"), "lost_500": (500, "InternalError")}
_BODILESS = ("reset_body", "cut")


def every(n: int, faults: Sequence[str], methods: Collection[str] = (), seed: int = 0) -> Schedule:
    """Each n-th request (of `methods`, where given) meets a fault drawn from `faults`."""
    chance, seen = random.Random(seed), iter(range(1, 2**62))

    def schedule(number: int, method: str, path: str) -> str | None:
        if methods and method not in methods:
            return None
        return chance.choice(faults) if next(seen) % n == 0 else None

    return schedule


def these(faults: Iterable[str | None], methods: Collection[str] = ()) -> Schedule:
    """The faults of the first requests (of `methods`, where given), one each; after them nothing happens."""
    left = iter(faults)
    return lambda number, method, path: next(left, None) if not methods or method in methods else None


def always(fault: str, methods: Collection[str] = ()) -> Schedule:
    """Every request (of `methods`, where given) meets this fault."""
    return lambda number, method, path: fault if not methods or method in methods else None


class FaultyProxy:
    """Use as a context. `url` is the proxy's own, `faults` the (fault, method, path) of those that were injected."""

    def __init__(self, endpoint: str, schedule: Schedule, delay_s: float = 0.05) -> None:
        host = urlsplit(endpoint)
        assert host.hostname is not None
        self.upstream = (host.hostname, host.port or 80)
        self.schedule, self.delay_s = schedule, delay_s
        self.faults: list[tuple[str, str, str]] = []
        self.requests: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FaultyProxy:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def count(self, fault: str | None = None, method: str | None = None) -> int:
        """How many faults were injected, of one kind or into one method's requests."""
        return sum((fault or f) == f and (method or m) == m for f, m, _ in list(self.faults))

    def counts(self) -> Counter[str]:
        return Counter(fault for fault, _, _ in list(self.faults))

    def next_fault(self, method: str, path: str) -> str | None:
        with self._lock:
            self.requests.append((method, path))
            return self.schedule(len(self.requests), method, path)

    def note(self, fault: str, method: str, path: str) -> None:
        with self._lock:
            self.faults.append((fault, method, path))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    proxy: FaultyProxy

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no news."""


class _Dropped(Exception):
    """The connection is gone, on purpose."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def handle(self) -> None:
        try:
            super().handle()
        except _Dropped:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass

    def _any(self) -> None:
        proxy = self.server.proxy
        request = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = proxy.next_fault(self.command, self.path)
        if fault is not None and fault not in _BODILESS:
            proxy.note(fault, self.command, self.path)
        if fault == "reset":
            self._reset()
        if fault in _ERRORS:
            if fault == "lost_500":
                self._ask(request)
            status, code = _ERRORS[fault]
            error = f"<Error><Code>{code}</Code><Message>an injected fault</Message></Error>".encode()
            return self._answer(status, [("Content-Type", "application/xml")], error, len(error))
        if fault == "slow":
            time.sleep(proxy.delay_s)
        status, headers, body, length = self._ask(request)
        if fault == "lost":
            self._reset()
        if fault in _BODILESS and len(body) > 1:  # an answer without a body has no middle
            proxy.note(fault, self.command, self.path)
            self._answer(status, headers, body[: len(body) // 2], length)
            self._reset() if fault == "reset_body" else self._close()
        return self._answer(status, headers, body, length)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _any

    def _ask(self, request: bytes) -> tuple[int, list[tuple[str, str]], bytes, int]:
        upstream = http.client.HTTPConnection(*self.server.proxy.upstream, timeout=200)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() != "connection":
                    upstream.putheader(name, value)
            upstream.endheaders(request)
            answer = upstream.getresponse()
            body = answer.read()
            dropped = ("connection", "transfer-encoding", "content-length", "date", "server")
            headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in dropped]
            length = int(answer.getheader("Content-Length") or 0) if self.command == "HEAD" else len(body)
            return answer.status, headers, body, length
        finally:
            upstream.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, length: int) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._close()

    def _close(self) -> None:
        for end in (self.rfile, self.wfile, self.connection):
            end.close()
        raise _Dropped
