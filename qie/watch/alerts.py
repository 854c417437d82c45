"""What somebody should know of a run without looking at its curves, in words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from qie.quantities import human_bytes, human_time
from qie.watch.metric_lines import MetricLines

SILENT_S = 600.0
WAITING = 0.10
RISES = 3
SPIKE = 10.0
"""Times the usual gradient norm."""
SPAN = 100
"""Steps that an alert looks back on."""
LEARNT_MARGIN, LEARNT = 5.0, 0.95
"""A pair with such a margin has a loss below 0.01; a part of the pairs, since their mean may be that of a few."""
LEAST_STEPS = 20
LEAST_FREE_BYTES = 2 * 10**9


@dataclass(frozen=True)
class Alert:
    """Something that is wrong, or may be.

    Attributes:
        kind: one word. since: the step that it is about, if it is about one: an alert is new if either is.
        text: one sentence or two. advice: what one can do.
    """

    kind: str
    text: str
    advice: str = ""
    since: int | None = None


def alerts(run: Mapping[str, Any], lines: MetricLines) -> Iterator[Alert]:
    """Of the facts of a run, and its numbers."""
    yield from _of_state(run)
    if run["state"] in ("finished", "stopped"):
        return
    yield from _of_notes(run)
    yield from _of_steps(lines)
    yield from _of_validations(run, lines)
    yield from _of_disk(run)


def _of_state(run: Mapping[str, Any]) -> Iterator[Alert]:
    state, silent_s = run["state"], run["silent_s"]
    resume = "Continue with --resume latest." if run["checkpoints"] else "Start it again."
    if state == "failed":
        yield Alert("failed", f"The run failed: {run['notes'].get('error', 'its log says why')}", resume)
    elif state == "gone":
        yield Alert("gone", "The run's process ended without a word: it was killed, or its machine was.", resume)
    elif state in ("training", "validating", "silent") and silent_s is not None and silent_s > SILENT_S:
        what = "No validation has ended" if state == "validating" else "No step"
        yield Alert(
            "silent",
            f"{what} for {human_time(silent_s // 60 * 60).removesuffix(' 0 s')}.",
            "Look at its log, and at its GPU.",
        )


def _of_notes(run: Mapping[str, Any]) -> Iterator[Alert]:
    if words := run["notes"].get("prompts"):
        yield Alert("prompts", f"The other prompts were refused: {words}", "The pictures stay those of before.")


def _of_steps(lines: MetricLines) -> Iterator[Alert]:
    steps, columns = lines.steps, lines.columns
    if len(steps) < LEAST_STEPS:
        return
    took, waited = _sum(columns["step_time_s"][-SPAN:]), _sum(columns["data_wait_s"][-SPAN:])
    last = min(SPAN, len(steps))
    if took and waited > WAITING * took:
        text = f"The last {last} steps waited for data for {waited / took:.0%} of their time."
        yield Alert(
            "waiting", text, "Shards on a local disk (cache.local_dir) or more data.reader_threads shorten that."
        )
    lost = sum(map(math.isnan, columns["loss"][-SPAN:]))
    if lost:
        text = f"{lost} of the last {last} steps had no finite loss, and changed nothing."
        yield Alert("loss", text, "A lower optimizer.init_args.lr, or mixed_precision: bf16, may help.")
    margin, right = (_mean(lines.of_some[name][-SPAN:]) for name in ("margin", "accuracy"))
    if margin > LEARNT_MARGIN and right >= LEARNT:
        pairs = f"Of the last {last} steps {right:.0%} of the pairs are right"
        text = f"{pairs}, by a margin of {margin:.3g}: they teach no more."
        yield Alert("margin", text, "More steps only lead away from the base: stop here, or raise loss.beta.")
    usual = [norm for norm in columns["grad_norm"][-5 * SPAN :] if not math.isnan(norm)]
    median = statistics.median(usual) if usual else 0.0
    for step, norm in list(zip(steps, columns["grad_norm"], strict=True))[-SPAN:]:
        if median and norm > SPIKE * median:
            times = norm / median
            text = f"At step {step:,} the gradient norm was {norm:.3g}, {times:.0f} times the usual {median:.3g}."
            yield Alert("gradient", text, "One such step does no harm where train.max_grad_norm clips it.", step)


def _of_validations(run: Mapping[str, Any], lines: MetricLines) -> Iterator[Alert]:
    rewards = [one.of_some["target_reward"] for one in lines.validations[-RISES:]]
    if len(rewards) == RISES and all(reward < 0 for reward in rewards):
        text = f"At {RISES} validations in a row the model predicted preferred targets worse than its base did"
        advice = "The margin grows by what rejected targets lose. loss.supervised_weight holds preferred ones."
        yield Alert("reward", f"{text}: their reward is {rewards[-1]:.3g}.", advice)
    last = [(one.step, one.loss) for one in lines.validations if not math.isnan(one.loss)][-RISES - 1 :]
    losses = [loss for _, loss in last]
    if len(last) <= RISES or any(later <= earlier for earlier, later in pairwise(losses)):
        return
    best = last[0][0]
    kept = [one["name"] for one in run["checkpoints"] if one["step"] <= best]
    advice = f"The best weights may be those of {kept[-1]}." if kept else "The run may learn its rows by heart."
    text = (
        f"The validation loss rose {RISES} times in a row, from {losses[0]:.4f} at step {best:,} to {losses[-1]:.4f}."
    )
    yield Alert("validation", text, advice, best)


def _of_disk(run: Mapping[str, Any]) -> Iterator[Alert]:
    free, sizes = run["disk_free_bytes"], [one["bytes"] for one in run["checkpoints"]]
    needed = max(LEAST_FREE_BYTES, 2 * max(sizes, default=0))
    if free is not None and free < needed:
        size = f", and a checkpoint takes {human_bytes(sizes[-1])}" if sizes else ""
        yield Alert(
            "disk", f"{human_bytes(free)} are left on the disk{size}.", "train.keep_last removes old checkpoints."
        )


def _mean(values: Sequence[float]) -> float:
    """NaN of no numbers."""
    there = [value for value in values if not math.isnan(value)]
    return sum(there) / len(there) if there else math.nan


def _sum(values: Sequence[float]) -> float:
    return sum(value for value in values if not math.isnan(value))


def told_alerts(run: Mapping[str, Any], lines: MetricLines) -> list[dict[str, Any]]:
    """The alerts of a run as JSON values, with its name, place and step."""
    about = {"run": run["name"], "place": run["place"], "step": run["step"], "time": run["time"]}
    return [about | asdict(alert) for alert in alerts(run, lines)]
