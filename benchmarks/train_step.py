"""A training step of qie compared with a plain loop of diffusers, peft and accelerate, in one run: time, memory, MFU.

    python benchmarks/train_step.py [--size small|full] [--steps 10] [--runs 1] [--only cached] [--skip compile]

A LoRA of rank 16, one control, batches of one row, a prompt of 34 words. Models have random weights and nothing is
downloaded. `full` has the released models' shapes at 1024² and is meant for one GPU of 140 GB; `--only` and `--skip`
take some of qie's lines. `small`, the default without a GPU, takes the same path through the code; its numbers say
nothing about a GPU.

The plain loop is what a careful user writes: gradient checkpointing, autocast, a float32 adapter and loss. "plain live"
encodes target, control and prompt before each step with the pipeline's own methods, of images that are decoded,
resized and cut into patches before the clock starts; "plain cached" is given all tensors on the device. qie runs as
qie-train does: live, it decodes and encodes rows of a folder while it trains; cached, it reads them from shards.

Each line compares a model and optimizer of its own with the plain loop of its kind, live or cached, step by step: how
many times as fast; medians; the most GPU memory that the steps took; MFU (model FLOPs against the GPU's peak) and how
much of the time is the floor (all FLOPs that the step does, recomputed ones included, at the GPU's peak).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from measuring import Results, Row, beside, figure
from measuring import parser as common
from models import SIZES, Bench, prepare, quiet, random_weights
from variants import PLAIN_CACHED, PLAIN_LIVE, VARIANTS, Measured, Variant, measure_all

from qie.training.flops import peak_flops


def parser() -> argparse.ArgumentParser:
    made = common(__doc__, runs=1)
    gpu = torch.cuda.is_available()
    made.add_argument("--size", choices=SIZES, default="full" if gpu else "small")
    made.add_argument("--steps", type=int, default=10, help="timed steps of each variant in a run")
    made.add_argument("--only", default="", help="of qie's variants those whose name contains this")
    made.add_argument("--skip", nargs="*", default=[], help="leave out variants whose name contains one of these")
    made.add_argument("--peak-tflops", type=float, help="of the device in bfloat16; known for common GPUs")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    results = Results(__file__, options, arguments)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda:0" if gpu else "cpu")
    quiet()
    peak = options.peak_tflops and options.peak_tflops * 1e12
    if peak is None and gpu:
        peak = peak_flops(torch.cuda.get_device_name(device), torch.bfloat16)
    with tempfile.TemporaryDirectory() as name, random_weights(device):
        bench = Bench(Path(name), SIZES[options.size], device, options.steps, peak)
        prepare(bench)
        results.say(described(bench, options.size))
        chosen = [one for one in VARIANTS if one.loop == "plain" or options.only in str(one)]
        chosen = [one for one in chosen if not any(word in str(one) for word in options.skip)]
        found = measure_all([one for one in chosen if gpu or one.attention == "native"], bench, options.runs)
        for variant, measured in found.items():
            if measured.failure:
                results.say(f"{variant}: {measured.failure}")
            elif variant.loop != "plain":
                results.add(*rows(variant, found, bench))
    results.save()


def described(bench: Bench, size: str) -> str:
    model, again = bench.flops(False), bench.flops(True).recomputed
    line = f"{size}: {bench.size.side_px}², {model.model / 1e12:.3g} TFLOP a step, {again / 1e12:.3g} recomputed"
    if bench.peak:
        floors = [1e3 * flops / bench.peak for flops in (model.model, model.model + again)]
        line += f"; at {bench.peak / 1e12:.3g} TFLOP/s {floors[0]:.1f} ms, checkpointed {floors[1]:.1f} ms"
    return line


def rows(variant: Variant, found: dict[Variant, Measured], bench: Bench) -> list[Row]:
    """Beside the plain loop of its kind; none where that failed."""
    peer = PLAIN_LIVE if variant.live else PLAIN_CACHED
    measured, theirs = found[variant], found[peer]
    if theirs.failure:
        return []
    more = told(variant, measured, bench)
    what = f"a training step, {bench.size.side_px}², {variant}"
    name = f"a loop of diffusers and peft, {'live' if variant.live else 'cached'}"
    return [beside(str(variant), what, name, theirs.seconds, measured.seconds, more=more)]


def told(variant: Variant, measured: Measured, bench: Bench) -> str:
    """Memory, MFU and share of the floor, where they are known."""
    parts = [f"{measured.peak_bytes / 1e9:.1f} GB"] if measured.peak_bytes else []
    mfus = [value for value in measured.mfu if value is not None]
    parts += [f"MFU {100 * statistics.median(mfus):.1f} %"] if mfus else []
    if bench.peak:
        flops = bench.flops(variant.checkpointing)
        floor_s = (flops.model + flops.recomputed) / bench.peak
        parts.append(f"{figure(100 * floor_s / statistics.median(measured.seconds))} % of the time is the floor")
    return ", ".join(parts)


if __name__ == "__main__":
    main()
