"""What tests of pages share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qie.watch import live_page
from tests.stats.chromium import Tab, chromium


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page reads its files each time that it is asked for."""
    monkeypatch.setattr(live_page, "FRESH_S", 0.0)
