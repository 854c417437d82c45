"""A training step of the released model's shapes: by a plain loop, by qie, and with each option."""

from __future__ import annotations

import gc
import itertools
import statistics
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from diffusers import QwenImageTransformer2DModel
from measuring import Row, absolute, described, seconds, versions
from measuring import machine as machine_here
from models import random_weights
from plain import plain_loop

from qie.training.flops import step_flops
from qie.training.memory import Setup, estimate, recomputation
from qie.training.roofline import step_time

from .bench import Found, Place, opened_run
from .table import NEWER, OPTIONS, Option

STEPS_S = 12
"""Steps that take longer are fewer, but three."""


def machine(place: Place) -> Found:
    """What it runs on, for the docs."""
    values: dict[str, Any] = {"machine": machine_here(), "versions": versions(), "size": place.scale.name}
    if place.gpu:
        values["gpu_bytes"] = torch.cuda.get_device_properties(place.device).total_memory
        values["capability"] = torch.cuda.get_device_capability(place.device)
        values["driver"] = _driver()
    print(described(values["machine"]))
    return Found([], values)


def _driver() -> str:
    words = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)


def plain(place: Place, name: str, family: str) -> Found:
    bench, newer = place.bench(Option(family=family)), family == NEWER
    with plain_loop(bench, live=False, newer=newer) as step:
        values = timed(step, place) | {"model_flop": bench.flops(False, plain=not newer).model}
    what = f"plain loop of diffusers and peft{', Qwen-Image-2.1' if newer else ''}"
    return Found([row(name, what, values, told(values, place))], values)


def option(place: Place, name: str) -> Found:
    chosen = OPTIONS[name]
    bench = place.bench(chosen)
    with opened_run(bench, chosen) as (run, setup):
        expected = expected_of(setup, place)
        values = timed(run.training_step, place) | expected
        more = [*told(values, place), recomputation(setup)]
    return Found([row(f"step {name}", f"qie, {name}", values, more)], values)


def small_card(place: Place, name: str, card_gb: int) -> Found:
    """With the weights in host memory at first, as from_pretrained has them, and a part of the GPU's memory."""
    transformer = QwenImageTransformer2DModel
    blocks = place.bench(OPTIONS[name]).model / "transformer"
    with random_weights(place.device, transformer_on=torch.device("cpu")):
        model = transformer.from_pretrained(blocks, torch_dtype=torch.bfloat16)
    # A desktop and CUDA itself take a gigabyte of such a card.
    whole, free = card_gb << 30, (card_gb - 1) << 30
    if place.gpu:
        gc.collect()
        torch.cuda.empty_cache()
        share = free / torch.cuda.get_device_properties(place.device).total_memory
        torch.cuda.set_per_process_memory_fraction(share, place.device)
    with (
        mock.patch.object(transformer, "from_pretrained", lambda *_, **__: model),
        mock.patch("torch.cuda.mem_get_info", lambda *_: (free - torch.cuda.memory_reserved(), whole)),
    ):
        found = option(place, name)
    (one,) = found.rows
    changed = replace(one, key=f"step {card_gb} {name}", what=f"{one.what}, in {card_gb - 1} of {card_gb} GiB")
    return Found([changed], found.values)


def expected_of(setup: Setup, place: Place) -> dict[str, float]:
    """What qie counts: bytes, and FLOP of the model in a step; and the seconds that qie-train --dry-run tells.

    Raises:
        MemoryError: the GPU has much less memory than that.
    """
    flops = step_flops(
        setup.architecture,
        setup.image_tokens,
        setup.text_tokens,
        all_trained=False,
        target_tokens=setup.target_tokens,
        controls=setup.controls,
        draws=setup.draws,
    )
    total = estimate(setup).total
    if place.gpu and total > 1.1 * (held := torch.cuda.get_device_properties(place.device).total_memory):
        raise MemoryError(f"left out: by the estimate it takes {total / 1e9:.1f} GB, and the GPU has {held / 1e9:.1f}")
    expected = {"estimate_bytes": total, "model_flop": flops.model * setup.batch_size}
    if place.datasheet:
        expected["dry_run_s"] = step_time(setup, place.datasheet).total
    return expected


def timed(step: Callable[[], object], place: Place) -> dict[str, Any]:
    """Seconds of steps that follow one another, the first one's apart; and what they took of the GPU."""
    first_s, *_, last_s = [seconds(step) for _ in range(place.scale.warm_up)]
    count = max(min(place.scale.steps, int(STEPS_S / last_s)), 3)
    if not place.gpu:
        return {"seconds": [seconds(step) for _ in range(count)], "first_s": first_s}
    event: Any = torch.cuda.Event  # which has no types
    torch.cuda.reset_peak_memory_stats(place.device)
    marks = [event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(place.device)
    reserved = torch.cuda.memory_reserved(place.device)
    return {
        "seconds": [one.elapsed_time(other) / 1e3 for one, other in itertools.pairwise(marks)],
        "first_s": first_s,
        "peak_bytes": torch.cuda.max_memory_allocated(place.device),
        "reserved_bytes": torch.cuda.max_memory_reserved(place.device),
        "context_bytes": total - free - reserved,
        "waits": waits(step),
    }


def waits(step: Callable[[], object]) -> int:
    """How often the host waits for the GPU in a step."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(one.message) for one in found)


def told(values: dict[str, Any], place: Place) -> list[str]:
    """What stands beside memory and seconds: estimates, and MFU."""
    parts = [f"estimated {values['estimate_bytes'] / 1e9:.1f} GB"] if "estimate_bytes" in values else []
    parts += [f"--dry-run says {values['dry_run_s']:.3g} s"] if "dry_run_s" in values else []
    if place.datasheet:
        flop_s = values["model_flop"] / statistics.median(values["seconds"])
        values["mfu"] = flop_s / (1e12 * place.datasheet.tflops)
        parts.append(f"MFU {100 * values['mfu']:.1f} %")
    return parts


def row(key: str, what: str, values: dict[str, Any], more: list[str]) -> Row:
    parts = []
    if "peak_bytes" in values:
        taken = values["peak_bytes"] + values["context_bytes"]
        parts = [f"{taken / 1e9:.1f} GB with CUDA's context, {values['reserved_bytes'] / 1e9:.1f} GB reserved"]
    parts += more
    if "waits" in values:
        parts.append(f"{values['waits']} waits of the host")
    parts.append(f"first step {values['first_s']:.3g} s")
    return absolute(key, f"a training step, {what}", values["seconds"], " s", detail=", ".join(parts))
