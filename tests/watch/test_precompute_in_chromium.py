"""The page of a precompute in a real browser, while real encoders fill the folder."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from qie.data.sources import Source, open_source
from qie.precompute import heartbeat, precompute
from qie.shards.excluded import read_excluded
from qie.stores import LocalFolder
from qie.types import Row
from qie.watch.places import open_pages
from tests.stats.chromium import PROGRAM, Tab
from tests.watch.live_runs import served
from tests.watch.test_watch_in_chromium import look_again, soon

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium: apt-get install chromium")

NASTY = "<img src=https://example.org/x.png onerror=alert(2)><script>window.ran = 1</script>"


@pytest.fixture(autouse=True)
def _quick(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "FIRST_BEAT_S", 0.0)
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.05)


@dataclass
class Gated:
    """Rows of which the later half comes when it is let through; captions are another's work."""

    source: Source
    gate: threading.Event = field(default_factory=threading.Event)

    def __len__(self) -> int:
        return 8

    def name(self, index: int) -> str:
        return f"{NASTY} {index}"

    def part(self, index: int) -> str:
        return ""

    def read(self, index: int) -> Row:
        if index >= 4:
            assert self.gate.wait(300)
        return replace(self.source.read(index), name=self.name(index), prompt=f"{NASTY} {index}")


def test_figures_move_pictures_appear_and_a_click_excludes(tab: Tab, encoder, photos: Path, tmp_path: Path) -> None:
    rows, shards = Gated(open_source(str(photos))), tmp_path / "shards"
    encoder = copy.copy(encoder)
    encoder.thumbnail_px = 64
    arguments = {"rows": (0, 8), "shard_size": 2, "tell": True}
    filling = threading.Thread(target=precompute, args=(rows, encoder, shards), kwargs=arguments)
    (shards / "progress").mkdir(parents=True)
    with served(open_pages([str(shards)])) as address:
        filling.start()
        try:
            for width, dark in ((400, True), (1200, False)):
                tab.open(f"{address}/precompute/", width=width, dark=dark)
                soon(tab, "document.querySelector('.tiles dd').firstChild.textContent === '4'")
                soon(tab, "document.images.length === 8 && [...document.images].every(one => one.naturalWidth)")
                soon(tab, "document.querySelector('#workers .state')?.textContent === 'alive'")
                assert tab.value("document.documentElement.scrollWidth") <= width
            assert tab.value("[...document.querySelectorAll('#newest h3')].map(one => one.textContent)") == [
                f"row {row}" for row in (3, 2, 1, 0)
            ]
            tab.value("document.querySelectorAll('#newest button')[1].click()")
            soon(tab, "document.querySelectorAll('#newest .excluded h3')[0]?.textContent === 'row 2excluded'")
            assert len(read_excluded(LocalFolder(shards))) == 1
            rows.gate.set()
            filling.join()
            look_again(tab)
            soon(tab, "document.querySelector('.tiles dd').firstChild.textContent === '8'")
            soon(tab, "document.querySelector('.states').textContent === 'finished'")
            soon(tab, "document.images.length === 16 && [...document.images].every(one => one.naturalWidth)")
        finally:
            rows.gate.set()
            filling.join()
        assert tab.value("document.querySelector('#newest .prompt').textContent") == f"{NASTY} 7"
        assert tab.value("window.ran") is None and tab.value("document.scripts.length") == 1
        assert {url.split("/")[2] for url in tab.requests} == {address.removeprefix("http://")}
        assert tab.complaints == []
