"""What options do to a model that has learnt something: the demo's edit, taught with each of them, beside float32.

    python benchmarks/quality.py [--runs 3] [--steps 300] [--side 128] [--only fp8]

Each run has a seed of its own, and with it another noise, order and start of the LoRA. A row is a variant: by how much
the PSNR of its edits, on the demo's photographs that training never sees, differs from that of float32 with the same
seed; and the validation loss by noise level. What is within float32's own spread over the seeds is no difference.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from accelerate.state import AcceleratorState
from measuring import ROOT, Results, Row, absolute, figure
from measuring import parser as common
from models import quiet
from PIL import Image
from skimage.metrics import peak_signal_noise_ratio

import qie
from qie.config import Config, load_config
from qie.precompute import precompute
from qie.training.reporting.metrics import METRICS_FILE, read_metrics

DEMO = ROOT / "configs" / "demo.yaml"
PLAIN = "float32"
VARIANTS = {
    PLAIN: [],
    "bf16": ["train.mixed_precision=bf16"],
    "fp8": ["model.quantize=fp8"],
    "int8": ["model.quantize=int8"],
    "nf4": ["model.quantize=nf4"],
    "8-bit AdamW": ["optimizer.class_path=bitsandbytes.optim.AdamW8bit"],
    "EMA": ["train.ema_decay=0.98"],
    "caption dropout": ["data.caption_dropout_rate=0.1"],
}
"""Name and what is set, beside the demo's configuration in float32."""


@dataclass(frozen=True)
class Learnt:
    """What a run has come to: the mean PSNR of its edits in dB, and the validation loss at each noise level."""

    psnr: float
    loss_by_level: tuple[float, ...]


def parser() -> argparse.ArgumentParser:
    made = common(__doc__, runs=3)
    made.add_argument("--steps", type=int, default=300, help="of each training (%(default)s)")
    made.add_argument("--side", type=int, default=128, help="of an image, in pixels (%(default)s)")
    made.add_argument("--photographs", type=int, default=8, help="how many are edited (%(default)s)")
    made.add_argument("--only", nargs="*", choices=VARIANTS, help="these variants, beside float32")
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
    results.save()


def configured(work: Path, options: argparse.Namespace, variant: str, seed: int) -> Config:
    """The demo's configuration, smaller, with a variant's values."""
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
    AcceleratorState._reset_state(reset_partial_state=True)  # it keeps the precision of the run before
    accelerator = qie.open_accelerator(config)
    pretrained = qie.open_pretrained(
        config.model.pretrained_model_name_or_path, components=("transformer", "scheduler")
    )
    with qie.open_training_stream(config, pretrained, accelerator) as stream:
        outcome = qie.train(config, pretrained, stream, accelerator)
    validations = [
        line for line in read_metrics(Path(config.train.output_dir) / METRICS_FILE) if "validation_loss" in line
    ]
    averaged = outcome.checkpoint / "ema"
    predictor = qie.open_predictor(config, averaged if averaged.exists() else outcome.checkpoint)
    scores = []
    for number, file in enumerate(sorted((work / "held_out" / "control_images").glob("*.png"))[:photographs]):
        target = work / "held_out" / "training_images" / file.name
        with Image.open(file) as control, Image.open(target) as true:
            image = predictor.generate(
                [control], target.with_suffix(".txt").read_text().strip(), steps=8, cfg=1.0, seed=number
            )
            pair = (np.asarray(one) for one in (true.resize(image.size, Image.Resampling.LANCZOS), image))
            scores.append(float(peak_signal_noise_ratio(*pair, data_range=255)))
    return Learnt(statistics.fmean(scores), tuple(validations[-1]["validation_loss_by_level"]))


def row(variant: str, found: dict[str, list[Learnt]]) -> Row:
    """float32 by itself, with its spread over the seeds; another variant as its difference from float32."""
    ours, plain = found[variant], found[PLAIN]
    levels = [statistics.fmean(losses) for losses in zip(*(one.loss_by_level for one in ours), strict=True)]
    losses = f"validation loss by noise level {', '.join(f'{loss:.3f}' for loss in levels)}"
    if variant == PLAIN:
        return absolute(variant, "PSNR of a taught edit, float32", [one.psnr for one in ours], " dB", detail=losses)
    differences = [one.psnr - other.psnr for one, other in zip(ours, plain, strict=True)]
    detail = f"{figure(statistics.fmean(one.psnr for one in ours))} dB; {losses}"
    return absolute(variant, f"the same, {variant}", differences, " dB", "float32, same seed", detail)


if __name__ == "__main__":
    main()
