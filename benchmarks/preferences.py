"""What pairs do to a model that has learnt something: Flow-DPO on the small model, sharp preferred to blurred.

    python benchmarks/preferences.py [--runs 3] [--steps 40] [--beta 2000 …] [--edit darker] [--pictures FILE]

64 pairs show one edit of squares of the demo's photographs: the target is the true edit, the rejected target the same,
blurred. What was learnt is judged on other photographs: which target of a pair the model prefers (half of them before
the first step, since all rewards are 0); how sharp the pictures are that it makes (the variance of the Laplacian), as a
part of that of the true edit, of which the VAE alone keeps about a quarter; and the PSNR of this edit and of all others
that the small model knows, which no pair shows. Each run has a seed of its own; base and adapters generate from equal
noise.

Further rows are what a pair takes: bytes in a shard, and the time of a training step beside that of `loss.kind: mse`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState
from measuring import ROOT, Results, Row, absolute, beside, figure
from measuring import parser as common
from models import quiet
from PIL import Image, ImageFilter, ImageOps
from sheet import sheet
from skimage.filters import laplace
from skimage.metrics import peak_signal_noise_ratio

import qie
from qie.config import Config, load_config
from qie.data.opening import open_stream
from qie.data.plan import PlannedBatch
from qie.inference.predictor import load_vae
from qie.inference.sample_images import SampleImages, embed_samples, read_samples
from qie.precompute import precompute
from qie.training.reporting.metrics import Preference
from qie.training.run import Run

sys.path.insert(0, str(ROOT / "tools"))
import make_demo_photos as demo
from make_photo_edits import png
from train_small_model import EDITS

NOT_LEARNT = {"mirrored", "cropped"}
"""Edits that the small model was trained on and does not know, see docs/small-model.md."""
KNOWN = [name for name in EDITS if name not in NOT_LEARNT]
SQUARES = {"pairs": 8, "plain": 8, "kept": 2}
"""Of each photograph: 64 pairs to train on, 16 to judge by."""


@dataclass(frozen=True)
class Asked:
    """A picture that every model is asked for."""

    edit: str
    photograph: Path
    seed: int

    @cached_property
    def before(self) -> Image.Image:
        with Image.open(self.photograph) as image:
            return image.convert("RGB")

    @cached_property
    def true(self) -> Image.Image:
        return EDITS[self.edit].apply(self.before)


@dataclass(frozen=True)
class Judged:
    """A model, by the pictures that were asked of it; a trained one also by what it prefers."""

    asked: tuple[Asked, ...]
    pictures: tuple[Image.Image, ...]
    preference: Preference | None = None

    def psnr(self, edit: str) -> float:
        """Of all pictures of an edit, beside the true ones, in dB."""
        return statistics.fmean(psnr(picture, one.true) for one, picture in self._of(edit))

    def sharpness(self, edit: str) -> float:
        """Mean of their variance of the Laplacian, as a part of the true ones'."""
        return statistics.fmean(sharpness(picture) / sharpness(one.true) for one, picture in self._of(edit))

    def _of(self, edit: str) -> Iterator[tuple[Asked, Image.Image]]:
        pairs = zip(self.asked, self.pictures, strict=True)
        return ((one, picture) for one, picture in pairs if one.edit == edit)


def sharpness(image: Image.Image) -> float:
    """The variance of the Laplacian of its grey levels."""
    return float(laplace(np.asarray(image.convert("L"), np.float64)).var())


def psnr(image: Image.Image, true: Image.Image) -> float:
    return float(peak_signal_noise_ratio(np.asarray(true), np.asarray(image.convert("RGB")), data_range=255))


def parser() -> argparse.ArgumentParser:
    made = common(__doc__, runs=3)
    made.add_argument("--beta", type=float, nargs="+", default=[2000.0], help="loss.beta, one training for each")
    made.add_argument("--steps", type=int, default=40, help="of each training (%(default)s)")
    made.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the configuration, of all trainings"
    )
    made.add_argument("--edit", choices=KNOWN, default="darker", help="that the pairs show (%(default)s)")
    made.add_argument("--blur", type=float, default=1.0, help="of the rejected target, in pixels (%(default)s)")
    made.add_argument("--side", type=int, default=128, help="of an image, in pixels (%(default)s)")
    made.add_argument("--photographs", type=int, default=8, help="how many get the edit of the pairs (%(default)s)")
    made.add_argument("--others", type=int, default=2, help="how many get each other edit (%(default)s)")
    made.add_argument("--pictures", type=Path, metavar="FILE", help="write pictures of seed 0 there, beside each other")
    return made


@contextmanager
def denormals_flushed() -> Iterator[None]:
    """Gradients of learnt pairs are denormal, with which a CPU takes five times as long for a training step."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@denormals_flushed()
def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    results = Results(__file__, options, arguments)
    quiet()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        judge = Judge(work, options, prepare(work, options))
        found: dict[float, list[Judged]] = {beta: [] for beta in options.beta}
        for beta in options.beta:
            for seed in range(options.runs):
                with trained(judge, options, beta, seed) as run:
                    found[beta].append(judge.judged(run))
                print(f"(β {beta:g}, seed {seed}: {told(found[beta][-1], options.edit)})", flush=True)
            results.add(*rows(options.edit, beta, judge, found[beta]))
        results.add(bytes_row(work), step_row(judge, options))
        if options.pictures:
            columns = {"base": judge.base} | {f"beta {beta:g}": ours[0] for beta, ours in found.items()}
            beside_each_other(columns, options.edit).save(options.pictures, quality=88)
    results.save()


def prepare(work: Path, options: argparse.Namespace) -> tuple[Asked, ...]:
    """Shards of pairs to train on, of the same rows without rejected targets, of pairs to judge by; what to ask for."""
    for name, photographs in (("pairs", demo.TRAINED), ("plain", demo.TRAINED), ("kept", demo.HELD_OUT.values())):
        write_rows(work / name, photographs, SQUARES[name], options, rejected=name != "plain")
        config = configured(work, options, name)
        rows, encoder = qie.open_rows(config), qie.open_encoder(config)
        precompute(rows, encoder, shards_of(work, name), rows=(0, len(rows)))
        encoder.release()
    files = []
    for stem, name in demo.HELD_OUT.items():
        files.append(work / f"{stem}.png")
        side = (options.side, options.side)
        ImageOps.fit(demo.photograph(name), side, Image.Resampling.LANCZOS).save(files[-1])
    others = [edit for edit in KNOWN if edit != options.edit]
    counts = {options.edit: options.photographs} | dict.fromkeys(others, options.others)
    return tuple(Asked(edit, file, at) for edit, count in counts.items() for at, file in enumerate(files[:count]))


def shards_of(work: Path, rows: str) -> Path:
    return work / f"{rows} shards"


def write_rows(
    folder: Path, photographs: Iterable[str], squares: int, options: argparse.Namespace, *, rejected: bool
) -> None:
    """Rows of one edit: the true edit as target, and the same, blurred, as rejected target."""
    controls, targets = folder / "control_images", folder / "training_images"
    for made in (controls, targets):
        made.mkdir(parents=True)
    edit, blur = EDITS[options.edit], ImageFilter.GaussianBlur(options.blur)
    for name in photographs:
        # The largest squares of a square photograph are one.
        distinct = {
            png(square): square for square in demo.iter_squares(demo.photograph(name), squares + 1, options.side)
        }
        for number, (control, square) in enumerate(islice(distinct.items(), squares)):
            stem, target = f"{Path(name).stem}-{number}", edit.apply(square)
            (controls / f"{stem}.png").write_bytes(control)
            (targets / f"{stem}.png").write_bytes(png(target))
            if rejected:
                (targets / f"{stem}_rejected.png").write_bytes(png(target.filter(blur)))
            instruction = edit.instructions[number % len(edit.instructions)]
            (targets / f"{stem}.txt").write_text(f"{instruction}\n", encoding="utf-8")


def configured(work: Path, options: argparse.Namespace, rows: str, **others: object) -> Config:
    """The demo's configuration, smaller, with the loss of pairs."""
    values = {
        "model.pretrained_model_name_or_path": ROOT / "configs" / "small_model",
        "model.lora.r": 16,
        "model.lora.lora_alpha": 32,
        "data.source": work / rows,
        "data.allow_tiny": "true",
        "data.area_px": options.side**2,
        "data.batch_size": 4,
        "cache.cache_dir": shards_of(work, rows),
        "cache.thumbnail_px": "null",
        "train.max_steps": options.steps,
        "train.output_dir": work / "run",
        "optimizer.init_args.lr": 1e-4,
        "lr_scheduler.scheduler_type": "constant",
        "lr_scheduler.warmup_steps": 0,
        "loss.kind": "flow_dpo",
        "loss.timestep_sampling": "logit_normal",
        "loss.logit_mean": -2,  # sharpness is decided where there is little noise, brightness where there is much
        "loss.shift": "none",
        "validation.rows": 0,
        "validation.sample_steps": 8,
        "validation.sample_cfg": 1,
        "logging.report_to": "[]",
        **{key.replace("__", "."): value for key, value in others.items()},
    }
    return load_config(
        ROOT / "configs" / "demo.yaml", [*(f"{key}={value}" for key, value in values.items()), *options.set]
    )


class Judge:
    """Judges a model in training by photographs that it never sees.

    Args:
        work: as `prepare` leaves it.
        asked: the pictures to generate.
    """

    def __init__(self, work: Path, options: argparse.Namespace, asked: tuple[Asked, ...]) -> None:
        self.work, self.asked, self._options = work, asked, options
        samples = [
            {"images": [str(one.photograph)], "prompt": EDITS[one.edit].instructions[0], "seed": one.seed}
            for one in asked
        ]
        self._config = configured(work, options, "kept", validation__samples=json.dumps(samples))
        encoder = qie.open_encoder(self._config)
        self._embedded = embed_samples(self._config, read_samples(self._config, encoder.pretrained.family), encoder)
        name = self._config.model.pretrained_model_name_or_path
        self.pretrained = qie.open_pretrained(name, components=("transformer", "scheduler", "vae"))
        self._pairs = open_stream(shards_of(work, "kept"))

    @cached_property
    def base(self) -> Judged:
        """The model before the first step."""
        with trained(self, self._options, 1.0, 0, steps=0) as run:
            return Judged(self.asked, self._pictures(run))

    @cached_property
    def attainable(self) -> float:
        """The sharpness of the taught edit's true pictures, once encoded and decoded: what the VAE lets through."""
        true = [one.true for one in self.asked if one.edit == self._options.edit]
        vae = load_vae(self.pretrained, torch.float32)
        return statistics.fmean(sharpness(decoded(vae, image)) / sharpness(image) for image in true)

    def judged(self, run: Run) -> Judged:
        return Judged(self.asked, self._pictures(run), self._preference(run))

    def _pictures(self, run: Run) -> tuple[Image.Image, ...]:
        generate = SampleImages(self._config, self.pretrained, self._embedded, run.accelerator.device)
        return tuple(run.sample_images(generate))

    def _preference(self, run: Run) -> Preference:
        """Of the pairs kept out, each at two noise levels; all of them cover all levels."""
        count, found = len(self._pairs.samples.columns), []
        with run.trainable.evaluating() as model:
            for number in range(count):
                batch = self._pairs.load(PlannedBatch((number,), (1.0,)))
                for level in (number + 0.5) / (2 * count), (number + 0.5) / (2 * count) + 0.5:
                    losses = run.objective.validation_losses(model, batch, level)
                    found.append(losses.columns)
        _, levels, _, target, rejected = torch.cat(found).unbind(1)
        return Preference.of(levels, target, rejected)


@torch.no_grad()
def decoded(vae: Any, image: Image.Image) -> Image.Image:
    """An image as the VAE gives it back."""
    pixels = torch.from_numpy(np.asarray(image, np.float32) / 127.5 - 1).permute(2, 0, 1)[None, :, None]
    given = vae.decode(vae.encode(pixels).latent_dist.mode()).sample[0, :, 0]
    return Image.fromarray(((given.clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 0).numpy())


@contextmanager
def trained(
    judge: Judge, options: argparse.Namespace, beta: float, seed: int, *, steps: int | None = None, kind: str = "pairs"
) -> Iterator[Run]:
    """A run after its steps; of `kind` plain, with the mse loss on the rows without rejected targets."""
    more: dict[str, object] = {"loss__kind": "mse"} if kind == "plain" else {"loss__beta": beta}
    config = configured(judge.work, options, kind, train__seed=seed, **more)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = qie.open_accelerator(config)
    with qie.open_training_stream(config, judge.pretrained, accelerator) as stream:
        run = Run(config, judge.pretrained, stream, accelerator)
        with closing(run.batches):
            for _ in range(options.steps if steps is None else steps):
                run.training_step()
            yield run


def rows(edit: str, beta: float, judge: Judge, found: Sequence[Judged]) -> list[Row]:
    """What the runs of a β have come to, beside the base."""
    base, name = judge.base, f"β {beta:g}"
    preferences = [one.preference for one in found if one.preference]
    levels = zip(*([level or 0 for level in one.margin_by_level] for one in preferences), strict=True)
    margins = ", ".join(figure(statistics.fmean(level)) for level in levels)
    targets, rejected = (
        figure(statistics.fmean(getattr(one, name) for one in preferences))
        for name in ("target_reward", "rejected_reward")
    )
    detail = f"by noise level {margins}; rewards: target {targets}, rejected {rejected}"
    sharp = [one.sharpness(edit) / base.sharpness(edit) for one in found]
    share = statistics.fmean(one.sharpness(edit) for one in found)
    parts = f"{share:.3f} of the true edit's, base {base.sharpness(edit):.3f}, the VAE alone {judge.attainable:.3f}"
    others = {
        other: statistics.fmean(one.psnr(other) for one in found) - base.psnr(other) for other in KNOWN if other != edit
    }
    least = min(others, key=others.__getitem__)
    means = [statistics.fmean(one.psnr(other) - base.psnr(other) for other in others) for one in found]
    within = sum(abs(change) <= 1 for change in others.values())
    spread = f"{within} of {len(others)} within 1 dB; least {others[least]:+.2f} dB, {least}"
    accuracies = [100 * one.accuracy for one in preferences]
    before, change = "the base: 50 %", [one.psnr(edit) - base.psnr(edit) for one in found]
    return [
        absolute(f"accuracy {beta:g}", f"pairs kept out, {name}: preferred rightly", accuracies, " %", before),
        absolute(f"margin {beta:g}", f"the same, {name}: margin", [one.margin for one in preferences], " of reward",
                 "the base: 0", detail),
        absolute(f"sharpness {beta:g}", f"pictures of the pairs' edit, {name}", sharp, "× as sharp", "the base", parts),
        absolute(f"psnr {beta:g}", f"PSNR of the pairs' edit, {name}", change, " dB", "the base",
                 f"base {base.psnr(edit):.1f} dB"),
        absolute(f"others {beta:g}", f"PSNR of other edits, {name}", means, " dB", "the base", spread),
    ]  # fmt: skip


def told(judged: Judged, edit: str) -> str:
    """For who waits."""
    return f"{judged.preference}, sharpness {judged.sharpness(edit):.3f}, PSNR " + ", ".join(
        f"{name} {judged.psnr(name):.2f}" for name in KNOWN
    )


def bytes_row(work: Path) -> Row:
    """How much longer a record becomes by its rejected target."""
    paired, plain = (
        sum(file.stat().st_size for file in shards_of(work, name).glob("*.tar")) for name in ("pairs", "plain")
    )
    count = SQUARES["pairs"] * len(demo.TRAINED)
    detail = f"{(paired - plain) / count / 1e3:.2f} kB a pair more"
    return absolute("bytes", "a shard of pairs", [paired / plain], "× the bytes", "without rejected targets", detail)


def step_row(judge: Judge, options: argparse.Namespace) -> Row:
    """The CPU time of a training step of pairs, beside one of the same rows with mse, in turn, but for the first."""
    with (
        trained(judge, options, options.beta[0], 0, steps=1, kind="plain") as theirs,
        trained(judge, options, options.beta[0], 0, steps=1) as ours,
    ):
        turns = [(cpu_seconds(theirs), cpu_seconds(ours)) for _ in range(max(options.steps // 4, 1))]
    what, peer = "CPU time of a training step of pairs", "loss.kind: mse, the same rows"
    return beside("step", what, peer, *map(list, zip(*turns, strict=True)), unit="× the time", share=True)


def cpu_seconds(run: Run) -> float:
    """Of a training step, whatever else the machine does."""
    started = time.process_time()
    run.training_step()
    return time.process_time() - started


def beside_each_other(columns: dict[str, Judged], edit: str) -> Image.Image:
    """A row for some photographs: before, the true edit, and each model's picture with its PSNR and sharpness."""
    asked = next(iter(columns.values())).asked
    chosen = islice((at for at, one in enumerate(asked) if one.edit == edit), 4)
    rows = []
    for at in chosen:
        one, whole = asked[at], sharpness(asked[at].true)
        pictures = [judged.pictures[at] for judged in columns.values()]
        words = [f"{psnr(each, one.true):.1f} dB, sharpness {sharpness(each) / whole:.2f}" for each in pictures]
        rows.append([(one.before, ""), (one.true, "sharpness 1"), *zip(pictures, words, strict=True)])
    return sheet(["before", "true", *columns], rows, 192, Image.Resampling.NEAREST)


if __name__ == "__main__":
    main()
