"""The server of pages: who may look, who may press a button, and what it gives out."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from qie.cli import watch
from qie.errors import QieError
from qie.html_report.markup import tag
from qie.watch.live_page import LivePage, WebFile
from qie.watch.places import open_pages
from qie.watch.server import is_loopback
from tests.watch.live_runs import asked, served, write_picture, write_run

JSON = "application/json"


@pytest.fixture(scope="module")
def presses() -> list[str]:
    return []


@pytest.fixture(scope="module")
def page(presses: list[str]) -> LivePage:
    """A page whose button notes that it was pressed."""

    def act(action: str, values: object) -> str:
        if action == "refuse":
            raise QieError("no run trains into this folder", where="runs/edit")
        presses.append(action)
        return "done"

    def picture(name: str) -> WebFile | None:
        return WebFile(b"<script>", "image/png") if name == "a/b.png" else None

    return LivePage("any", "Any", lambda: {"figure": 7}, lambda facts: {"top": tag("p", "<b>")}, picture, act)


@pytest.fixture(scope="module")
def address(page: LivePage) -> Iterator[str]:
    with served([page]) as found:
        yield found


def press(address: str, path: str = "/any/do", body: str = '{"action": "go"}', **headers: str) -> int:
    own = {"origin": address, "content_type": JSON} | headers
    return asked(address, path, "POST", body, **{name: value for name, value in own.items() if value}).status


def test_a_page_is_html_with_what_it_says_escaped_and_its_policy_lets_nothing_else_run(address: str) -> None:
    answer = asked(address, "/any/")
    assert answer.status == 200 and b"<p>&lt;b&gt;</p>" in answer.content
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["referrer-policy"] == "no-referrer"
    assert json.loads(asked(address, "/any/facts.json").content) == {"figure": 7}
    assert asked(address, "/").headers["location"] == "any/"


def test_what_a_browser_has_already_is_not_sent_again(address: str) -> None:
    for path in ("/any/parts.json", "/any/picture/a/b.png"):
        first = asked(address, path)
        again = asked(address, path, if_none_match=first.headers["etag"])
        assert (first.status, again.status, again.content) == (200, 304, b""), path
    assert first.headers["content-type"] == "image/png" and first.headers["cache-control"] == "private, no-cache"
    assert asked(address, "/any/picture/a/c.png").status == 404


def test_only_a_page_of_this_server_presses_its_buttons(address: str, presses: list[str]) -> None:
    presses.clear()
    port = address.rpartition(":")[2]
    assert press(address, origin="") == press(address, origin="https://example.org") == 403
    assert press(address, origin="null") == press(address, origin=f"http://localhost:{port}") == 403
    assert press(address, content_type="text/plain") == press(address, content_type="") == 403
    assert press(address, host="example.org", origin="http://example.org") == 403, "a name that was made to lead here"
    assert press(address, body="x" * 70_000) == 413
    assert press(address, body='{"action": 7}') == press(address, body="[]") == press(address, body="{") == 400
    assert asked(address, "/any/do").status == 405
    assert presses == []
    assert press(address) == 200 and presses == ["go"]
    refused = asked(address, "/any/do", "POST", '{"action": "refuse"}', origin=address, content_type=JSON)
    assert refused.status == 409 and "no run trains" in json.loads(refused.content)["error"]


def test_another_name_for_this_machine_sees_nothing_without_a_token(address: str) -> None:
    for host in ("localhost:9", "127.0.0.1:9", "[::1]:9"):
        assert asked(address, "/any/facts.json", host=host).status == 200, host
    for host in ("example.org", "127.0.0.1.example.org", "10.0.0.7:8765", ""):
        answer = asked(address, "/any/facts.json", host=host)
        assert answer.status == 403 and b"figure" not in answer.content, host
    assert is_loopback("LOCALHOST") and is_loopback("127.8.8.8") and not is_loopback("0.0.0.0")


def test_with_a_token_nothing_is_seen_without_it(page: LivePage) -> None:
    with served([page], "secret") as address:
        for path in ("/", "/any/", "/any/facts.json", "/live.js", "/secre/any/", "/secret2/any/"):
            assert asked(address, path).status == 403, path
        assert asked(address, "/secret/any/facts.json", host="gpu.example.org").status == 200
        assert asked(address, "/secret/", host="gpu.example.org").headers["location"] == "any/"
        assert press(address) == 403 and press(address, "/secret/any/do", origin="http://example.org") == 403
        assert press(address, "/secret/any/do") == 200


def test_the_page_of_a_run_gives_out_its_pictures_and_no_other_file(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_picture(run, 20, 0, (200, 30, 30), images=[str(run / "metrics.jsonl"), str(run / "run.json")])
    (run / "samples" / "step-000021-0.png").symlink_to("/etc/passwd")
    with served(open_pages([str(run)])) as address:
        assert asked(address, "/training/picture/0/step-000020-0.png").content.startswith(b"\x89PNG")
        row = json.loads(asked(address, "/training/facts.json").content)["runs"][0]["pictures"][-1]
        for path in ("step-000021-0.png", "../metrics.jsonl", "%2e%2e/run.json", f"{row['id']}/input-0", "small/x"):
            assert asked(address, f"/training/picture/0/{path}").status == 404, path
        assert asked(address, "/training/picture/1/step-000020-0.png").status == 404


def told(*words: object, code: int) -> str:
    done = CliRunner().invoke(watch.main, list(map(str, words)))
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


def test_what_cannot_be_watched_is_told_before_anything_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run")
    assert "neither a run nor shards" in told(tmp_path, code=2)
    assert "the folder holds no run" in told(tmp_path, "--stop", code=2)
    assert "no run trains into this folder" in told(run, "--pause", code=2)
    assert "no such folder" in told(tmp_path / "nowhere", code=2)
    assert "--webhook" in told(run, "--webhook", "ftp://example.org", "--port", 0, code=2)
    assert "the page cannot be served there" in told(run, "--host", "198.51.100.7", "--port", 0, code=2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"127.0.0.1, port {port}" in told(run, "--port", port, code=2)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'qie[watch]'" in told(run, code=2)


def test_requests_without_a_page_are_the_files_that_a_run_obeys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run")
    monkeypatch.setattr("qie.training.control.holder", lambda run: "a process")
    for request, words, there in (
        ("pause", "will hold after this step", {"pause"}),
        ("checkpoint", "will write a checkpoint", {"pause", "checkpoint"}),
        ("resume", "goes on", {"checkpoint"}),
        ("stop", "will stop after this step and a checkpoint", {"checkpoint", "stop"}),
    ):
        assert words in told(run, f"--{request}", code=0)
        assert {path.name for path in (run / "control").iterdir()} == there, request
    monkeypatch.setattr("qie.training.control.holder", lambda run: None)
    assert "No run trains into this folder" in told(run, "--resume", code=0)
