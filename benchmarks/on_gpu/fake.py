"""The steps of the released model on a GPU that is not there: 60 blocks of fake tensors, which have shapes and devices
and no values. FLOP, bytes and waits of the host are counted, and nothing is timed."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measuring import ROOT
from models import Bench, write_model

from .bench import CONTROLS, SCALES, Place
from .table import COMPILE, NEWER, OPTIONS, Option

BUDGET_BYTES = 0.9 * 85e9 - 0.6e9
"""Of an H100 of 80 GB, as memory_to_fill sees it: 85e9 bytes, less a tenth, less CUDA's context."""


def can_be_faked(option: Option) -> bool:
    """Not what needs kernels of a GPU where it runs: inductor's, bitsandbytes' and cuDNN's."""
    return not (COMPILE in option.settings or option.settings.get("model.quantize") == "nf4" or option.needs)


def dry_run(names: list[str], blocks: int) -> Iterator[str]:
    """A line for each option."""
    sys.path.append(str(ROOT))  # for the tests' machinery
    from tests.training.fake_gpu import Case, build_belief, measured

    with tempfile.TemporaryDirectory() as name:
        folder, scale = Path(name), SCALES["full"]
        if shutil.which("g++") is None:
            yield "left out: a build of torch for CPUs needs a C++ compiler to believe in a GPU"
            return
        place = Place(folder, scale)
        models = {}
        for family in {_released(OPTIONS[name].family) for name in names}:
            bench = Bench(folder / family, scale.size, place.device, 0, None)
            write_model(bench, family)
            models[family] = bench.model
        library = build_belief(folder)
        for name in names:
            option = OPTIONS[name]
            family = _released(option.family)
            texts = (scale.texts_21 if family == NEWER else scale.texts)[option.texts]
            more: dict[str, Any] = {"budget_bytes": BUDGET_BYTES}
            if option.kept:
                more = {"kept": tuple("all" if share else 0 for share in option.kept)}
            elif "train.gradient_checkpointing" in option.settings:
                more = {}
            case = Case(
                dict(option.settings),
                blocks,
                (1024,) * CONTROLS[option.family],
                text_tokens=texts if option.texts == "four" else texts[:1],
                zero_cond_t=option.family == "edit_plus",
                family=family,
                **more,
            )
            (found,) = measured([case], models, library)
            yield told(name, found)


def _released(family: str) -> str:
    """The family whose model is written for it."""
    return "edit" if family == "edit_plus" else family


def told(name: str, found: Any) -> str:
    parts = ("weights", "gradients", "optimizer", "activations", "workspace")
    expected, context = sum(found.estimated[part] for part in parts), 1 << 30
    return (
        f"{name}: {found.peak / 1e9:.1f} GB of tensors, estimated {(expected - context) / 1e9:.1f}; "
        f"{found.recomputed}; {found.forward_flop / 1e12:.0f} TFLOP forward, "
        f"{found.backward_flop / 1e12:.0f} backward; {len(found.syncs)} waits of the host"
    )
