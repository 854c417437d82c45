"""What somebody should know of a precompute without looking at its figures, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from qie.quantities import human_bytes
from qie.watch.alerts import Alert

SKIPPED = 0.05
LEAST_SKIPPED = 20
LEAST_FREE_BYTES = 2 * 10**9

_AGAIN = "Run the same command again: published shards stay."


def precompute_alerts(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The alerts of a folder as JSON values, with its name, place and rows."""
    place = facts["place"]
    about = {"run": place.rstrip("/").rpartition("/")[2], "place": place, "step": facts["rows"]["done"], "time": None}
    return [about | asdict(alert) for alert in _found(facts)]


def _found(facts: Mapping[str, Any]) -> Iterator[Alert]:
    workers = facts["workers"]
    silent = [one for one in workers if one["state"] == "silent"]
    if silent and facts["state"] != "finished":
        names = ", ".join(f"{one['host']} process {one['pid']}" for one in silent[:4]) + (" …" if silent[4:] else "")
        what = "A worker is silent" if len(silent) == 1 else f"{len(silent):,} workers are silent"
        yield Alert("silent", f"{what}: {names}.", f"Were they killed? {_AGAIN}", len(silent))
    for one in workers:
        if one["state"] == "failed":
            words = one["message"] or "its log says why"
            yield Alert("failed", f"A worker failed, {one['host']} process {one['pid']}: {words}", _AGAIN, one["pid"])
    stuck = [one for one in workers if one["state"] == "stuck"]
    if stuck:
        names = ", ".join(f"{one['host']} process {one['pid']}" for one in stuck[:4])
        yield Alert("stuck", f"For minutes no row was done by {names}.", "Look at its log, and at its GPU.", len(stuck))
    skipped, rows = facts["skipped"], facts["rows"]["published"]
    if skipped["count"] >= LEAST_SKIPPED and skipped["count"] > SKIPPED * rows:
        reason = skipped["reasons"][0]["reason"]
        yield Alert("skipped", f"{skipped['count'] / rows:.0%} of the rows were skipped, mostly: {reason}.")
    size = facts["bytes"]
    if facts["state"] == "running" and size["free"] is not None:
        short = size["fits"] is False or size["free"] < LEAST_FREE_BYTES
        if short:
            text = (
                f"The disk has {human_bytes(size['free'])} free, and {human_bytes(size['to_come'] or 0)} are to come."
            )
            yield Alert("disk", text, "Free some space: a full disk ends the run, and published shards stay.")
