"""A finished file into the docs: its rows, beside the plain loop's where there is one, and what was not measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from measuring import Row, figure

from .process import Line
from .table import MEASUREMENTS, OPTIONS, PER_SAMPLE, PLAIN

LOOP = "a plain loop of diffusers and peft, all blocks checkpointed"


def taken(lines: Sequence[Line], command: str) -> dict[str, Any]:
    """What docs/benchmarks.json holds of a run. Of several lines of a name the last one counts.

    Raises:
        ValueError: it was no measurement of a GPU.
    """
    found = {line["name"]: line for line in lines}
    values = found.get("machine", {}).get("values") or {}
    if "gpu" not in values.get("machine", {}):
        raise ValueError("the file has no line of a machine with a GPU: run benchmarks/gpu.py --only machine there")
    if values["size"] != "full":
        raise ValueError(f"the file was measured at {values['size']} size")
    rows = {row["key"]: Row(**row | {"command": command}) for line in found.values() for row in line.get("rows", ())}
    return {
        "command": command,
        "date": max(line["at"] for line in lines)[:10],
        "seconds": round(sum(line["took_s"] for line in found.values())),
        "machine": values["machine"],
        "versions": values["versions"],
        "rows": [vars(row) for row in beside_plain(rows).values()],
        "missing": [
            {"what": name, "why": found[name].get("error", "no rows") if name in found else "no time"}
            for name in MEASUREMENTS
            if name != "machine" and not found.get(name, {}).get("rows")
        ],
    }


def beside_plain(rows: dict[str, Row]) -> dict[str, Row]:
    """Steps on the same samples as the plain loop's, and encoding, as ratios to it; the others as they are."""
    found = dict(rows)
    for name, option in OPTIONS.items():
        peers = [rows[key] for key, family in PLAIN.items() if family == option.family and key in rows]
        if peers and option.texts == "one" and (key := f"step {name}") in rows:
            draws = option.settings.get(PER_SAMPLE, 1)
            found[key] = ratio(rows[key], times(peers[0], draws), LOOP if draws == 1 else f"{draws} steps of {LOOP}")
    if (plain := rows.get("encode plain")) and "encode" in rows:
        found["encode"] = ratio(rows["encode"], plain, "diffusers' pipeline, row by row", rates=True)
    return found


def times(row: Row, count: int) -> Row:
    return replace(row, value=count * row.value, low=count * row.low, high=count * row.high)


def ratio(row: Row, peer: Row, name: str, *, rates: bool = False) -> Row:
    """Of medians; the range is the widest that the runs of both allow."""
    values = (row.value / peer.value, row.low / peer.high, row.high / peer.low)
    value, low, high = values if rates else (1 / values[0], 1 / values[2], 1 / values[1])
    medians = f"{figure(row.value)}{row.unit}, peer {figure(peer.value)}{row.unit}"
    detail = f"{medians}; {row.detail}" if row.detail else medians
    return Row(row.key, row.what, name, value, low, high, "× as fast", row.runs, detail, row.command)
