"""The page of all rows in a real browser, as a file: it shows, sorts, filters and picks any row, and runs no text."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qie.html_report import all_rows
from qie.shards.index import read_index
from qie.shards.pictures import SmallPictures, encode_pictures
from tests.builders import make_sample, write_shard
from tests.stats.chromium import PROGRAM, Tab, chromium
from tests.stats.pages import COLOURS, SCRIPT, run

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium: apt-get install chromium")

ROWS = 60
FRAMES = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
TITLES = "[...document.querySelectorAll('.gallery h3')].map(one => one.textContent)"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 rows of which the 7th was skipped; the 50th has two controls and a mask, the 51st a rejected target. Pictures
    are in files."""
    folder = tmp_path_factory.mktemp("all") / "my shards"

    def sample(row: int) -> Any:
        colours = [Image.new("RGB", (48, 32), COLOURS[(row + one) % len(COLOURS)]) for one in range(3)]
        controls = 2 if row == 50 else 1
        mask = Image.new("L", (48, 32), 0) if row == 50 else None
        rejected = colours[2] if row == 51 else None
        pictures = encode_pictures(SmallPictures(colours[0], tuple(colours[1 : 1 + controls]), mask, rejected))
        target = (8, 8) if row % 10 == 3 else (4, 6)
        made = make_sample(row, target=target, controls=((4, 6),) * controls, tokens=9 + row % 20, prompt=prompt(row))
        return replace(made, pictures=pictures)

    write_shard(folder, [None if row == 7 else sample(row) for row in range(ROWS)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(all_rows, "MOST_INLINE", 10)
        run(folder, "--html", folder.parent / "page.html", "--gallery", "all")
    return folder.parent / "page.html"


def prompt(row: int) -> str:
    return SCRIPT if row == 0 else f"make it {'night' if row % 30 == 4 else 'day'}"


def opened(tab: Tab, page: Path, **how: Any) -> None:
    """Open a page and wait until its rows and their pictures are there."""
    tab.requests.clear()
    tab.complaints.clear()
    tab.open(page, **how)
    arrived(tab)


def arrived(tab: Tab) -> None:
    due = "document.querySelector('.count') && [...document.images].every(one => one.complete)"
    due += " && [...document.querySelectorAll('.shots')].every(one => one.children.length)"
    for _ in range(200):
        if tab.value(due):
            return
        tab.value(FRAMES)
    raise AssertionError(tab.complaints)


def choose(tab: Tab, label: str, value: str, event: str = "change") -> None:
    found = f"[...document.querySelectorAll('.filter select, .filter input')].find(one => {label})"
    tab.value(f"{{const it = {found}; it.value = {value!r}; it.dispatchEvent(new Event({event!r}))}}")
    arrived(tab)


def select(name: str) -> str:
    return f"one.closest('label')?.firstChild.textContent === {name!r}"


@pytest.mark.parametrize(("dark", "width"), [(False, 1200), (True, 400)])
def test_controls_stand_beside_targets_and_a_mask_dims_what_does_not_count(
    tab: Tab, page: Path, dark: bool, width: int
) -> None:
    opened(tab, page, dark=dark, width=width)
    choose(tab, "one.type === 'search'", "row 50", "input")
    assert tab.value(TITLES) == ["row 50"]
    assert tab.value("document.documentElement.scrollWidth") <= width
    middle = "[...document.querySelectorAll('.shot')].map(one => {const box = one.getBoundingClientRect(); return "
    middle += "[box.x + box.width / 2 + scrollX, box.y + box.height / 2 + scrollY]})"
    pixels, due = tab.picture(), [COLOURS[3], COLOURS[4], COLOURS[2]]
    for number, ((x, y), colour) in enumerate(zip(tab.value(middle), due, strict=True)):
        found = pixels[round(y) - 2 : round(y) + 2, round(x) - 2 : round(x) + 2].reshape(-1, 3).mean(axis=0)
        expected = np.array(colour) * (0.28 if number == 2 else 1)
        assert np.abs(found - expected).max() <= 12, (number, found, expected)
    files = {url.removeprefix(page.parent.as_uri() + "/") for url in tab.requests}
    chunks = {f"page_files/pictures-{number:05d}.js" for number in range(4)}
    assert {"page.html", "page_files/facts.js"} <= files <= {"page.html", "page_files/facts.js", *chunks}
    assert tab.complaints == []


@pytest.mark.parametrize("width", [1200, 400])
def test_a_rejected_target_stands_beside_its_target_as_large_as_it(tab: Tab, page: Path, width: int) -> None:
    opened(tab, page, width=width)
    choose(tab, "one.type === 'search'", "row 51", "input")
    boxes = "['target', 'rejected'].map(name => document.querySelector('.shot.' + name).getBoundingClientRect())"
    target, rejected = tab.value(f"{boxes}.map(box => [box.x, box.y, box.width, box.height])")
    assert rejected[1:] == target[1:] and target[2] < rejected[0] - target[0] < target[2] + 4
    alts = tab.value("[...document.images].map(one => one.alt)")
    assert alts == [f"{what} of row 51" for what in ("control", "target", "rejected target")]


def test_all_rows_are_sorted_filtered_and_paged_not_those_on_the_screen_alone(tab: Tab, page: Path) -> None:
    opened(tab, page)
    assert len(tab.value(TITLES)) == 24 and tab.value("document.querySelector('.count').textContent") == "60 of 60 rows"
    tab.value("document.querySelector('.pager button:last-child').click()")
    arrived(tab)
    assert tab.value(TITLES) == [f"row {row}" for row in [*range(49, ROWS), 7]], "what has no sample comes last"
    choose(tab, select("sort by"), "tokens")
    choose(tab, "one.value === 'up'", "down")
    assert tab.value(TITLES)[:3] == ["row 59", "row 39", "row 19"]
    choose(tab, "one.ariaLabel === 'least tokens'", "20", "input")
    choose(tab, "one.ariaLabel === 'most tokens'", "21", "input")
    assert tab.value(TITLES) == [f"row {row}" for row in (52, 32, 12, 51, 31, 11)]
    choose(tab, "one.ariaLabel === 'least tokens'", "", "input")
    choose(tab, "one.ariaLabel === 'most tokens'", "", "input")
    choose(tab, select("reason"), "any")
    assert tab.value(TITLES) == ["row 7"]
    assert tab.value("document.querySelector('.reason').textContent") == "skipped: the target is no image"
    choose(tab, select("reason"), "")
    sizes = tab.value("[...document.querySelectorAll('.filter select')[0].options].map(one => one.textContent)")
    assert sizes[1:3] == ["48×32 px from 48×32 (52)", "64×64 px from 48×32 (6)"]
    choose(tab, select("size"), "1")
    choose(tab, "one.type === 'search'", "DAY make", "input")
    assert sorted(tab.value(TITLES)) == [f"row {row}" for row in (13, 23, 3, 33, 43, 53)]
    assert tab.complaints == []


def test_several_picked_samples_are_one_command(tab: Tab, page: Path) -> None:
    opened(tab, page)
    keys = [entry.key[:16] for entry in read_index(page.parent / "my shards" / "00000000-00000060.json").samples]
    tab.value("navigator.clipboard.writeText = text => ((window.taken = text), Promise.resolve())")
    tab.value("document.querySelectorAll('[data-pick]')[1].click()")
    tab.value("document.querySelector('.pager button:last-child').click()")
    tab.value("document.querySelectorAll('[data-pick]')[0].click()")
    tab.value("document.querySelector('.picks button').click()")
    # Of the row that was skipped there is no sample: row 49 is the 48th.
    assert (
        tab.value("window.taken") == f"qie-stats '{page.parent / 'my shards'}' --exclude {keys[1]} --exclude {keys[48]}"
    )
    tab.value("document.querySelector('.pager button').click()")
    assert tab.value("[...document.querySelectorAll('[data-pick]')].map(one => one.checked).indexOf(true)") == 1
    tab.value("document.querySelector('.picks button:last-child').click()")
    assert tab.value("document.querySelector('.picks').offsetParent") is None


def test_prompts_stay_text_and_files_run_only_when_the_pages_own_script_asks(tab: Tab, page: Path) -> None:
    opened(tab, page)
    assert tab.value("document.querySelector('.gallery .prompt').textContent") == SCRIPT
    attack = "<script>window.ran = 1</script><script src='page_files/evil.js'></script>"
    evil = page.with_name("evil.html")
    evil.write_text(page.read_text("utf-8").replace("<footer>", f"{attack}<footer>"), "utf-8")
    (page.parent / "page_files" / "evil.js").write_text("window.ran = 2")
    opened(tab, evil)
    assert tab.value("window.ran") is None and len(tab.value(TITLES)) == 24
    assert len([one for one in tab.complaints if "Content Security Policy" in one]) == 2


def test_without_its_files_the_page_shows_some_samples_and_says_what_is_missing(tab: Tab, page: Path) -> None:
    alone = page.parent / "alone" / "page.html"
    alone.parent.mkdir()
    shutil.copy(page, alone)
    tab.open(alone)
    for _ in range(100):
        if tab.value("document.querySelector('#samples .verdict')?.textContent"):
            break
        tab.value(FRAMES)
    said = "All 60 rows are in the folder page_files, which belongs beside this page."
    assert tab.value("document.querySelector('#samples .verdict').textContent") == said
    assert tab.value("document.querySelectorAll('.gallery > li').length") == 24
