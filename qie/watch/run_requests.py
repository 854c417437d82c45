"""What the buttons of a run ask for, through the files that qie-train obeys: see `qie.training.control`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from qie.errors import UsageError
from qie.html_report.markup import Html, join, tag
from qie.watch.controls import button

if TYPE_CHECKING:
    from qie.training.control import Wish

ANSWERS = {
    "pause": "The run will hold after this step.",
    "resume": "The run goes on.",
    "checkpoint": "The run will write a checkpoint after this step.",
    "stop": "The run will stop after this step and a checkpoint. It goes on from there with --resume latest.",
}
MOST_SAMPLES = 64


def obey(run: Path, action: str, values: Mapping[str, Any]) -> str:
    """Ask a run for something; says what will happen.

    Raises:
        QieError: no run trains there, or it cannot be asked for that.
    """
    from qie.training.control import ask, ask_prompts, is_training, take_back

    if action == "prompts":
        ask_prompts(run, _samples(values.get("samples")))
        return "The next validation takes these prompts."
    if action == "own_prompts":
        ask_prompts(run, None)
        return "The next validation takes the prompts of the configuration."
    if action == "resume":
        take_back(run, "pause")
        if not is_training(run):
            return "No run trains into this folder, and nothing asks one to hold."
    elif action in ("pause", "checkpoint", "stop"):
        ask(run, cast("Wish", action))
    else:
        raise UsageError("a run cannot be asked for that", found=action, expected=", ".join(ANSWERS))
    return ANSWERS[action]


def _samples(given: object) -> list[dict[str, Any]]:
    """The samples of the form: images as one line of paths each."""
    if not isinstance(given, list) or not 0 < len(given) <= MOST_SAMPLES:
        raise UsageError("no prompts", expected=f"1 to {MOST_SAMPLES} of them")
    samples = []
    for one in given:
        if not isinstance(one, dict):
            raise UsageError("a prompt is not an object", found=one)
        sample = {name: value for name, value in one.items() if name in ("prompt", "images", "seed", "negative_prompt")}
        if isinstance(sample.get("images"), str):
            sample["images"] = [line.strip() for line in sample["images"].splitlines() if line.strip()]
        if not str(sample.get("prompt", "")).strip():
            raise UsageError("a prompt is empty")
        samples.append(sample)
    return samples


def other_prompts(run: Mapping[str, Any]) -> Html:
    """A form for other prompts of validation pictures, where a run goes on that makes some."""
    from qie.watch.run_reader import LIVE

    now = current_samples(run)
    if run["state"] not in LIVE or not now:
        return join()
    rows = [_fields(sample) for sample in now]
    back = button("Those of the configuration", "own_prompts") if "prompts.json" in run["asked"] else ""
    send = tag("button", "Use these from the next validation on", type="button", data_form="prompts")
    return tag(
        "details",
        tag("summary", "Other prompts for these pictures"),
        tag("div", *rows, class_="samples"),
        tag("div", send, back, class_="buttons"),
        class_="panel",
        data_name="prompts",
    )


def current_samples(run: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """What the newest pictures were made from; before there are any, what the configuration says."""
    rows = run["pictures"]
    if rows:
        last = max(row["steps"][-1] for row in rows)
        return [row for row in rows if row["steps"][-1] == last][:MOST_SAMPLES]
    section = run["config"].get("validation")
    samples = section.get("samples") if isinstance(section, dict) else None
    return [one for one in samples if isinstance(one, dict)][:MOST_SAMPLES] if isinstance(samples, list) else []


def _fields(sample: Mapping[str, Any]) -> Html:
    images = sample.get("images")
    lines = "\n".join(image for image in images if isinstance(image, str)) if isinstance(images, list) else ""
    seed = sample.get("seed")
    return tag(
        "fieldset",
        tag("label", "prompt", tag("textarea", str(sample.get("prompt", "")), name_="prompt", rows=2, dir="auto")),
        tag("label", "images, a path a line", tag("textarea", lines, name_="images", rows=2)),
        tag(
            "label",
            "seed",
            tag("input", type="number", name_="seed", min=0, value=seed if isinstance(seed, int) else 0),
        ),
        data_sample="",
    )
