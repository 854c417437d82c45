"""The page in a real browser: pictures are seen, nothing is complained about, nothing is asked for, no text runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from qie.shards.index import read_index
from tests.builders import make_sample, write_shard
from tests.stats.chromium import PROGRAM, Tab, chromium
from tests.stats.pages import COLOURS, SCRIPT, run, write_colours

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium: apt-get install chromium")

NASTY = "<img src=https://example.org/x.png onerror=alert(2)>"
PROMPTS = [SCRIPT, NASTY, "a\u202eb", "w" * 100_000, "\u0627\u062c\u0639\u0644 the sky night", "make it\n\n\nnight"]


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _quiet(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test's page asks for anything but itself, or complains; but for what the test says."""
    tab: Tab = request.getfixturevalue("tab")
    tab.requests.clear()
    tab.complaints.clear()
    yield
    tab.value("1")  # what was on its way is here now
    assert tab.complaints == []
    assert {url.partition(":")[0] for url in tab.requests} == {"file"} and len(set(tab.requests)) == 1


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six samples of six colours, with prompts of all kinds; skipped rows; a shard that cannot be read."""
    folder = tmp_path_factory.mktemp("shards")
    write_colours(folder, PROMPTS)
    write_colours(folder, [None, None, None], start=6)
    write_shard(folder / "gone", [make_sample(0)])
    (folder / "00000020-00000030.json").write_text("{")
    run(folder, "--html", folder / "page.html", code=1)
    return folder / "page.html"


def assert_pictures_are_seen(tab: Tab) -> None:
    """Each picture has its colour in its middle."""
    pixels = tab.picture()
    middle = "[...document.images].map(one => {const box = one.getBoundingClientRect(); return "
    middle += "[box.x + box.width / 2 + scrollX, box.y + box.height / 2 + scrollY]})"
    places = tab.value(middle)
    assert len(places) == len(COLOURS)
    for (x, y), colour in zip(places, COLOURS, strict=True):
        around = pixels[round(y) - 4 : round(y) + 4, round(x) - 4 : round(x) + 4].reshape(-1, 3)
        assert np.abs(around.astype(int) - colour).max() <= 6, f"{around.mean(axis=0)} where {colour} is due"


@pytest.mark.parametrize(
    ("dark", "width", "script"), [(False, 1200, True), (True, 400, True), (False, 400, False), (True, 1200, False)]
)
def test_pictures_are_seen_and_the_page_fits(tab: Tab, page: Path, dark: bool, width: int, script: bool) -> None:
    tab.open(page, width=width, dark=dark, script=script)

    assert_pictures_are_seen(tab)
    corner = tab.picture()[2, 2]
    assert corner.max() < 60 if dark else corner.min() > 220
    assert tab.value("document.documentElement.scrollWidth") <= width
    assert tab.value("document.querySelectorAll('.filter').length") == int(script)


def test_prompts_stay_text(tab: Tab, page: Path) -> None:
    tab.open(page)

    prompts = tab.value("[...document.querySelectorAll('.prompt')].map(one => one.textContent)")
    assert prompts[:3] == [SCRIPT, NASTY, r"a\u202eb"] and prompts[4:] == PROMPTS[4:]
    assert prompts[3] == "w" * 400 + " … (100,000 characters)"
    assert tab.value("document.scripts.length") == 1 and tab.value("document.images.length") == len(PROMPTS)


def test_long_words_and_many_lines_stay_in_their_cards(tab: Tab, page: Path) -> None:
    tab.open(page, width=400)
    sizes = "[one.scrollWidth, one.clientWidth, one.clientHeight]"
    for part in (".gallery > li", ".gallery .prompt"):
        boxes = tab.value(f"[...document.querySelectorAll('{part}')].map(one => {sizes})")
        assert len(boxes) == len(PROMPTS)
        assert all(inner <= outer and height < 700 for inner, outer, height in boxes), boxes


def test_samples_are_filtered_by_words(tab: Tab, page: Path) -> None:
    tab.open(page)
    tab.value(
        "{const box = document.querySelector('.filter input'); box.value = 'NIGHT make'; "
        "box.dispatchEvent(new Event('input'))}"
    )
    shown = "[...document.querySelectorAll('.gallery > li')].filter(one => one.offsetParent).map(one => "
    assert tab.value(shown + "one.querySelector('h3').textContent)") == ["row 5"]
    assert tab.value("document.querySelector('.filter span').textContent") == f"1 of {len(PROMPTS)}"


def test_the_command_that_excludes_a_sample_is_copied_by_a_click(tab: Tab, page: Path) -> None:
    tab.open(page)
    tab.value("document.addEventListener('copy', () => (window.taken = getSelection().toString()))")
    tab.value("navigator.clipboard.writeText = text => ((window.taken = text), Promise.resolve())")
    tab.value("document.querySelectorAll('.gallery .command button')[1].click()")
    key = read_index(page.with_name("00000000-00000006.json")).samples[1].key
    assert tab.value("window.taken") == f"qie-stats {page.parent} --exclude {key[:16]}"
    assert tab.value("document.querySelectorAll('.command button')[1].textContent") == "copied"


def test_skipped_rows_are_sorted_by_a_click(tab: Tab, page: Path) -> None:
    tab.open(page)
    rows = "[...document.querySelectorAll('table[data-sort] tbody tr')].map(one => one.cells[0].textContent)"
    click = "document.querySelector('table[data-sort] th button').click()"
    assert tab.value(rows) == ["6", "7", "8"]
    tab.value(click)
    tab.value(click)
    assert tab.value(rows) == ["8", "7", "6"]
    assert tab.value("document.querySelector('table[data-sort] th').ariaSort") == "descending"


@pytest.mark.parametrize(
    "attack",
    [
        "new Image().src = 'http://127.0.0.1:9/x.png'",
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))",
        "document.body.insertAdjacentHTML('beforeend', '<iframe src=\"data:text/html,x\"></iframe>')",
    ],
    ids=["image", "script", "frame"],
)
def test_even_markup_that_got_into_the_page_could_do_nothing(tab: Tab, page: Path, attack: str) -> None:
    tab.open(page)
    tab.value(attack)
    tab.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    complaints = " ".join(tab.complaints)
    assert "Content Security Policy" in complaints
    assert tab.value("window.ran") is None
    tab.complaints.clear()
    tab.requests[:] = [url for url in tab.requests if url.startswith("file:")]


def test_faults_and_skipped_rows_are_seen(tab: Tab, page: Path) -> None:
    tab.open(page)
    assert "00000020-00000030.json" in tab.value("document.querySelector('#faults').innerText")
    assert tab.value("document.querySelectorAll('rect.faulty').length") == 2, "in the strip and in its legend"
    assert len(read_index(page.parent / "00000006-00000009.json").skipped) == 3
    assert "the target is no image" in tab.value("document.querySelector('#skipped').innerText")
