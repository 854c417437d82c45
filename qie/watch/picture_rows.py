"""Rows of pictures: what was edited, what came out of it at a step, and the slider that goes through the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qie.html_report.markup import Html, cut, join, panel, tag

MOST_ROWS = 64
MOST_PROMPT = 400


def picture_rows(runs: Sequence[Mapping[str, Any]]) -> Html:
    """The pictures of runs; those of the same prompt, images and seed stand beside each other."""
    found: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for number, run in enumerate(runs):
        for row in run["pictures"]:
            found.setdefault(row["id"], []).append((number, row))
    if not found:
        return join()
    newest = max(row["steps"][-1] for rows in found.values() for _, row in rows)
    now = [rows for rows in found.values() if any(_is_current(runs[number], row) for number, row in rows)]
    before = [rows for rows in found.values() if rows not in now]
    steps = sorted({step for rows in found.values() for _, row in rows for step in row["steps"]})
    parts = [_row(rows, runs) for rows in now[:MOST_ROWS]]
    if before:
        earlier = [_row(rows, runs) for rows in before[:MOST_ROWS]]
        words = tag("summary", f"{len(before):,} of earlier prompts")
        parts.append(tag("details", words, *earlier, data_name="earlier"))
    left = max(len(now) - MOST_ROWS, 0)
    return tag(
        "section",
        tag("h2", "Validation pictures"),
        _slider(steps, newest),
        *parts,
        tag("p", f"and {left:,} more prompts", class_="soft") if left else "",
        id="pictures",
        data_steps=" ".join(map(str, steps)),
    )


def _is_current(run: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    return bool(row["steps"][-1] == max(one["steps"][-1] for one in run["pictures"]))


def _slider(steps: Sequence[int], newest: int) -> Html:
    if len(steps) < 2:
        return tag("p", f"step {newest:,}", class_="soft")
    last = len(steps) - 1
    slider = tag(
        "input", type="range", min=0, max=last, value=last, step=1, data_slider="", aria_label="step of the pictures"
    )
    return tag("div", slider, tag("output", f"step {newest:,}"), class_="slider")


def _row(rows: Sequence[tuple[int, Mapping[str, Any]]], runs: Sequence[Mapping[str, Any]]) -> Html:
    number, first = rows[0]
    figures = [
        _figure(f"{number}/{first['id']}/input-{place}", "input" if first["inputs"] == 1 else f"input {place + 1}")
        for place in range(first["inputs"])
    ]
    if first["target"]:
        figures.append(_figure(f"{number}/{first['id']}/target", "target of training"))
    for at, row in rows:
        name = f"{at}/{row['names'][-1]}"
        label = runs[at]["name"] if len(runs) > 1 else ""
        figures.append(_figure(name, f"step {row['steps'][-1]:,}", run=label, steps=" ".join(map(str, row["steps"]))))
    negative = first["negative_prompt"]
    about = [f"seed {first['seed']}"] if first["seed"] is not None else []
    about += [f"not: {cut(negative, MOST_PROMPT)}"] if negative and negative.strip() else []
    return panel(
        tag("p", cut(first["prompt"], MOST_PROMPT), class_="prompt", dir="auto"),
        tag("div", *figures, class_="pictures"),
        tag("p", tag("bdi", ", ".join(about)), class_="soft") if about else "",
    )


def _figure(name: str, words: str, *, run: str = "", steps: str | None = None) -> Html:
    number, _, rest = name.partition("/")
    image = tag("img", src=f"picture/{number}/small/{rest}", alt=words, loading="lazy")
    link = tag("a", image, href=f"picture/{name}", target="_blank", rel="noopener")
    caption = tag("figcaption", tag("bdi", f"{run}, ") if run else "", tag("span", words))
    return tag("figure", link, caption, data_by_step=steps)
