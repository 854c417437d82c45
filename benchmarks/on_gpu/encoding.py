"""Encoding rows: as qie-precompute does, by diffusers' pipeline, in parts; and live beside cached."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import encoders
import torch
from measuring import Row, absolute, synchronize
from models import Bench
from plain import saved

from qie.config import Config
from qie.data.opening import open_stream
from qie.from_config import open_encoder, open_rows, precompute_config
from qie.precompute import Report, Settings, precompute
from qie.stages import Load
from qie.stores import open_folder
from qie.types import Batch

from .bench import Found, Place


def configured(bench: Bench, output: Path) -> Config:
    return Config.model_validate(
        {
            "model": {"pretrained_model_name_or_path": str(bench.model)},
            "data": {"source": str(bench.folder / "rows"), "area_px": bench.size.side_px**2, "allow_tiny": True},
            "cache": {"cache_dir": str(output)},
        }
    )


def ours(place: Place) -> Found:
    """What qie-precompute does with its configuration; the first fifth of the rows loads, warms up and is not timed."""
    bench, output = place.rows(), place.new_folder("shards")
    config, count = configured(bench, output), place.scale.rows
    marks: list[tuple[float, int, dict[str, Load]]] = []

    def note(report: Report) -> None:
        marks.append((time.perf_counter(), report.rows, dict(report.loads)))

    started = time.perf_counter()
    report = precompute_config(
        config,
        open_rows(config),
        open_folder(str(output)),
        rows=(0, count),
        shard_size=max(count // 5, 1),  # so that most are written while others are encoded
        settings=Settings(on_error="stop"),
        progress=note,
    )
    synchronize()
    assert report.encoded == count, report
    first, done, before = next(mark for mark in marks if mark[1] >= count / 5)
    last, _, after = marks[-1]
    wall_s = last - first
    loads = {
        name: (load.busy_s - before.get(name, Load()).busy_s) / (load.workers * wall_s) for name, load in after.items()
    }
    busy = ", ".join(f"{name} busy {100 * share:.0f} %" for name, share in loads.items() if share >= 0.005)
    values = {"loads": loads, "whole_s": last - started, "start_s": first - started}
    what = f"qie-precompute, rows of {bench.size.side_px}²"
    return Found([rate(what, "encode", (count - done) / wall_s, busy)], values)


def plain(place: Place) -> Found:
    """Row by row with diffusers' own pipeline; both prompts, as qie encodes them."""
    bench, count = place.rows(), place.scale.rows
    started = time.perf_counter()
    marks = [time.perf_counter() for _ in saved(bench, place.new_folder("plain"))]
    first = -(-count // 5)
    what = f"diffusers' pipeline row by row, rows of {bench.size.side_px}²"
    found = rate(what, "encode plain", (count - first) / (marks[-1] - marks[first - 1]), "")
    return Found([found], {"start_s": marks[0] - started})


def rate(what: str, key: str, rows_s: float, detail: str) -> Row:
    return absolute(key, f"encoding by {what}", [rows_s], " rows/s", detail=detail)


def vae(place: Place) -> Found:
    with torch.inference_mode():
        row = encoders.compare_vae(place.device, torch.bfloat16, place.scale.size.side_px, runs=5)
    return Found([row], {})


def prompt(place: Place) -> Found:
    with torch.inference_mode():
        return Found([encoders.compare_prompts(place.device, torch.bfloat16, encoders.TEXT_LAYERS, runs=5)], {})


def vision(place: Place) -> Found:
    with torch.inference_mode():
        return Found(encoders.compare_vision(place.device, torch.bfloat16, runs=5), {})


def cached_and_live(place: Place, count: int = 4) -> Found:
    """Batches of the same rows, read from shards and encoded live, by encoders that were opened apart."""
    bench, output = place.rows(), place.new_folder("cached")
    config, count = configured(bench, output), min(count, place.scale.rows)
    source = open_rows(config)
    precompute(source, open_encoder(config), output, rows=(0, len(source)), settings=Settings(on_error="stop"))
    streams = open_stream(output), open_stream(source, encoder=open_encoder(config, only_tensors=True))
    found = []
    for stream in streams:
        with closing(stream.forever()) as batches:
            found.append([next(batches) for _ in range(count)])
    apart, other, numbers = 0.0, 0, 0
    for cached, live in zip(*found, strict=True):
        assert cached.keys == live.keys
        for one, two in zip(tensors(cached), tensors(live), strict=True):
            difference = (one.double() - two.double()).abs()
            apart = max(apart, float(difference.max() / one.double().std().clamp(min=1e-12)))
            other, numbers = other + int((difference > 0).sum()), numbers + one.numel()
    what = "largest difference of live and cached batches"
    detail = f"{other:,} of {numbers:,} stored numbers differ"
    return Found([absolute("live", what, [apart], " of the spread", detail=detail)], {"other": other})


def tensors(batch: Batch) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for field in fields(Batch):
        value: Any = getattr(batch, field.name)
        some = value if isinstance(value, tuple) else (value,)
        found += [one for one in some if isinstance(one, torch.Tensor) and one.is_floating_point() and one.numel() > 1]
    return found
