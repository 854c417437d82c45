"""The page of a run in a real browser: figures move, pictures are seen, nothing else is asked for, no text runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from qie.watch.places import open_pages
from tests.stats.chromium import PROGRAM, Tab
from tests.watch.live_runs import line, served, soon, write_picture, write_run

pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium: apt-get install chromium"),
    pytest.mark.usefixtures("fresh"),
]

NASTY = "<img src=https://example.org/x.png onerror=alert(2)><script>window.ran = 1</script>"
BOX = "const box = document.images[0].getBoundingClientRect();"
POINT = """{
  const drawing = document.querySelector("svg[data-found]");
  const box = drawing.getBoundingClientRect();
  const place = {clientX: box.x + box.width / 2, clientY: box.y + box.height / 2};
  drawing.dispatchEvent(new PointerEvent("pointermove", {bubbles: true, ...place}));
}"""


def look_again(tab: Tab) -> None:
    """Without waiting for the page to do so by itself."""
    tab.value("document.dispatchEvent(new Event('visibilitychange'))")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = write_run(tmp_path / NASTY.replace("/", "_"), NASTY=NASTY)
    for step, colour in ((10, (200, 40, 40)), (20, (40, 200, 40))):
        write_picture(run, step, 0, colour, prompt=NASTY)
    told = json.loads((run / "state.json").read_text())
    (run / "state.json").write_text(json.dumps(told | {"host": NASTY, "error": NASTY}))
    return run


def test_figures_move_pictures_are_seen_and_hostile_text_is_inert(tab: Tab, run: Path) -> None:
    with served(open_pages([str(run)])) as address:
        for width, dark in ((1200, False), (400, True)):
            tab.open(f"{address}/training/", width=width, dark=dark)
            soon(tab, "[...document.images].length && [...document.images].every(one => one.naturalWidth)")
            assert tab.value("document.documentElement.scrollWidth") <= width
            corner = tab.picture()[2, 2]
            assert corner.max() < 60 if dark else corner.min() > 220
        assert middle(tab) == (40, 200, 40)
        assert tab.value("document.querySelector('.progress p').textContent") == "step 40 of 50, 80%, about 20.0 s left"

        slide = "{const one = document.querySelector('[data-slider]'); one.value = 0; "
        tab.value(slide + "one.dispatchEvent(new Event('input', {bubbles: true}))}")
        soon(tab, "document.images[0].complete && document.querySelector('output').textContent === 'step 10'")
        assert middle(tab) == (200, 40, 40)
        with (run / "metrics.jsonl").open("a") as file:
            file.write(line(41))
        write_picture(run, 30, 0, (40, 40, 200), prompt=NASTY)
        look_again(tab)
        soon(tab, "document.querySelector('.progress p').textContent.startsWith('step 41 of 50')")
        assert tab.value("document.querySelector('output').textContent") == "step 10", "where it was put"

        assert tab.value("window.ran") is None and tab.value("document.scripts.length") == 1
        assert tab.value("document.querySelector('.prompt').textContent") == NASTY
        assert {url.split("/")[2] for url in tab.requests} == {address.removeprefix("http://")}
        assert tab.complaints == []


def middle(tab: Tab) -> tuple[int, ...]:
    """The colour of the first picture, as it is seen, to the next multiple of 40."""
    soon(tab, "document.images[0].complete && document.images[0].naturalWidth")
    x, y = tab.value(f"(() => {{{BOX} return [box.x + box.width / 2 + scrollX, box.y + box.height / 2 + scrollY]}})()")
    around = tab.picture()[round(y) - 4 : round(y) + 4, round(x) - 4 : round(x) + 4].reshape(-1, 3)
    return tuple(int(value) for value in np.round(around.mean(axis=0) / 40) * 40)


def test_runs_lie_over_each_other_and_what_differs_is_told(tab: Tab, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, model={"lora": {"r": r}}) for name, r in (("one", 16), ("other", 32))]
    with served(open_pages(list(map(str, runs)))) as address:
        tab.open(f"{address}/training/")
        assert tab.value("[...document.querySelectorAll('#differences td')].map(one => one.textContent)") == [
            "16",
            "32",
        ]
        assert tab.value("document.querySelectorAll('#curves .panel')[0].querySelectorAll('polyline').length") == 2
        assert tab.value("document.querySelectorAll('.buttons button').length") == 0
        tab.value(POINT)
        soon(tab, "!document.querySelector('.found').hidden")
        lines = tab.value("[...document.querySelectorAll('.found div')].map(one => one.textContent)")
        assert lines[0].startswith("step ") and lines[1].startswith("one 0.0") and lines[2].startswith("other 0.0")
        assert tab.complaints == []


def test_a_page_that_nobody_sees_asks_for_nothing_and_one_that_gets_no_answer_says_so(tab: Tab, tmp_path: Path) -> None:
    with served(open_pages([str(write_run(tmp_path / "run"))])) as address:
        tab.open(f"{address}/training/")
        tab.value(HIDE)
        look_again(tab)
        assert tab.value("window.asked") == 0
        tab.value("{window.hidden = false}")
        look_again(tab)
        assert tab.value("window.asked") == 1
    assert tab.complaints == []
    soon(tab, "document.getElementById('link').textContent.startsWith('No answer from qie watch')")
    assert tab.value("document.querySelector('.progress p').textContent").startswith("step 40 of 50"), "it stays"
    tab.complaints.clear()


HIDE = """(async () => {
  await poll();
  window.hidden = true;
  window.asked = 0;
  Object.defineProperty(document, "hidden", {get: () => window.hidden});
  const asking = window.fetch;
  window.fetch = (...words) => ((window.asked += 1), asking(...words));
})()"""
