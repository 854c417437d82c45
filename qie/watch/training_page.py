"""The page of runs: how they are getting on, their curves, their pictures, their checkpoints, and their buttons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from qie.errors import UsageError
from qie.html_report.charts import plain_number
from qie.html_report.markup import Html, cut, foreign, join, panel, part_bar, table, tag
from qie.quantities import human_bytes, human_count, human_time
from qie.watch.controls import button, copied
from qie.watch.curves import KINDS, POINTS, WIDE, Chart, Curve, drawn
from qie.watch.differences import differing
from qie.watch.live_page import LiveFacts, LivePage, WebFile
from qie.watch.picture_rows import picture_rows
from qie.watch.run_reader import LIVE, RECENT, RunReader
from qie.watch.run_requests import obey, other_prompts

RunFacts = Mapping[str, Any]

STATES = {
    "training": ("good", "training"),
    "validating": ("good", "validating"),
    "paused": ("warn", "paused"),
    "stopped": ("soft", "stopped after a checkpoint"),
    "finished": ("good", "finished"),
    "failed": ("bad", "failed"),
    "gone": ("bad", "ended without a word"),
    "silent": ("warn", "silent"),
    "waiting": ("soft", "nothing written yet"),
}
LEVELS = ("σ 0 to ¼: detail", "σ ¼ to ½", "σ ½ to ¾", "σ ¾ to 1: composition")
FURTHER = {
    "accuracy": ("Accuracy", "pairs whose target has the larger reward", "held-out pairs", "{:.0%}".format),
    "margin": ("Margin", "the target's reward over the rejected one's", "held-out pairs", plain_number),
    "preserved_loss": ("Preserved loss", "how far from the base, on preserved rows", "rows kept out", plain_number),
}
"""Numbers that not every run has: title, what they are in training and in validations, and how they are written."""
MOST_CHECKPOINTS = 100
MOST_VALUE = 200


def training_page(folders: Sequence[Path]) -> LivePage:
    """A page of runs; with buttons where it is one."""
    readers = [RunReader(folder) for folder in folders]

    def picture(name: str) -> WebFile | None:
        number, _, rest = name.partition("/")
        return readers[int(number)].pictures.file(rest) if number in map(str, range(len(readers))) else None

    def act(action: str, values: Mapping[str, Any]) -> str:
        if len(readers) > 1:
            raise UsageError("buttons belong to the page of one run")
        return obey(folders[0], action, values)

    def read() -> LiveFacts:
        runs = [reader.read() for reader in readers]
        names = _distinct([Path(run["place"]).resolve() for run in runs])
        runs = [run | {"name": name} for run, name in zip(runs, names, strict=True)]
        return {"runs": runs, "differences": differing([run["config"] for run in runs])}

    def alerts(facts: LiveFacts) -> list[Mapping[str, Any]]:
        return [alert for run in facts["runs"] for alert in run["alerts"]]

    return LivePage("training", "Training", read, render_training, picture, act, alerts, _title)


def _distinct(folders: Sequence[Path]) -> list[str]:
    """The last parts of paths, as many as it takes to tell them apart."""
    count = 1
    while count < 12 and len({folder.parts[-count:] for folder in folders}) < len(set(folders)):
        count += 1
    return ["/".join(folder.parts[-count:]) for folder in folders]


def _title(facts: LiveFacts) -> str:
    runs = facts["runs"]
    if len(runs) > 1:
        return f"{len(runs)} runs · qie"
    run = runs[0]
    part = f"{run['step'] / run['steps']:.0%}" if run["steps"] else f"{run['step']:,}"
    mark = "⚠ " if run["alerts"] else ""
    return f"{mark}{part if run['state'] in LIVE else run['state']} · {run['name']}"


def render_training(facts: LiveFacts) -> Mapping[str, Html]:
    """The page's parts."""
    runs = facts["runs"]
    alone = runs[0] if len(runs) == 1 else None
    return {
        "top": _header(alone) if alone else _comparison(runs),
        "buttons": _buttons(alone) if alone else join(),
        "alerts": _alerts(runs),
        "curves": tag("section", *_charts(runs), id="curves"),
        "pictures": picture_rows(runs),
        "prompts": other_prompts(alone) if alone else join(),
        "differences": _differences(facts["differences"], runs) if not alone else join(),
        "checkpoints": _checkpoints(runs),
        "run": _about(alone) if alone else join(),
    }


def _header(run: RunFacts) -> Html:
    return tag(
        "header",
        tag("p", "Training run", class_="soft"),
        tag("h1", tag("bdi", run["name"])),
        tag("p", tag("bdi", run["place"]), class_="place"),
        tag("p", _state(run), class_="states"),
        _progress(run),
        tag("dl", *_tiles(run), class_="tiles"),
    )


def _state(run: RunFacts) -> Html:
    kind, words = STATES.get(run["state"], ("soft", str(run["state"])))
    if any(alert["kind"] == "silent" for alert in run["alerts"]) and run["state"] in LIVE:
        kind, words = "warn", f"{words}, but silent"
    asked = {"pause": "will pause after this step", "stop": "will stop after this step and a checkpoint"}
    asked |= {"checkpoint": "will write a checkpoint after this step"}
    soon = [words for name, words in asked.items() if name in run["asked"]] if run["state"] in LIVE else []
    if run["state"] == "paused":
        soon = [one for one in soon if "pause" not in one]
    host = f"on {run['host']}" if run["host"] and run["state"] in LIVE else ""
    rest = ", ".join(part for part in (host, *soon) if part)
    return join(tag("span", words, class_=f"state {kind}"), tag("span", rest, class_="soft") if rest else "")


def _progress(run: RunFacts) -> Html:
    step, steps, left = run["step"], run["steps"], run["recent"]["left_s"]
    words = f"step {step:,}"
    if steps:
        words += f" of {steps:,}, {step / steps:.0%}"
    if left and run["state"] in ("training", "validating"):
        words += f", about {_left(left)} left"
    bar = part_bar(step / steps) if steps else join()
    return tag("div", bar, tag("p", words), class_="progress")


def _left(seconds: float) -> str:
    """The time left, which nobody knows to the second."""
    return human_time(seconds if seconds < 60 else round(seconds / 60) * 60).removesuffix(" 0 s")


def _tiles(run: RunFacts) -> list[Html]:
    recent, last = run["recent"], (run["validations"] or [{}])[-1]
    span = min(RECENT, max(run["count"], 1))
    tiles = [
        ("loss", _number(recent["loss"], ".4f"), f"mean of {human_count(span, 'step')}"),
        ("validation loss", _number(last.get("loss"), ".4f"), f"at step {last.get('step', 0):,}"),
        *_accuracy(run),
        ("speed", _number(recent["samples_per_s"], ".3g"), "samples a second"),
        ("a step", _number(recent["step_time_s"], ".3g", " s"), f"mean of {human_count(span, 'step')}"),
        ("waiting for data", _number(recent["waiting"], ".1%"), "of the time"),
        ("memory", human_bytes(recent["peak_memory_bytes"]) if recent["peak_memory_bytes"] else "", "the most so far"),
        ("MFU", _number(recent["mfu"], ".1%"), "of what the GPU can do"),
    ]
    return [tag("div", tag("dt", name), tag("dd", value, tag("small", unit))) for name, value, unit in tiles if value]


def _accuracy(run: RunFacts) -> list[tuple[str, str, str]]:
    """The tile of pairs: of those that were held out, or else of the last steps."""
    held_out = next((one for one in reversed(run["validations"]) if one["accuracy"] is not None), None)
    if held_out:
        return [("accuracy", f"{held_out['accuracy']:.0%}", f"of held-out pairs, at step {held_out['step']:,}")]
    span = human_count(min(RECENT, max(run["count"], 1)), "step")
    return [("accuracy", _number(run["recent"]["accuracy"], ".0%"), f"of the pairs of {span}")]


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else format(value, form) + unit


def _power(value: float) -> str:
    """0.0001 -> '1e-4'."""
    if value == 0 or abs(value) >= 0.01:
        return f"{value:.3g}"
    digits, _, power = f"{value:.2e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}".replace("-", "−")


def _buttons(run: RunFacts) -> Html:
    if run["state"] not in LIVE:
        return join()
    asked = run["asked"]
    pause = button("Resume", "resume") if "pause" in asked else button("Pause", "pause")
    stop = button(
        "Stop",
        "stop",
        ask="Stop the run after this step and a checkpoint? It goes on from there with --resume latest.",
        kind="danger",
    )
    waiting = [tag("span", "asked …", class_="soft")] if {"checkpoint", "stop"} & set(asked) else []
    return tag("div", pause, button("Checkpoint now", "checkpoint"), stop, *waiting, class_="buttons")


def _alerts(runs: Sequence[RunFacts]) -> Html:
    found = [(run, alert) for run in runs for alert in run["alerts"]]
    if not found:
        return join()
    items = [
        tag(
            "li",
            tag("b", tag("bdi", run["name"]), ": ") if len(runs) > 1 else "",
            foreign(alert["text"]),
            " " if alert["advice"] else "",
            tag("span", alert["advice"], class_="soft") if alert["advice"] else "",
        )
        for run, alert in found
    ]
    return tag("section", tag("ul", *items), class_="panel alerts", role="status", aria_label="Alerts")


def _charts(runs: Sequence[RunFacts]) -> list[Html]:
    def curves(name: str) -> list[Curve]:
        return [
            _curve(run["curves"][name], run["name"] if len(runs) > 1 else "", number) for number, run in enumerate(runs)
        ]

    alone = runs[0] if len(runs) == 1 else None
    large = [_loss(runs, curves), _validation(runs), *_further(runs)]
    small = [
        *(_rewards(alone) if alone and "target_reward" in alone["further"] else ()),
        *(_by_level(alone) if alone else ()),
        Chart("Learning rate", "", curves("lr"), number=_power, zero=True),
        Chart("Gradient norm", "before clipping", curves("grad_norm"), zero=True),
        Chart("Speed", "samples a second", curves("samples_per_s"), zero=True),
        Chart("Waiting for data", "part of a step", curves("waiting"), number=lambda part: f"{part:.3g}", zero=True),
        Chart("Memory", "the most so far", curves("peak_memory_bytes"), number=human_bytes, zero=True),
        Chart("MFU", "of what the GPU can do", curves("mfu"), number="{:.0%}".format, zero=True),
    ]
    last = max(run["step"] for run in runs)
    return [
        tag("h2", "Curves"),
        tag("div", *(panel(drawn(chart, last, width=WIDE)) for chart in large if chart.there), class_="pair"),
        tag("div", *(panel(drawn(chart, last)) for chart in small if chart.there), class_="trio"),
        tag("p", _about_curves(runs), class_="soft"),
    ]


def _about_curves(runs: Sequence[RunFacts]) -> str:
    if not any(run["count"] for run in runs):
        return "No step yet."
    most = max(run["count"] for run in runs)
    return f"A point is the {_place(most)}, in a band from the least to the most of them." if most > POINTS else ""


def _curve(own: Mapping[str, Any], name: str, kind: int, *, faint: bool = False) -> Curve:
    return Curve(name, own["steps"], own["values"], own["low"], own["high"], kind % KINDS, faint=faint)


def _loss(runs: Sequence[RunFacts], curves: Any) -> Chart:
    spans = {run["span"] for run in runs}
    unit = f"mean of {human_count(spans.pop(), 'step')}" if len(spans) == 1 else "mean of the last steps"
    if len(runs) > 1:
        return Chart("Loss", unit, curves("smooth_loss"))
    own = runs[0]["curves"]
    each = _curve(own["loss"], _place(runs[0]["count"]), 0, faint=True)
    band = "in a band from least to most" if runs[0]["count"] > POINTS else ""
    return Chart("Loss", band, [each, _curve(own["smooth_loss"], unit, 0)])


def _place(count: int) -> str:
    """What a point of a curve of so many steps stands for."""
    return "each step" if count <= POINTS else f"mean of {-(-count // POINTS)} steps"


def _validation(runs: Sequence[RunFacts]) -> Chart:
    found = [_held_out(run, "loss", run["name"] if len(runs) > 1 else "", kind) for kind, run in enumerate(runs)]
    return Chart("Validation loss", "rows kept out of training", found)


def _held_out(run: RunFacts, what: str, name: str, kind: int, level: int | None = None) -> Curve:
    """A number of validations."""
    lines = run["validations"]
    values = [one[what] if level is None else one[what][level] for one in lines]
    return Curve(name, [one["step"] for one in lines], values, kind=kind % KINDS, dots=len(lines) < 60)


def _by_level(run: RunFacts) -> list[Chart]:
    charts = []
    shown = [("margin", "margin_by_level", ("Margin", "Validation margin"))] if "margin" in run["further"] else []
    for what, levels, titles in (*shown, ("loss", "by_level", ("Loss", "Validation"))):
        training = [_curve(run["curves"][f"{what}_{number}"], name, number) for number, name in enumerate(LEVELS)]
        validation = [_held_out(run, levels, name, number, number) for number, name in enumerate(LEVELS)]
        charts += [
            Chart(f"{titles[0]} by noise level", f"mean of {human_count(2 * run['span'], 'step')}", training),
            Chart(f"{titles[1]} by noise level", "", validation),
        ]
    return charts


def _further(runs: Sequence[RunFacts]) -> list[Chart]:
    """Of runs that have pairs, or preserve a source: a number in training and in validations; of several runs one of
    the two."""
    charts = []
    for what, (title, about, held_out, number) in FURTHER.items():
        having = [(kind, run) for kind, run in enumerate(runs) if what in run["further"]]
        validated = any(one[what] is not None for _, run in having for one in run["validations"])
        if len(runs) == 1 and having:
            smooth = _curve(runs[0]["curves"][what], f"mean of {human_count(runs[0]['span'], 'step')}", 0)
            charts.append(Chart(title, about, [smooth, _held_out(runs[0], what, held_out, 1)], number))
            continue
        curves = [
            _held_out(run, what, run["name"], kind) if validated else _curve(run["curves"][what], run["name"], kind)
            for kind, run in having
        ]
        charts.append(Chart(title, held_out if validated else about, curves, number))
    return charts


def _rewards(run: RunFacts) -> list[Chart]:
    """Of both targets: whether a margin grows because the model gets better at one, or worse at both."""
    both = {"target_reward": ("target", 2), "rejected_reward": ("rejected", 4)}
    training = [_curve(run["curves"][what], *named) for what, named in both.items()]
    held_out = [_held_out(run, what, *named) for what, named in both.items()]
    unit = f"mean of {human_count(run['span'], 'step')}"
    return [
        Chart("Rewards", unit, training, zero=True),
        Chart("Rewards of held-out pairs", "", held_out, zero=True),
    ]


def _comparison(runs: Sequence[RunFacts]) -> Html:
    rows = []
    for number, run in enumerate(runs):
        recent, last = run["recent"], (run["validations"] or [{}])[-1]
        left = recent["left_s"] if run["state"] in ("training", "validating") else None
        rows.append(
            (
                tag("span", tag("bdi", run["name"]), class_=f"key k{number % KINDS}"),
                _state(run),
                f"{run['step']:,}" + (f" of {run['steps']:,}" if run["steps"] else ""),
                _number(recent["loss"], ".4f"),
                _number(last.get("loss"), ".4f"),
                _number(recent["samples_per_s"], ".3g"),
                _number(recent["waiting"], ".1%"),
                human_bytes(recent["peak_memory_bytes"]) if recent["peak_memory_bytes"] else "",
                _left(left) if left else "",
            )
        )
    heads = ("run", "state", "step", "loss", "validation", "samples/s", "waiting", "memory", "left")
    body = table(heads, rows, numbers=(2, 3, 4, 5, 6, 7, 8))
    return tag("header", tag("p", "Training runs", class_="soft"), tag("h1", f"{len(runs)} runs"), panel(body))


def _differences(found: Mapping[str, Sequence[str | None]], runs: Sequence[RunFacts]) -> Html:
    lacking = [run["name"] for run in runs if not run["config"]]
    parts = []
    if found:
        rows = [(tag("code", name), *(_value(value) for value in values)) for name, values in found.items()]
        parts.append(panel(table(("", *(run["name"] for run in runs)), rows)))
    elif not lacking:
        parts.append(tag("p", "None: the configurations are equal.", class_="soft"))
    if lacking:
        parts.append(tag("p", f"Without run.json yet: {', '.join(lacking)}.", class_="soft"))
    return tag("section", tag("h2", "What differs in their configurations"), *parts, id="differences")


def _value(value: str | None) -> Html:
    return tag("span", "–", class_="soft") if value is None else tag("code", foreign(value, MOST_VALUE))


def _checkpoints(runs: Sequence[RunFacts]) -> Html:
    parts = []
    for run in runs:
        lines = [_checkpoint(run, one) for one in reversed(run["checkpoints"][-MOST_CHECKPOINTS:])]
        if len(runs) > 1:
            parts.append(tag("h3", tag("bdi", run["name"])))
        if run["checkpoints"]:
            parts += [
                panel(_commands(run)),
                panel(table(("step", "size", "validation loss", "folder"), lines, numbers=(1, 2))),
            ]
        else:
            parts.append(tag("p", "None yet.", class_="soft"))
    return tag("section", tag("h2", "Checkpoints"), *parts, id="checkpoints")


def _checkpoint(run: RunFacts, one: Mapping[str, Any]) -> tuple[str, ...]:
    losses = {line["step"]: line["loss"] for line in run["validations"]}
    loss = losses.get(one["step"])
    folder = copied(one["name"], f"{run['place']}/{one['name']}")
    return f"{one['step']:,}", human_bytes(one["bytes"]), _number(loss, ".4f"), folder


def _commands(run: RunFacts) -> Html:
    """What one does with the last checkpoint."""
    last = quote(f"{run['place']}/{run['checkpoints'][-1]['name']}")
    out = quote(f"{run['name'].replace('/', '-')}.safetensors")
    commands = {
        "Continue the run": f"qie train --config my.yaml --resume {last}",
        "Edit an image": f'qie predict --config my.yaml --lora {last} --image in.png --prompt "…" --output out.png',
        "Export for ComfyUI": f"qie export {last} {out}",
    }
    if not run["adapter"]:
        del commands["Edit an image"], commands["Export for ComfyUI"]
    rows = [join(tag("dt", name), tag("dd", copied(command))) for name, command in commands.items()]
    return join(tag("h3", "With the last one"), tag("dl", *rows, class_="commands"))


def _about(run: RunFacts) -> Html:
    report = run["report"]
    facts = {
        "model": report["base_model"],
        "samples": f"{report['samples']:,}" if isinstance(report["samples"], int) else None,
        "devices": ", ".join(map(str, report["devices"])) if isinstance(report["devices"], list) else None,
        "started": _moment(report["started"]),
        "finished": _moment(run["finished"]),
        "free on its disk": human_bytes(run["disk_free_bytes"]) if run["disk_free_bytes"] is not None else None,
        "unreadable lines": f"{run['damaged_lines']:,} in metrics.jsonl" if run["damaged_lines"] else None,
    } | {name: cut(text, 300) for name, text in run["notes"].items() if name not in ("host", "error", "prompts")}
    rows = [
        part for name, value in facts.items() if value for part in (tag("dt", name), tag("dd", foreign(str(value))))
    ]
    settings = [(tag("code", name), _value(values[0])) for name, values in differing([run["config"]]).items()]
    whole = (
        tag("details", tag("summary", "Configuration"), table(("", ""), settings), data_name="configuration")
        if settings
        else join()
    )
    return tag("section", tag("h2", "The run"), panel(tag("dl", *rows, class_="facts"), whole), id="run")


def _moment(told: object) -> str | None:
    """2026-11-23T03:00:00+00:00 -> 2026-11-23 03:00:00 UTC."""
    return told.replace("T", " ", 1).replace("+00:00", " UTC") if isinstance(told, str) else None
