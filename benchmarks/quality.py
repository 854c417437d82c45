"""What options do to a model that has learnt something: the demo's edit, taught with each of them, beside float32.

    python benchmarks/quality.py [--runs 3] [--steps 300] [--side 128] [--only fp8] [--pictures FILE]

Each run has a seed of its own, and with it another noise, order and start of the LoRA. A row is a variant: by how much
the PSNR of its edits, on the demo's photographs that training never sees, differs from that of float32 with the same
seed; and the validation loss by noise level. What is within float32's own spread over the seeds is no difference.

Further rows are the gradients of adapters on the same batches, layer by layer: a new adapter, which has all to learn,
and the one that float32 has taught with seed 0, whose gradients are small.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from measuring import ROOT, Results, Row, absolute, figure
from measuring import parser as common
from models import quiet
from PIL import Image
from sheet import sheet
from skimage.metrics import peak_signal_noise_ratio

import qie
from qie.config import Config, load_config
from qie.precompute import precompute
from qie.pretrained import PretrainedModel
from qie.training.reporting.metrics import METRICS_FILE, read_metrics
from qie.training.run import Run

DEMO = ROOT / "configs" / "demo.yaml"
PLAIN = "float32"
VARIANTS = {
    PLAIN: [],
    "bf16": ["train.mixed_precision=bf16"],
    "fp8": ["model.quantize=fp8"],
    "fp8 products": ["model.quantize=fp8", "train.fp8_compute=true"],
    "int8": ["model.quantize=int8"],
    "nf4": ["model.quantize=nf4"],
    "8-bit AdamW": ["optimizer.class_path=bitsandbytes.optim.AdamW8bit"],
    "EMA": ["train.ema_decay=0.98"],
    "caption dropout": ["data.caption_dropout_rate=0.1"],
}
"""Name and what is set, beside the demo's configuration in float32."""
ROUNDED = {"bf16": PLAIN, "fp8": PLAIN, "fp8 products": PLAIN, "fp8 products alone": "fp8"}
"""Whose gradients are compared, and with whose."""
BATCHES = 6


@dataclass(frozen=True)
class Learnt:
    """What a run has come to: its edits with their PSNR in dB, and the validation loss at each noise level."""

    edits: tuple[tuple[Image.Image, float], ...]
    loss_by_level: tuple[float, ...]
    checkpoint: Path

    @property
    def psnr(self) -> float:
        return statistics.fmean(score for _, score in self.edits)


def parser() -> argparse.ArgumentParser:
    made = common(__doc__, runs=3)
    made.add_argument("--steps", type=int, default=300, help="of each training (%(default)s)")
    made.add_argument("--side", type=int, default=128, help="of an image, in pixels (%(default)s)")
    made.add_argument("--photographs", type=int, default=8, help="how many are edited (%(default)s)")
    made.add_argument("--only", nargs="*", choices=VARIANTS, help="these variants, beside float32")
    made.add_argument(
        "--pictures", type=Path, metavar="FILE", help="write the edits of seed 0 there, beside each other"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    results = Results(__file__, options, arguments)
    quiet()
    chosen = [name for name in VARIANTS if options.only is None or name in (PLAIN, *options.only)]
    found: dict[str, list[Learnt]] = {name: [] for name in chosen}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        prepare(work, options)
        for seed in range(options.runs):
            for variant in chosen:
                found[variant].append(learnt(work, configured(work, options, variant, seed), options.photographs))
                print(f"(seed {seed}, {variant}: {figure(found[variant][-1].psnr)} dB)", flush=True)
        results.add(*(row(variant, found) for variant in chosen))
        for kind, taught in (("new", None), ("taught", found[PLAIN][0].checkpoint)):
            results.add(*gradient_rows(work, options, kind, taught, chosen))
        if options.pictures:
            beside_each_other(work, {name: found[name][0] for name in chosen}).save(options.pictures)
    results.save()


def configured(work: Path, options: argparse.Namespace, variant: str, seed: int, taught: Path | None = None) -> Config:
    """The demo's configuration, smaller, with a variant's values; to go on from an adapter that was `taught`."""
    values = {
        "model.pretrained_model_name_or_path": ROOT / "configs" / "small_model",
        "data.source": work / "photos",
        "data.allow_tiny": "true",
        "data.area_px": options.side**2,
        "cache.cache_dir": work / "shards",
        "cache.thumbnail_px": "null",
        "train.max_steps": options.steps,
        "train.output_dir": work / f"{variant}-{seed}",
        "train.seed": seed,
        "validation.every": options.steps,
        "logging.report_to": "[]",
        "model.lora.continue_from": taught or "null",
    }
    return load_config(DEMO, [*(f"{key}={value}" for key, value in values.items()), *VARIANTS[variant]])


def prepare(work: Path, options: argparse.Namespace) -> None:
    """The demo's photographs and their shards."""
    tool = ROOT / "tools" / "make_demo_photos.py"
    subprocess.run([sys.executable, str(tool), str(work)], check=True, capture_output=True)
    config = configured(work, options, PLAIN, 0)
    rows, encoder = qie.open_rows(config), qie.open_encoder(config)
    precompute(rows, encoder, work / "shards", rows=(0, len(rows)))
    encoder.release()


def learnt(work: Path, config: Config, photographs: int) -> Learnt:
    """Train, and edit photographs that were not trained on."""
    accelerator, pretrained = opened(config)
    with qie.open_training_stream(config, pretrained, accelerator) as stream:
        outcome = qie.train(config, pretrained, stream, accelerator)
    validations = [
        line for line in read_metrics(Path(config.train.output_dir) / METRICS_FILE) if "validation_loss" in line
    ]
    averaged = outcome.checkpoint / "ema"
    predictor = qie.open_predictor(config, averaged if averaged.exists() else outcome.checkpoint)
    edits = []
    for number, (control, true, prompt) in enumerate(held_out(work)[:photographs]):
        image = predictor.generate([control], prompt, steps=8, cfg=1.0, seed=number)
        pair = (np.asarray(one) for one in (true.resize(image.size, Image.Resampling.LANCZOS), image))
        edits.append((image, float(peak_signal_noise_ratio(*pair, data_range=255))))
    return Learnt(tuple(edits), tuple(validations[-1]["validation_loss_by_level"]), outcome.checkpoint)


def opened(config: Config) -> tuple[Accelerator, PretrainedModel]:
    AcceleratorState._reset_state(reset_partial_state=True)  # it keeps the precision of the run before
    name = config.model.pretrained_model_name_or_path
    return qie.open_accelerator(config), qie.open_pretrained(name, components=("transformer", "scheduler"))


def held_out(work: Path) -> list[tuple[Image.Image, Image.Image, str]]:
    """Photographs that training never sees: before, after, and the instruction."""
    found = []
    for file in sorted((work / "held_out" / "control_images").glob("*.png")):
        target = work / "held_out" / "training_images" / file.name
        with Image.open(file) as control, Image.open(target) as true:
            found.append((control.copy(), true.copy(), target.with_suffix(".txt").read_text().strip()))
    return found


def row(variant: str, found: dict[str, list[Learnt]]) -> Row:
    """float32 by itself, with its spread over the seeds; another variant as its difference from float32."""
    ours, plain = found[variant], found[PLAIN]
    levels = [statistics.fmean(losses) for losses in zip(*(one.loss_by_level for one in ours), strict=True)]
    losses = f"validation loss by noise level {', '.join(f'{loss:.3f}' for loss in levels)}"
    if variant == PLAIN:
        return absolute(variant, "PSNR of a taught edit, float32", [one.psnr for one in ours], " dB", detail=losses)
    differences = [one.psnr - other.psnr for one, other in zip(ours, plain, strict=True)]
    seeds = list(zip(*(one.loss_by_level for one in plain), strict=True))
    within = sum(min(seed) <= level <= max(seed) for level, seed in zip(levels, seeds, strict=True))
    detail = f"{figure(statistics.fmean(one.psnr for one in ours))} dB; {losses}"
    detail += f", {within} of {len(levels)} within float32's range"
    return absolute(variant, f"the same, {variant}", differences, " dB", "float32, same seed", detail)


def gradient_rows(
    work: Path, options: argparse.Namespace, kind: str, taught: Path | None, chosen: Sequence[str]
) -> list[Row]:
    """How the gradients of an adapter, new or taught, agree with those of float32: a row for each way to round."""
    compared = {
        name: peer for name, peer in ROUNDED.items() if name.removesuffix(" alone") in chosen and peer in chosen
    }
    needed = {name.removesuffix(" alone") for name in compared} | set(compared.values())
    found = {name: gradients(configured(work, options, name, 0, taught)) for name in sorted(needed)}
    rows = []
    for name, peer in compared.items():
        layers = [(ours, found[peer][layer]) for layer, ours in found[name.removesuffix(" alone")].items()]
        cosines = [float(torch.cosine_similarity(*pair, dim=0)) for pair in layers]
        below = sum(cosine < 0.99 for cosine in cosines)
        detail = f"median of {len(cosines)} layers {statistics.median(cosines):.4f}, least {min(cosines):.4f}, "
        what, beside = f"gradients of a {kind} adapter, {name}", f"{peer}, same batches"
        rows.append(absolute(f"{kind} {name}", what, cosines, " cosine", beside, f"{detail}{below} below 0.99"))
    return rows


def gradients(config: Config) -> dict[str, torch.Tensor]:
    """Of each layer's adapter, of some batches one after the other, end to end. The last block's text has none."""
    accelerator, pretrained = opened(config)
    found: dict[str, list[torch.Tensor]] = defaultdict(list)
    with qie.open_training_stream(config, pretrained, accelerator) as stream:
        run = Run(config, pretrained, stream, accelerator)
        with closing(run.batches):
            for prepared in islice(run.batches, BATCHES):
                losses = run.objective.losses(run.trainable.model, prepared.batch, prepared.draws)
                accelerator.backward(losses.loss.mean())
                for name, weight in run.trainable.parameters.items():
                    if weight.grad is not None:
                        found[name.partition(".lora_")[0]].append(weight.grad.flatten().clone())
                run.optimizer.zero_grad()
    joined = {layer: torch.cat(parts) for layer, parts in found.items()}
    return {layer: gradient for layer, gradient in joined.items() if gradient.any()}


def beside_each_other(work: Path, found: dict[str, Learnt]) -> Image.Image:
    """A row for some photographs: before, what was to be, and each variant's edit with its PSNR."""
    rows = [
        [(control, ""), (true, ""), *((image, f"{psnr:.1f} dB") for image, psnr in edits)]
        for (control, true, _), *edits in zip(
            held_out(work), *(learnt.edits for learnt in found.values()), strict=False
        )
    ]
    return sheet(["before", "true", *found], rows[:4])


if __name__ == "__main__":
    main()
