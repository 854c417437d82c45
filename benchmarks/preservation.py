"""A subject taught with and without preserving its class, on the small model that has learnt.

    python benchmarks/preservation.py [--runs 3] [--steps 300] [--side 128] [--pictures FILE]

The subject is an old print with a white border, taught by the class's own words but for one: "Give this picture a warm,
sepia light." The class is what the model knows already: "Give this picture a warm, golden light." Each run has a seed
of its own and trains twice on the same rows; one of the two preserves the class, by the same images, and takes twice
the steps, so that the subject comes as often in both.

Rows: the PSNR of both prompts' pictures, on photographs that training never sees, minus that of the base's pictures
with the same noise; and of other edits, of which training has no row.
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
from typing import Any

import numpy as np
from measuring import ROOT, Results, absolute, figure
from measuring import parser as common
from models import quiet
from PIL import Image
from quality import DEMO, held_out, opened
from sheet import sheet
from skimage.metrics import peak_signal_noise_ratio

import qie
from qie.config import Config, load_config
from qie.precompute import precompute

sys.path.append(str(ROOT / "tools"))
from train_small_model import EDITS

SUBJECT, CLASS = "sepia", "golden"
PROMPTS = {
    "subject": "Give this picture a warm, sepia light.",
    "class": "Give this picture a warm, golden light.",
    "darker": EDITS["darker"].instructions[1],
    "black and white": EDITS["black_and_white"].instructions[0],
}
TRUE = {"class": "warmer", "darker": "darker", "black and white": "black_and_white"}
"""Of prompts but the subject's, the edit that they ask for."""
VARIANTS = ("without", "with")


@dataclass(frozen=True)
class Picture:
    """A generated picture, and its PSNR in dB."""

    image: Image.Image
    psnr: float


Pictures = dict[str, list[Picture]]
"""Of each prompt, of each photograph."""


def parser() -> argparse.ArgumentParser:
    made = common(__doc__, runs=3)
    made.add_argument("--steps", type=int, default=300, help="with rows of the subject (%(default)s)")
    made.add_argument("--side", type=int, default=128, help="of an image, in pixels (%(default)s)")
    made.add_argument("--photographs", type=int, default=8, help="how many are edited (%(default)s)")
    made.add_argument("--pictures", type=Path, metavar="FILE", help="write those of seed 0 there, beside each other")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    results = Results(__file__, options, arguments)
    quiet()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        prepare(work, options)
        base = generated(work, options, configured(work, options, "without", 0), None)
        found: dict[str, list[Pictures]] = {variant: [] for variant in VARIANTS}
        for seed in range(options.runs):
            for variant in VARIANTS:
                config = configured(work, options, variant, seed)
                found[variant].append(generated(work, options, config, trained(config)))
                told = ", ".join(f"{prompt} {mean(found[variant][-1][prompt]):.1f}" for prompt in PROMPTS)
                print(f"(seed {seed}, {variant}: {told} dB; base class {mean(base['class']):.1f})", flush=True)
        for prompt in PROMPTS:
            before = mean(base[prompt])
            for variant in VARIANTS:
                gains = [mean(pictures[prompt]) - before for pictures in found[variant]]
                what = f"PSNR of {prompt}, learnt {variant} preservation"
                results.add(absolute(f"{prompt} {variant}", what, gains, " dB", "the base", f"{figure(before)} dB"))
        if options.pictures:
            beside_each_other(work, {"base": base, **{name: runs[0] for name, runs in found.items()}}).save(
                options.pictures
            )
    results.save()


def mean(pictures: Sequence[Picture]) -> float:
    return statistics.fmean(picture.psnr for picture in pictures)


def configured(work: Path, options: argparse.Namespace, variant: str, seed: int) -> Config:
    """The demo's configuration, smaller, with one source, or with the class's beside it."""
    subject: dict[str, Any] = {"source": str(work / "photos"), "name": "subject"}
    preserved = {**subject, "name": "class", "preserve": True, "replace": {SUBJECT: CLASS}}
    values = {
        "model.pretrained_model_name_or_path": ROOT / "configs" / "small_model",
        "data.source": [subject, preserved] if variant == "with" else [subject],
        "data.allow_tiny": "true",
        "data.area_px": options.side**2,
        "cache.cache_dir": work / "shards" / variant,
        "cache.thumbnail_px": "null",
        "train.max_steps": options.steps * (2 if variant == "with" else 1),
        "train.output_dir": work / f"{variant}-{seed}",
        "train.seed": seed,
        "validation.rows": 0,
        "logging.report_to": "[]",
    }
    return load_config(DEMO, [f"{key}={value}" for key, value in values.items()])


def prepare(work: Path, options: argparse.Namespace) -> None:
    """The demo's photographs with the subject's prompt, and their shards."""
    tool = ROOT / "tools" / "make_demo_photos.py"
    subprocess.run([sys.executable, str(tool), str(work)], check=True, capture_output=True)
    for caption in (work / "photos" / "training_images").glob("*.txt"):
        caption.write_text(f"{PROMPTS['subject']}\n", encoding="utf-8")
    for variant in VARIANTS:
        config = configured(work, options, variant, 0)
        rows, encoder = qie.open_rows(config), qie.open_encoder(config)
        precompute(rows, encoder, work / "shards" / variant, rows=(0, len(rows)))
        encoder.release()


def trained(config: Config) -> Path:
    """The checkpoint of a training."""
    accelerator, pretrained = opened(config)
    with qie.open_training_stream(config, pretrained, accelerator) as stream:
        return qie.train(config, pretrained, stream, accelerator).checkpoint


def generated(work: Path, options: argparse.Namespace, config: Config, adapter: Path | None) -> Pictures:
    """The pictures of each prompt, of photographs that were not trained on."""
    predictor = qie.open_predictor(config, adapter)
    found: Pictures = {}
    for prompt, words in PROMPTS.items():
        found[prompt] = []
        for number, (control, print_, _) in enumerate(held_out(work)[: options.photographs]):
            image = predictor.generate([control], words, steps=8, cfg=1.0, seed=number)
            true = print_ if prompt == "subject" else EDITS[TRUE[prompt]].apply(control)
            pair = (np.asarray(one) for one in (true.resize(image.size, Image.Resampling.LANCZOS), image))
            found[prompt].append(Picture(image, float(peak_signal_noise_ratio(*pair, data_range=255))))
    return found


def beside_each_other(work: Path, found: dict[str, Pictures]) -> Image.Image:
    """A row for each photograph: before, and the pictures of subject and class by the base and by both runs."""
    columns = [(prompt, name) for prompt in ("subject", "class") for name in found]
    rows = [
        [(control, ""), *((picture.image, f"{picture.psnr:.1f} dB") for picture in pictures)]
        for (control, *_), *pictures in zip(
            held_out(work), *(found[name][prompt] for prompt, name in columns), strict=False
        )
    ]
    return sheet(["before", *(f"{prompt}, {name}" for prompt, name in columns)], rows[:4])


if __name__ == "__main__":
    main()
