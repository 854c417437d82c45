"""A run of qie-train and its page: figures move, pictures appear, and each button is obeyed within a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from qie.training import processes
from qie.training.run import Run
from qie.watch import live_page
from qie.watch.places import open_pages
from tests.stats.chromium import PROGRAM, Tab, chromium
from tests.training.runs import Bench, losses, names
from tests.watch.live_runs import served, soon

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium: apt-get install chromium")


WRITE = """{
  const field = document.querySelector("[name=prompt]");
  field.value = "make it <b>day</b>";
  field.dispatchEvent(new Event("input", {bubbles: true}));
}"""


class Gate:
    """Lets a run take its steps one by one. A context manager: whoever leaves it frees the run.

    Attributes:
        reached: released before each step.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.reached, self._open = folder, threading.Semaphore(0), threading.Semaphore(0)
        self._free = self.ended = False

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self._free = True
        self._open.release(100)
        (self.folder / "control" / "pause").unlink(missing_ok=True)

    def wait(self) -> None:
        """As a run: until the next step may be taken."""
        self.reached.release()
        if not self._free:
            self._open.acquire(timeout=200)

    def end(self) -> None:
        """As a run that has ended."""
        self.ended = True
        self.reached.release(100)

    def reach(self) -> None:
        """As a test: until the run waits before its next step."""
        assert self.reached.acquire(timeout=200) and not self.ended, "the run has ended, or holds"

    def allow(self, steps: int = 1) -> None:
        """As a test: let the run take so many steps."""
        self._open.release(steps)


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """Work in another thread; what it raises is raised here."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if raised:
        raise raised[0]


def press(tab: Tab, label: str) -> None:
    """Press a button, and wait until the server has answered."""
    tab.value("document.getElementById('said').textContent = ''")
    tab.value(f"[...document.querySelectorAll('button')].find(one => one.textContent === '{label}').click()")
    soon(tab, "document.getElementById('said').textContent !== ''")


def progress(tab: Tab, words: str) -> None:
    soon(tab, f"document.querySelector('.progress p')?.textContent.startsWith('{words}')")


def state(tab: Tab, words: str) -> None:
    soon(tab, f"document.querySelector('.states').textContent.includes('{words}')")


def test_a_run_is_seen_to_move_and_obeys_its_buttons_within_a_step(
    tiny_edit: Path,
    photos: Path,
    encoder: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_page, "FRESH_S", 0.0)
    monkeypatch.setattr(processes, "HOLD_S", 0.02)
    bench, run = Bench.make(tmp_path, tiny_edit, photos, encoder, rows=4), tmp_path / "run"
    gate, training_step = Gate(run), Run.training_step

    def gated(self: Run) -> Any:
        gate.wait()
        return training_step(self)

    monkeypatch.setattr(Run, "training_step", gated)

    def watch() -> None:
        with gate:
            gate.reach()
            with chromium(tmp_path / "chromium") as tab, served(open_pages([str(run)])) as address:
                tab.open(f"{address}/training/", height=3000)
                tab.value("window.confirm = () => true")
                look(tab)
                assert tab.complaints == []
                assert {url.split("/")[2] for url in tab.requests} == {address.removeprefix("http://")}

    def look(tab: Tab) -> None:
        progress(tab, "step 0 of 12")
        soon(tab, "document.images.length === 3 && [...document.images].every(one => one.naturalWidth)")
        gate.allow(2)
        progress(tab, "step 2 of 12")
        soon(tab, "document.querySelector('output')?.textContent === 'step 2'")
        gate.reach()
        gate.reach()

        press(tab, "Pause")
        gate.allow(3)
        state(tab, "paused")
        assert len(losses(run)) == 3, "it holds after the step that it was in"
        press(tab, "Checkpoint now")
        soon(tab, "document.querySelector('#checkpoints').textContent.includes('checkpoint-000003')")
        tab.value(WRITE)
        press(tab, "Use these from the next validation on")
        press(tab, "Resume")
        for _ in range(3):
            gate.reach()
        assert len(losses(run)) == 5, "it went on"
        soon(tab, "document.querySelector('.prompt').textContent === 'make it <b>day</b>'")
        assert tab.value("document.querySelector('#pictures summary').textContent") == "1 of earlier prompts"
        press(tab, "Stop")
        gate.allow(5)
        state(tab, "stopped")

    control = next((photos / "control_images").glob("*.png"))
    settings: dict[str, Any] = {
        "validation__samples": [{"images": [str(control)], "prompt": "make it night"}],
        "validation__sample_steps": 2,
        "validation__sample_cfg": 1.0,
    }
    with beside(watch):
        try:
            bench.train(run, train__max_steps=12, **settings)
        finally:
            gate.end()
    assert len(losses(run)) == 6
    assert names(run) == ["checkpoint-000003", "checkpoint-000006"]
