"""The measurements as Markdown: tables of docs/benchmarks.md and docs/scaling.md, and the README's chart."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chart import memory_chart
from measuring import ROOT, Row, described

DATA = ROOT / "docs" / "benchmarks.json"
PAGE = ROOT / "docs" / "benchmarks.md"
SCALING = ROOT / "docs" / "scaling.md"
README, INDEX = ROOT / "README.md", ROOT / "docs" / "index.md"
CHART = ROOT / "docs" / "memory.svg"

HEAD = ("what", "compared with", "result", "range", "runs", "medians")
NOT_YET = "not measured yet"
ALONE = "–"
"""Stands for the peer of a row that has none."""

HEADLINES = (
    ("encoders.py", "vae", "Encoding an image, without the VAE's time axis"),
    ("encoders.py", "prompt", "Encoding the prompt, and the null prompt as a continuation"),
    ("read.py", "webdataset shuffled", "Reading samples of 11 MB, shuffled"),
    ("read.py", "qwen-image-finetune's .pt files shuffled", "Reading samples of 11 MB, shuffled"),
    ("claims.py", "bytes pt", "Size of a sample"),
    ("pipeline.py", "engine", "Writing shards, without the encoders' time"),
    ("train_step.py", "qie cached", "A training step, tiny model"),
    ("train_step.py", "qie cached, compile", "A training step, tiny model, compiled"),
    ("loop.py", "outside", "Time of the training loop outside model and optimizer"),
    ("claims.py", "computed qie 1024 checkpointing", "A cached training step of the released model, computed"),
)
"""What the page begins with: script, key, and what they are called there."""


def load(file: Path = DATA) -> dict[str, Any]:
    """What is stored: for "cpu" and "gpu" by script the day, machine, versions, seconds and rows."""
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {"cpu": {}, "gpu": {}} | found


def rows_of(run: Mapping[str, Any]) -> list[Row]:
    return [Row(**row) for row in run["rows"]]


def filled(text: str, name: str, content: str) -> str:
    """The text with `content` between the markers of that name. Raises ValueError unless both are there, once."""
    pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
    text, times = pattern.subn(lambda match: f"{match[1]}{content}\n{match[2]}", text)
    if times != 1:
        raise ValueError(f"<!-- {name}:begin --> and :end --> are there {times} times")
    return text


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def full_table(runs: Mapping[str, Any], planned: Mapping[str, str]) -> str:
    """One table; before the rows of a script stands the command that repeats them."""
    lines = []
    for script, arguments in planned.items():
        command = f"**`python benchmarks/{script}{f' {arguments}' if arguments else ''}`**"
        run = runs.get(script)
        if run is None:
            lines.append([command, "", NOT_YET, "", "", ""])
            continue
        lines.append([f"**`{run['command']}`**", "", "", "", "", f"{run['date']}, {run['seconds']:.0f} s"])
        for row in rows_of(run):
            times = str(row.runs) if row.runs else "computed"
            lines.append([row.what, row.beside or ALONE, f"**{row.found}**", row.spread, times, row.detail])
        missing = ((one["what"], one["why"].replace("|", "/")) for one in run.get("missing", ()))
        lines += [[what, ALONE, "not measured", "", "", why] for what, why in missing]
    return markdown(HEAD, lines)


def machines(runs: Mapping[str, Any]) -> str:
    """A line for each setting in which scripts ran, and which did."""
    settings: dict[str, list[str]] = {}
    for script, run in runs.items():
        where = {name: value for name, value in run["machine"].items() if name != "load"}
        told = described(where | {"load": ""}).partition(", load")[0]
        versions = ", ".join(f"{name} {at}" for name, at in run["versions"].items())
        settings.setdefault(f"{told}; {versions}", []).append(f"{script} {run['machine']['load']}")
    lines = [f"- {where}. Load when each began: {', '.join(scripts)}." for where, scripts in settings.items()]
    return "\n".join(lines) or f"- {NOT_YET}"


def claims_table(data: Mapping[str, Any]) -> str:
    """What qwen-image-finetune says, and what was found: measured with tiny models, computed for the released one."""
    run = data["cpu"].get("claims.py")
    found = {row.key: row for row in rows_of(run)} if run else {}

    def of(*keys: str) -> str:
        return "; ".join(f"{name}: {found[key].found}" if key in found else NOT_YET for name, key in _named(keys))

    lines = [
        (
            "2-3× faster after the first epoch",
            of("plain=speed plain", "qie=speed qie"),
            of("1024²=computed plain 1024 checkpointing", "512²=computed plain 512 checkpointing"),
        ),
        (
            "30-50 % less memory",
            of("plain=memory plain", "qie=memory qie"),
            of("bf16=computed memory plain None", "fp8=computed memory plain fp8", "nf4=computed memory plain nf4"),
        ),
        ("gradient checkpointing: 20-50 % less memory", "", of("bf16=computed checkpointing")),
        ("~10-20 % of the dataset's size", "", of("PNG=bytes PNG", "JPEG=bytes JPEG")),
        (
            "~95-99 % hits",
            of("nothing changed=hits same", "files renamed=hits renamed", "one control changed=hits control"),
            "the same",
        ),
    ]
    return markdown(("claim", "measured, tiny model", "computed, released model"), lines)


def _named(keys: Sequence[str]) -> list[tuple[str, str]]:
    return [(name, key) for name, _, key in (one.partition("=") for one in keys)]


def headlines(data: Mapping[str, Any]) -> str:
    lines, days = [], set()
    for script, key, name in HEADLINES:
        run = data["cpu"].get(script)
        row = next((row for row in rows_of(run) if row.key == key), None) if run else None
        if run is None or row is None:
            lines.append([name, ALONE, NOT_YET, f"`benchmarks/{script}`"])
            continue
        days.add(run["date"])
        spread = f" ({row.spread})" if row.spread else ""
        lines.append([name, row.beside or ALONE, f"**{row.found}**{spread}", f"`benchmarks/{script}`"])
    first = next(iter(data["cpu"].values()), None)
    where = f"{first['machine']['cores']} cores of an {first['machine']['cpu']}" if first else NOT_YET
    cards = {run["machine"].get("gpu") for run in data["gpu"].values()}
    gpu = f"some also on {', '.join(sorted(filter(None, cards)))}" if cards else "nothing has run on a GPU yet"
    below = f"Measured on {where}, {' and '.join(sorted(days)) or NOT_YET}; {gpu}."
    return f"{markdown(('', 'compared with', 'qie', 'script'), lines)}\n\n{below}"


def speed(data: Mapping[str, Any]) -> str:
    """The README's sentence about speed: of a GPU, once there is one."""
    run = data["gpu"].get("gpu.py")
    if run is None:
        rows = {row.key: row for row in rows_of(data["cpu"]["train_step.py"])}
        eager, compiled = (rows[key].value for key in ("qie cached", "qie cached, compile"))
        return (
            "Nothing has run on a GPU yet. With a tiny model on a CPU, a cached training step is "
            f"{eager:.2f} times as fast as a plain loop's, and {compiled:.2f} times with `train.compile`."
        )
    rows = {row.key: row for row in rows_of(run)}
    steps = [row for key, row in rows.items() if key.startswith("step ") and row.unit == "× as fast"]
    parts = []
    if "step default" in rows and steps:
        best = max(steps, key=lambda row: row.value)
        parts.append(
            f"a training step of the released shapes is **{rows['step default'].found}** as a plain loop of diffusers "
            f"and peft, and {best.found} at best ({best.key.removeprefix('step ')})"
        )
    if "encode" in rows and rows["encode"].unit == "× as fast":
        parts.append(f"rows are encoded **{rows['encode'].found}** as by diffusers' pipeline")
    found = "; ".join(parts) or "neither steps nor encoding were measured"
    return f"On one {run['machine']['gpu']}, with random weights, {found}."


def status(data: Mapping[str, Any]) -> str:
    cards = [run["machine"]["gpu"] for run in data["gpu"].values()]
    if not cards:
        return "This is version 0.1. It has not run on a GPU yet, so every figure of GPU memory is an estimate."
    return (
        f"This is version 0.1. On a GPU ({cards[0]}) it has run with random weights of the released shapes; figures of "
        "GPU memory are estimates, unless they are called measured."
    )


def compared(data: Mapping[str, Any], planned: Mapping[str, Mapping[str, str]]) -> dict[Path, str]:
    """What the pages with figures of benchmarks have to be, and the chart."""
    page = PAGE.read_text(encoding="utf-8")
    for kind in ("cpu", "gpu"):
        page = filled(page, f"{kind} machine", machines(data[kind]))
        page = filled(page, f"{kind} table", full_table(data[kind], planned[kind]))
    page = filled(page, "headlines", headlines(data))
    pages = {PAGE: filled(page, "claims table", claims_table(data))}
    pages[README] = filled(README.read_text(encoding="utf-8"), "gpu", speed(data))
    for place in (README, INDEX):
        pages[place] = filled(pages.get(place) or place.read_text(encoding="utf-8"), "status", status(data))
    claims = data["cpu"].get("claims.py")
    return pages | ({CHART: memory_chart(rows_of(claims))} if claims else {})


def render(data: Mapping[str, Any], planned: Mapping[str, Mapping[str, str]]) -> dict[Path, str]:
    """What all pages have to be."""
    return compared(data, planned) | {SCALING: scaling_page(data)}


def scaling_page(data: Mapping[str, Any]) -> str:
    from paper import Table, on_paper  # which counts models, and is not needed where only numbers are compared

    run = data["cpu"].get("scaling.py")
    page = SCALING.read_text(encoding="utf-8")
    for table in on_paper(run["curve"] if run else []):
        page = filled(page, table.key, str(table))
    simulated = data["cpu"].get("simulate.py")
    return filled(page, "simulated", str(Table.of("simulated", simulated["simulated"])) if simulated else NOT_YET)
