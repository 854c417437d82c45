"""Folders as qie-train leaves them, and their page on a server of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import uvicorn
from PIL import Image, PngImagePlugin

from qie.watch.live_page import LivePage
from qie.watch.server import listening, make_app
from tests.stats.chromium import Tab

NOW = 1_800_000_000.0
SOON = """
new Promise((done, failed) => {
  const look = () => {
    if (%s) return done(true);
    document.dispatchEvent(new Event("visibilitychange")); // the page asks at once, not in two seconds
    setTimeout(look, 50);
  };
  setTimeout(() => failed(document.body.innerText), 240000);
  look();
})
"""


def line(step: int, **values: Any) -> str:
    """Of a training step, in metrics.jsonl."""
    usual = {"loss": 1 / step, "loss_by_level": [1.0, None, 0.5, 0.2], "grad_norm": 0.5, "lr": 1e-4, "samples": 2}
    usual |= {"samples_per_s": 1.0, "step_time_s": 2.0, "data_wait_s": 0.1, "peak_memory_bytes": 10**9, "mfu": None}
    return json.dumps({"step": step, "epoch": 0} | usual | {"time": NOW + 2 * step} | values) + "\n"


def validation(step: int, loss: float, **values: Any) -> str:
    found = {"step": step, "validation_loss": loss, "validation_loss_by_level": [loss] * 4}
    return json.dumps(found | {f"validation_{name}": value for name, value in values.items()}) + "\n"


def of_pairs(target: float, rejected: float, accuracy: float = 0.75) -> dict[str, Any]:
    """What a line has of pairs with these rewards."""
    margin = target - rejected
    found = {"accuracy": accuracy, "margin": margin, "target_reward": target, "rejected_reward": rejected}
    found["margin_by_level"] = [margin, None, margin, margin]
    return {f"preference_{name}": value for name, value in found.items()}


def write_run(folder: Path, steps: int = 40, state: str = "training", **config: Any) -> Path:
    """A run of so many steps, by another machine."""
    (folder / "samples").mkdir(parents=True)
    lines = [line(step) for step in range(1, steps + 1)] + [validation(10, 0.5), validation(20, 0.4)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    report = {"config": {"train": {"max_steps": 50, "seed": 0}} | config, "base_model": "tiny", "samples": 9}
    (folder / "run.json").write_text(json.dumps(report))
    told = {"state": state, "step": steps, "steps": 50, "pid": 1, "host": "another", "time": NOW + 2 * steps}
    (folder / "state.json").write_text(json.dumps(told))
    return folder


def write_picture(folder: Path, step: int, number: int, colour: tuple[int, int, int], **asked: Any) -> Path:
    """A validation picture."""
    about = PngImagePlugin.PngInfo()
    about.add_itxt("qie", json.dumps({"prompt": "make it night", "images": [], "seed": 0, "step": step} | asked))
    path = folder / "samples" / f"step-{step:06d}-{number}.png"
    Image.new("RGB", (64, 48), colour).save(path, pnginfo=about)
    return path


@contextmanager
def served(pages: Sequence[LivePage], token: str | None = None) -> Iterator[str]:
    """The address of a server of these pages, `http://127.0.0.1:PORT`."""
    with listening("127.0.0.1", 0) as at:
        settings = uvicorn.Config(make_app(pages, token), log_level="error", access_log=False, lifespan="off")
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [at]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{at.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def asked(address: str, path: str, method: str = "GET", body: str | None = None, **headers: str) -> HTTPResponse:
    """The answer to a request; `headers` with _ for -."""
    connection = HTTPConnection(address.removeprefix("http://"), timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, named)
    answer = connection.getresponse()
    answer.content = answer.read()  # type: ignore[attr-defined]
    connection.close()
    return answer


def soon(tab: Tab, condition: str) -> None:
    """Come back when the page says so."""
    assert tab.value(SOON % condition)
