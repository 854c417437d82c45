"""A measurement done: its line, whatever happens; and whether its process can do another."""

from __future__ import annotations

import gc
import importlib
import time
import traceback
from dataclasses import asdict
from typing import Any

import torch
from diffusers.models.attention_dispatch import attention_backend
from measuring import synchronize
from models import quiet, random_weights

from .bench import SCALES, Found, Place
from .process import Line
from .table import MEASUREMENTS, Measurement

LEFT_BYTES = 256 << 20
"""What a process may still hold of the GPU when it measures again: caches of kernels, a workspace of cuBLAS."""


def measured(one: Measurement, place: Place) -> Line:
    """Its rows and values, or its error; "spent" says that the process has to end."""
    started, failed = time.perf_counter(), True
    line: dict[str, Any] = {}
    try:
        if one.needs == "cuda" and not place.gpu:
            raise RuntimeError("left out: it needs a GPU")
        found = _found(one, place)
        line = {"rows": [asdict(row) for row in found.rows], "values": dict(found.values)}
        failed = False
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:400] or type(error).__name__
        line = {"error": f"{type(error).__name__}: {text}", "where": f"{where.filename}:{where.lineno} {where.line}"}
    return line | {
        "took_s": round(time.perf_counter() - started, 1),
        "spent": failed or one.alone or not released(place),
    }


def _found(one: Measurement, place: Place) -> Found:
    module, _, function = one.work.partition(".")
    work = getattr(importlib.import_module(f"on_gpu.{module}"), function)
    # An option's attention is set for the whole process.
    with random_weights(place.device), attention_backend("native"):
        found: Found = work(place, *one.arguments)
        synchronize()
    return found


def released(place: Place) -> bool:
    """Free what a measurement has left; whether next to nothing stays on the GPU."""
    torch._dynamo.reset()
    gc.collect()
    if not place.gpu:
        return True
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(place.device) < LEFT_BYTES


def measure_named(name: str, place: Place) -> Line:
    quiet()
    return measured(MEASUREMENTS[name], place)


__all__ = ["SCALES", "Place", "measure_named"]
