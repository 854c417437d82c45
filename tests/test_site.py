"""The built site, opened from a folder in a real browser: its search finds, and no page asks another host."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.stats.chromium import PROGRAM, Tab, chromium

pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium: apt-get install chromium"),
    pytest.mark.skipif(not all(map(find_spec, ("material", "mkdocstrings"))), reason="no mkdocs: make docs"),
]

FOUND = """new Promise((done) => {
  const box = document.querySelector("[data-md-component=search-query]");
  const list = document.querySelector(".md-search-result__list");
  const look = () => {
    const links = [...list.querySelectorAll("a")].map((link) => link.href);
    if (links.length) done(links);
  };
  new MutationObserver(look).observe(list, {childList: true, subtree: true});
  box.focus();
  box.value = "lifecycle rule";
  box.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
  setTimeout(() => done([]), 60000);
})"""
"""Types into the search box, and waits for the first results: for a minute, so that a search that is broken says so."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


def test_pages_opened_from_a_folder_are_searched_and_name_nothing_to_load_from_another_host(
    site: Path, tab: Tab
) -> None:
    for page in ("index.html", "guides/s3.html"):
        tab.open(site / page)
        found = [Path(link.partition("?")[0]) for link in tab.value(FOUND)]
        assert any("guides/s3.html" in str(link) for link in found), found
    assert {url.partition(":")[0] for url in tab.requests} == {"file"}
    assert tab.complaints == []
    loaded = re.compile(r"<(?:script|link|img|iframe|source)[^>]*(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
    pages = [page.read_text(encoding="utf-8") for page in site.rglob("*.html")]
    assert len(pages) > 40 and [found for page in pages for found in loaded.findall(page)] == []
