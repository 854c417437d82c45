"""The page: one file that needs no other, shows the summary of table and JSON, and asks no network for anything."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from qie.errors import UsageError
from qie.html_report import sections
from qie.html_report.all_rows import write_all_rows
from qie.html_report.gallery import Look, look_at
from qie.html_report.markup import Html, tag
from qie.paths import local_path, require_writable
from qie.stats import Summary
from qie.stores import File, LocalFolder

if TYPE_CHECKING:
    from qie.html_report.decoding import VaeDecoder

ENDINGS = (".html", ".htm")


def write_report(
    path: Path,
    indexes: Sequence[File],
    summary: Summary,
    places: Sequence[str],
    *,
    gallery: int,
    all_rows: bool = False,
    decoder: VaeDecoder | None,
    verified: bool,
    progress: Callable[[int], object],
) -> Summary:
    """Look into some records and write the page. Returns the summary with the faults found on the way.

    With `all_rows`, the page shows every row, and files beside it hold their pictures if they are many.
    """
    look = look_at(indexes, summary, gallery=gallery, decode=decoder, progress=progress)
    looked = look.done
    faults, rows = look.faults, None
    if all_rows:
        rows, found = write_all_rows(
            indexes,
            files_beside(path),
            rows=summary.samples,
            decode=decoder,
            progress=lambda done: progress(looked + done),
        )
        faults = list(dict.fromkeys([*faults, *found]))
    summary = replace(summary, faults=summary.faults + faults)
    other = decoder is not None and decoder.content not in {one["vae"] for one in summary.recipe_fields.values()}
    write_page(path, render(summary, look, places, verified=verified, other_vae=other, all_rows=rows))
    return summary


def files_beside(path: Path) -> LocalFolder:
    """The folder of a page's other files, named as browsers name it."""
    return LocalFolder(path.with_name(f"{path.stem}_files"))


def render(
    summary: Summary,
    look: Look,
    places: Sequence[str],
    *,
    verified: bool = False,
    other_vae: bool = False,
    all_rows: Mapping[str, object] | None = None,
) -> str:
    """The page. Equal arguments give equal text.

    Args:
        summary: of the shards, with all faults that are to be told.
        look: what some of their records hold.
        places: the shards, as they were asked for.
        verified: every shard was rehashed.
        other_vae: pictures were decoded by another VAE than the recipe names.
        all_rows: what `write_all_rows` has for the page.
    """
    looked_at = look.latents.samples if look.latents else 0
    parts = (
        sections.faults(summary),
        sections.coverage(summary),
        sections.section(
            "distributions",
            tag("div", sections.lengths(summary), sections.latents(look.latents), class_="trio"),
            sections.sizes(summary),
        ),
        sections.pairs(look, summary),
        sections.gallery(look, summary, other_vae, all_rows),
        sections.skipped(summary),
        sections.recipes(summary),
    )
    return document(
        f"{summary.samples:,} samples in {summary.shards:,} shards",
        sections.header(summary, places, verified=verified, looked_at=looked_at),
        tag("main", *parts),
        tag("footer", "Written by qie-stats --html."),
        files_too=all_rows is not None and "folder" in all_rows,
    )


def document(title: str, *body: str, files_too: bool = False) -> str:
    """A page of this body, in the report's style, that needs no other file, unless its script asks for some."""
    style, script = (
        Html(files("qie.html_report").joinpath(name).read_text("utf-8")) for name in ("page.css", "page.js")
    )
    head = (
        tag("meta", charset="utf-8"),
        # Nothing is fetched, no script runs but the page's own: not even if something of a shard were taken for markup.
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(style, script, files_too)),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
        tag("style", style),
    )
    whole = tag("html", tag("head", *head), tag("body", *body, tag("script", script)), lang="en")
    return f"<!DOCTYPE html>\n{whole}\n"


def check_place(place: str) -> Path:
    """The file of a page. Raises UsageError when it cannot be written: for a check before the work, not after it."""
    path = local_path(place)
    if path.suffix.lower() not in ENDINGS:  # or a pattern that the shell expanded could name a shard
        raise UsageError("--html names no page", where=place, expected="a file that ends in .html")
    require_writable(path)
    LocalFolder(path.parent).path(path.name)
    return path


def write_page(path: Path, page: str) -> None:
    """Write a page whole or not at all. Raises StoreError when it cannot be written."""
    LocalFolder(path.parent).write(path.name, page.encode())


def _policy(style: str, script: str, files_too: bool) -> str:
    """What the page may do. Scripts in files run only if its own script, known by its hash, asks for them."""

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    allowed = {
        "style-src": digest(style),
        "script-src": digest(script) + (" 'strict-dynamic'" if files_too else ""),
        "img-src": "data:",
    }
    fixed = "default-src 'none'; base-uri 'none'; form-action 'none'"
    return "; ".join([fixed, *(f"{name} {source}" for name, source in allowed.items())])
