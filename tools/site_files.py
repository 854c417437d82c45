"""Hooks of mkdocs.yml: files outside docs/ that pages link to become part of the site.

On GitHub a page in docs/ links to `../configs/demo.yaml`, and CHANGELOG.md to `docs/format.md`. In the site docs/ is
the root, so both lose a step. Files are added as they are, and the pages below are added as pages.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md")
FILES = ("configs/*.yaml", "configs/accelerate/*.yaml", "Makefile")
LOOSE = re.compile(r'<autoref [^>]*?identifier="([^"]*[^\w."][^"]*)"[^>]*>(.*?)</autoref>')
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def outside() -> list[str]:
    """Paths of the repository that are part of the site, though not in docs/."""
    return [*PAGES, *sorted(str(path.relative_to(ROOT)) for pattern in FILES for path in ROOT.glob(pattern))]


def relinked(text: str, page: str) -> str:
    """The Markdown of the site's `page`, with links as they have to be in the site."""
    return LINK.sub(lambda match: match[1] + _moved(match[2], page) + match[3], text)


def _moved(target: str, page: str) -> str:
    if page in PAGES:
        return target.removeprefix("docs/")
    up = "../" * page.count("/")
    inside = target.removeprefix(f"{up}../")
    return up + inside if inside != target and inside.partition("#")[0] in outside() else target


def on_files(files: Any, config: Any) -> Any:
    file = importlib.import_module("mkdocs.structure.files").File
    for path in outside():
        files.append(file.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings speak of `name[@revision][?config]`, which is no link to `?config`."""
    return LOOSE.sub(r"[\2][\1]", html)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return relinked(markdown, page.file.src_uri)
