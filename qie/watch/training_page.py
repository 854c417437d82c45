"""The page of runs: their figures, their curves, their pictures, their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qie.html_report.markup import Html, join, panel, tag
from qie.quantities import human_bytes, human_time
from qie.watch.controls import copied
from qie.watch.curves import Chart, Curve, drawn
from qie.watch.live_page import LiveFacts, LivePage
from qie.watch.run_reader import RunReader

STATES = {
    "training": ("good", "training"),
    "validating": ("good", "validating"),
    "paused": ("warn", "paused"),
    "stopped": ("soft", "stopped, and can be resumed"),
    "finished": ("good", "finished"),
    "failed": ("bad", "failed"),
    "gone": ("bad", "its process has ended without a word"),
    "silent": ("warn", "silent"),
    "waiting": ("soft", "nothing written yet"),
}


def training_page(folders: Sequence[Path]) -> LivePage:
    """A page of runs."""
    readers = [RunReader(folder) for folder in folders]
    return LivePage(
        "training",
        "Training",
        lambda: {"runs": [reader.read() for reader in readers]},
        render_training,
        title=_title,
    )


def _title(facts: LiveFacts) -> str:
    run = facts["runs"][0]
    return f"{run['step']:,} · {run['name']}" if len(facts["runs"]) == 1 else f"{len(facts['runs'])} runs"


def render_training(facts: LiveFacts) -> Mapping[str, Html]:
    """The page's parts."""
    runs = facts["runs"]
    return {
        "top": tag("header", *map(_head, runs)),
        "curves": tag("section", tag("h2", "Curves"), tag("div", *_charts(runs), class_="trio"), id="curves"),
        "checkpoints": _checkpoints(runs),
    }


def _head(run: Mapping[str, Any]) -> Html:
    kind, words = STATES.get(run["state"], ("soft", str(run["state"])))
    done = f"{run['step']:,}" + (f" of {run['steps']:,}" if run["steps"] else "")
    recent = run["recent"]
    validation = run["validations"][-1]["loss"] if run["validations"] else None
    tiles = {
        "steps": done,
        "loss": _figure(recent["loss"], ".4f"),
        "validation loss": _figure(validation, ".4f"),
        "samples a second": _figure(recent["samples_per_s"], ".2f"),
        "time left": human_time(recent["left_s"])
        if recent["left_s"] is not None and run["state"] == "training"
        else "–",
        "waiting for data": _figure(recent["waiting"], ".1%"),
        "peak memory": human_bytes(recent["peak_memory_bytes"]) if recent["peak_memory_bytes"] else "–",
        "MFU": _figure(recent["mfu"], ".1%"),
    }
    shown = [tag("div", tag("dt", name), tag("dd", value)) for name, value in tiles.items() if value != "–"]
    return join(
        tag("p", "Training run", class_="soft"),
        tag("h1", tag("bdi", run["name"])),
        tag("p", tag("span", words, class_=f"state {kind}"), class_="states"),
        tag("p", tag("bdi", run["place"]), class_="place"),
        tag("dl", *shown, class_="tiles"),
    )


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _charts(runs: Sequence[Mapping[str, Any]]) -> list[Html]:
    def curves(name: str) -> list[Curve]:
        found = []
        for number, run in enumerate(runs):
            own = run["curves"][name]
            label = run["name"] if len(runs) > 1 else ""
            found.append(Curve(label, own["steps"], own["values"], own["low"], own["high"], number % 6))
        return found

    charts = [
        Chart("Loss", "mean of the last steps", curves("smooth_loss")),
        Chart("Speed", "samples a second", curves("samples_per_s"), zero=True),
        Chart("Learning rate", "", curves("lr"), number=lambda value: f"{value:.3g}", zero=True),
        Chart("Gradient norm", "before clipping", curves("grad_norm"), zero=True),
        Chart("Waiting for data", "part of a step", curves("waiting"), number=lambda value: f"{value:.0%}", zero=True),
        Chart("Memory", "the most so far", curves("peak_memory_bytes"), number=human_bytes, zero=True),
        Chart("MFU", "of what the GPU can do", curves("mfu"), number=lambda value: f"{value:.0%}", zero=True),
    ]
    return [panel(drawn(chart)) for chart in charts if any(any(v is not None for v in c.values) for c in chart.curves)]


def _checkpoints(runs: Sequence[Mapping[str, Any]]) -> Html:
    lines = [
        panel(
            tag("h3", one["name"], tag("small", f"{human_bytes(one['bytes'])}")),
            copied(f"qie train --config CONFIG.yaml --resume {run['place']}/{one['name']}"),
        )
        for run in runs
        for one in reversed(run["checkpoints"])
    ]
    body = lines or [tag("p", "No checkpoint yet.", class_="soft")]
    return tag("section", tag("h2", "Checkpoints"), *body, id="checkpoints")
