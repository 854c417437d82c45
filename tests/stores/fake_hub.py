"""As much of the Hugging Face Hub as its file system asks for: one dataset repository, in memory."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


class FakeHub:
    """Use as a context. `fault`, asked before each request, may give a status to answer with instead."""

    repository = "owner/name"
    folder_url = f"hf://datasets/{repository}"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.fault: Callable[[str], int | None] = lambda path: None
        self.ranges = True
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FakeHub:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def tree(self, folder: str) -> list[dict[str, object]] | None:
        inside = {name for name in self.files if name.startswith(folder)}
        if not inside and folder:
            return None
        files = [name for name in inside if "/" not in name[len(folder) :]]
        folders = {folder + name[len(folder) :].partition("/")[0] for name in inside} - set(files)
        return [
            *({"type": "file", "oid": "0", "size": len(self.files[name]), "path": name} for name in sorted(files)),
            *({"type": "directory", "oid": "0", "size": 0, "path": name} for name in sorted(folders)),
        ]

    def commit(self, lines: bytes) -> None:
        for line in lines.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            if operation["key"] == "deletedFile":
                del self.files[value["path"]]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    hub: FakeHub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, *_: object) -> None:
        pass

    def _any(self) -> None:
        hub, path = self.server.hub, unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.requests.append(f"{self.command} {path}")
        if status := hub.fault(path):
            self._answer(status, b"{}")
        elif path.startswith(api := f"/api/datasets/{hub.repository}"):
            self._api(path.removeprefix(api).strip("/"), body)
        elif path.startswith(resolve := f"/datasets/{hub.repository}/resolve/main/"):
            self._file(path.removeprefix(resolve))
        else:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_GET = do_POST = do_HEAD = _any

    def _api(self, rest: str, body: bytes) -> None:
        hub = self.server.hub
        what, _, tail = rest.partition("/")
        if what in ("", "revision"):
            self._json({"id": hub.repository, "sha": "0" * 40, "private": False, "tags": [], "siblings": []})
        elif what == "tree":
            folder = tail.partition("/")[2]
            tree = hub.tree(f"{folder}/" if folder else "")
            self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound"}) if tree is None else self._json(tree)
        elif what == "paths-info":  # asked instead of the tree when another thread has just dropped what is known of it
            asked = {path.strip("/") for path in parse_qs(body.decode())["paths"]}
            folders = {f"{path.rpartition('/')[0]}/".lstrip("/") for path in asked}
            entries = [entry for folder in sorted(folders) for entry in hub.tree(folder) or []]
            self._json([entry for entry in entries if entry["path"] in asked])
        elif what == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            self._json({"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]})
        elif what == "commit":
            hub.commit(body)
            self._json(
                {
                    "commitUrl": f"{hub.url}/datasets/{hub.repository}/commit/{'0' * 40}",
                    "commitOid": "0" * 40,
                    "hookOutput": "",
                }
            )
        else:
            self._answer(404, b"{}")

    def _file(self, name: str) -> None:
        hub = self.server.hub
        content = hub.files.get(name)
        if content is None:
            return self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        asked = self.headers.get("Range")
        if asked is None or not hub.ranges:
            return self._answer(200, content)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last or len(content)) + 1]
        return self._answer(206, part, {"Content-Range": f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"})

    def _json(self, answer: object) -> None:
        self._answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
