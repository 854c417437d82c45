"""Claims of earlier projects about caching, tested: speed, memory, bytes, hits; measured, and computed for full size.

    python benchmarks/claims.py [--size small|full] [--steps 20] [--runs 3]

qwen-image-finetune's page on its cache says: 2-3× faster after the first epoch, 30-50 % less memory, ~10-20 % of the
dataset's size, ~95-99 % hits. Cached and live training are compared with the same process count, batch and precision.

speed:    steps of the loops of `train_step.py`, cached and live: a plain one, and qie's.
memory:   the most that a process holds while it trains, cached and live: of the GPU; without one, host memory since
          its imports, in a process for each.
bytes:    a sample of the released shapes compared with its two photographs of 1024², at the bytes per pixel
          of real photographs as PNG and as JPEG; and with the same sample in qwen-image-finetune's files.
hits:     rows that need no encoding when qie-precompute runs again after a change.
computed: FLOPs and estimated memory of the released model. Speed: if encoders and transformer reach the same share of
          the GPU's peak, and nothing overlaps. Memory: with both encoders on the same GPU in bfloat16, or not.

The models of `small`, the default without a GPU, are sized for tests: the ratio of encoders to transformer, and so of
live to cached, is not that of the released ones. The measurement only shows that both ways run.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from measuring import ROOT, Results, Row, absolute, beside, forget_peak, grown_bytes
from measuring import parser as common
from models import SIZES, Bench, prepare, quiet, random_weights
from PIL import Image
from variants import PLAIN_CACHED, PLAIN_LIVE, Variant, loop_of, measure_all
from work import GB, TERA, encoder_bytes, encoding, loose_bytes, record_bytes, step_memory, text_alone_bytes, training

from qie.config import Quantization
from qie.data.sources import open_source
from qie.precompute import precompute

PAIRS = {"plain": (PLAIN_LIVE, PLAIN_CACHED), "qie": (Variant("qie", live=True), Variant("qie"))}
"""The loops, live and cached."""


def parser() -> argparse.ArgumentParser:
    made = common(__doc__, runs=3)
    made.add_argument("--size", choices=SIZES, default="full" if torch.cuda.is_available() else "small")
    made.add_argument("--steps", type=int, default=20, help="timed steps of each way in a run")
    made.add_argument("--only-computed", action="store_true", help="measure nothing")
    made.add_argument("--memory-of", help=argparse.SUPPRESS)
    made.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    quiet()
    if options.memory_of:
        print(json.dumps(host_memory(options)))
        return
    results = Results(__file__, options, arguments)
    if not options.only_computed:
        with opened(options, None) as bench:
            prepare(bench)
            results.add(*speed_and_memory(bench, options))
            results.add(*hits(bench))
        with tempfile.TemporaryDirectory() as name:
            results.add(*bytes_of_photographs(Path(name)))
    results.add(*computed())
    results.save()


@contextmanager
def opened(options: argparse.Namespace, folder: Path | None) -> Iterator[Bench]:
    """A bench in a folder that is there, or in a new one."""
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as name, random_weights(device):
        yield Bench(folder or Path(name), SIZES[options.size], device, options.steps, None)


def speed_and_memory(bench: Bench, options: argparse.Namespace) -> list[Row]:
    rows = []
    found = measure_all([variant for pair in PAIRS.values() for variant in pair], bench, options.runs)
    for name, (live, cached) in PAIRS.items():
        ways = found[live], found[cached]
        if any(one.failure for one in ways):
            print(f"{name}: {[one.failure for one in ways]}")
            continue
        what, peer = f"a cached step, {name} loop, {options.size}", f"a live step of the {name} loop"
        rows.append(beside(f"speed {name}", what, peer, ways[0].seconds, ways[1].seconds))
    for name, (live, cached) in PAIRS.items():
        if bench.device.type == "cuda":
            peaks = [[one.peak_bytes for one in (found[live], found[cached])]]
        else:
            peaks = [[in_process(one, bench, options) for one in (live, cached)] for _ in range(options.runs)]
        theirs, ours = zip(*peaks, strict=True)
        what, peer = f"memory of cached training, {name} loop, {options.size}", f"live training, {name} loop"
        unit = " of its memory"
        rows.append(beside(f"memory {name}", what, peer, theirs, ours, unit=unit, share=True, shown=_megabytes))
    return rows


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.0f} MB"


def in_process(variant: Variant, bench: Bench, options: argparse.Namespace) -> int:
    """Host memory of a few steps, in a process of their own."""
    command = [sys.executable, "-W", "ignore", __file__, "--memory-of", str(variant), "--folder", str(bench.folder)]
    command += ["--size", options.size, "--steps", str(options.steps)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(json.loads(told.splitlines()[-1]))


def host_memory(options: argparse.Namespace) -> int:
    variant = next(one for pair in PAIRS.values() for one in pair if str(one) == options.memory_of)
    before = forget_peak()
    with opened(options, options.folder) as bench, loop_of(variant, bench) as step:
        for _ in range(variant.warm_up + options.steps):
            step()
    return grown_bytes(before)[0]


def bytes_of_photographs(folder: Path) -> list[Row]:
    tool = [sys.executable, str(ROOT / "tools" / "make_photo_edits.py"), str(folder / "photos")]
    subprocess.run(tool, check=True, capture_output=True)
    files = sorted((folder / "photos").glob("*_images/*.png"))
    pixels = png = jpeg = 0
    for file in files:
        with Image.open(file) as image:
            pixels += image.width * image.height
            png += file.stat().st_size
            packed = io.BytesIO()
            image.convert("RGB").save(packed, "JPEG", quality=95)
            jpeg += len(packed.getvalue())
    sample, loose = record_bytes(), loose_bytes()
    rows = []
    for kind, size in (("PNG", png), ("JPEG", jpeg)):
        row_bytes = size / pixels * 2 * 1024**2
        told = f"{sample / 1e6:.1f} MB, peer {row_bytes / 1e6:.2f} MB ({8 * size / pixels:.1f} bits a pixel)"
        peer = f"its two photographs as {kind}, {len(files)} real ones by area"
        rows.append(
            absolute(f"bytes {kind}", "bytes of a sample, 1024²", [sample / row_bytes], "× the bytes", peer, told)
        )
    told = f"{sample / 1e6:.1f} MB, peer {loose / 1e6:.1f} MB"
    peer = "the same sample in qwen-image-finetune's .pt files"
    return [*rows, absolute("bytes pt", "bytes of a sample, 1024²", [sample / loose], "× the bytes", peer, told)]


def hits(bench: Bench) -> list[Row]:
    """Share of rows that a second run of precompute need not encode, by what changed since the first."""

    def renamed(rows: Path) -> None:
        for file in rows.glob("*/*"):
            file.rename(file.with_name(f"renamed_{file.name}"))

    def prompt(rows: Path) -> None:
        (rows / "training_images" / "003.txt").write_text("make it night")

    def control(rows: Path) -> None:
        with Image.open(rows / "control_images" / "003.jpg") as image:
            image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(rows / "control_images" / "003.jpg")

    def added(rows: Path) -> None:
        for file in sorted(rows.glob("*/000.*")):
            shutil.copy(file, file.with_name(f"zzz{file.suffix}"))
        (rows / "training_images" / "zzz.txt").write_text("make it day")

    changes: dict[str, tuple[str, Callable[[Path], None]]] = {
        "same": ("nothing", lambda rows: None),
        "renamed": ("all files renamed and moved", renamed),
        "prompt": ("one prompt", prompt),
        "control": ("one control image, its prompt as before", control),
        "added": ("a row added", added),
    }
    found = []
    for key, (what, change) in changes.items():
        with tempfile.TemporaryDirectory() as name:
            rows, shards = Path(name) / "rows", Path(name) / "shards"
            shutil.copytree(bench.folder / "rows", rows)
            shutil.copytree(bench.folder / "shards", shards)
            change(rows)
            source = open_source(rows)
            report = precompute(source, bench.encoder(), shards, rows=(0, len(source)))
        share = 100 * report.reused / (report.reused + report.encoded)
        told = f"{report.reused} of {report.reused + report.encoded} rows"
        found.append(
            absolute(f"hits {key}", f"hits when qie-precompute runs again; changed: {what}", [share], " %", detail=told)
        )
    return found


def computed() -> list[Row]:
    """Of the released model, 1024² but where it says otherwise."""
    rows = []
    for side in (1024, 512):
        cost = encoding(side)
        for checkpointing in (True, False):
            step = training(side, checkpointing)
            total = step.model + step.recomputed
            kind = "checkpointing" if checkpointing else "no checkpointing"
            for name, flops in (("plain", cost.plain), ("qie", cost.ours)):
                told = f"{total / TERA:.0f} TFLOP a step, {flops / TERA:.1f} to encode"
                what, peer = f"a cached step, {side}², {kind}", f"a live step, {name} encoders"
                rows.append(_computed(f"{name} {side} {kind}", what, peer, 1 + flops / total, "× as fast", told))
    whole, ours = encoder_bytes()
    bases: tuple[Quantization | None, ...] = (None, "fp8", "nf4")
    for quantize in bases:
        memory = step_memory(1024, quantize)
        for name, more in (("plain", whole), ("qie", ours)):
            told = f"{memory / GB:.0f} GB, peer {(memory + more) / GB:.0f} GB"
            what, peer = (
                f"memory of cached training, base in {quantize or 'bf16'}",
                f"live training, {name} encoders",
            )
            rows.append(
                _computed(f"memory {name} {quantize}", what, peer, memory / (memory + more), " of its memory", told)
            )
    most, least = step_memory(1024, None, checkpointing=False), step_memory(1024, None)
    told = f"{least / GB:.0f} GB, peer {most / GB:.0f} GB"
    what = "memory with gradient checkpointing, base in bf16"
    rows.append(_computed("checkpointing", what, "without checkpointing", least / most, " of its memory", told))
    ours, whole = text_alone_bytes()
    told = f"{ours / 1e6:.2f} MB, peer {whole / 1e6:.1f} MB"
    what, peer = (
        "bytes of a sample of Qwen-Image-2.1, 1024², 80 tokens",
        "the same with embeddings of images, for both prompts",
    )
    return [*rows, _computed("bytes text alone", what, peer, ours / whole, "× the bytes", told)]


def _computed(key: str, what: str, peer: str, value: float, unit: str, told: str) -> Row:
    return Row(f"computed {key}", what, peer, value, value, value, unit, 0, told)


if __name__ == "__main__":
    main()
