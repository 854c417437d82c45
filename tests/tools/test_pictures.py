"""Pictures of the documentation are made by tools/pictures.py, and are on a page."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from tests.builders import ROOT
from tools.pictures import PICTURES

DOCS = ROOT / "docs"
SUFFIXES = {".png", ".jpg", ".jpeg", ".svg", ".webp", ".gif"}


def test_each_picture_of_the_documentation_has_a_function_that_makes_it_and_a_page_that_shows_it() -> None:
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*") if path.suffix in SUFFIXES}
    assert there == set(PICTURES)
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *DOCS.rglob("*.md")))
    assert [name for name in there if not any(f"({at}{name})" in pages for at in ("", "docs/", "../"))] == []


@pytest.mark.parametrize("name", ["data.svg", "memory.svg"])
def test_a_drawing_is_what_its_function_draws(name: str, tmp_path: Path) -> None:
    PICTURES[name](Namespace(), tmp_path / name)
    assert (tmp_path / name).read_bytes() == (DOCS / name).read_bytes()
