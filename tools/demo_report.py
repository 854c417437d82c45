"""The end of `make demo`: a table, a loss curve and a grid of images that show the results of its commands.

usage: python tools/demo_report.py DEMO

Reads DEMO/shards and DEMO/run, generates images with the base model and with the adapter, and writes
DEMO/loss.png and DEMO/pictures.png. Run from the repository's root: paths in configs/demo.yaml are relative.
"""

# ruff: noqa: E402 - what libraries say while they are imported is silenced before that
from __future__ import annotations

import argparse
import statistics
import textwrap
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from PIL import Image

from qie.quiet_libraries import quiet_imports, quiet_libraries

quiet_imports()
from qie.config import Config, load_config
from qie.encode.images import decode_image
from qie.from_config import open_predictor, open_rows
from qie.quantities import human_bytes
from qie.recipe import Recipe
from qie.shards.discovery import find_indexes
from qie.shards.shard_set import ShardSet
from qie.stats import Summary, summarise
from qie.stream_chooser import open_stream
from qie.training.checkpoint_folders import find_checkpoint
from qie.training.reporting.metrics import METRICS_FILE, read_metrics

ROWS_SHOWN = 4
STEPS = 10
WARM_UP_STEPS = 5
TITLE_CHARACTERS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description="table, loss curve and pictures of the demo")
    parser.add_argument("demo", type=Path)
    demo = parser.parse_args().demo
    quiet_libraries()
    config = load_config("configs/demo.yaml")
    metrics = read_metrics(demo / "run" / METRICS_FILE)
    draw_losses(metrics, demo / "loss.png")
    draw_pictures(config, demo / "shards", find_checkpoint("latest", demo / "run"), demo / "pictures.png")
    print_table(summarise(find_indexes([demo / "shards"])), metrics)
    print(f"\n{demo}/loss.png      the loss curve")
    print(f"{demo}/pictures.png  input, target, before and after, for rows kept out of training")
    print("The model is tiny and random, so the images are noise; watch the validation loss fall.")


def print_table(summary: Summary, metrics: list[dict[str, Any]]) -> None:
    """The figures of the demo, one a line."""
    losses = [line["validation_loss"] for line in metrics if "validation_loss" in line]
    rows = [
        ("rows", f"{summary.rows} ({sum(summary.skipped.values())} skipped)"),
        ("shards", f"{summary.shards}, {human_bytes(summary.bytes)}"),
        ("bytes per sample", human_bytes(sum(summary.tensor_bytes.values()))),
        *((f"  {name}", human_bytes(size)) for name, size in summary.tensor_bytes.items()),
        ("step time", f"{step_time_ms(metrics):.1f} ms"),
        ("validation loss before", f"{losses[0]:.4f}"),
        ("validation loss after", f"{losses[-1]:.4f} ({losses[-1] / losses[0] - 1:+.0%})"),
    ]
    print()
    for name, value in rows:
        print(f"{name:<28} {value}")


def step_time_ms(lines: list[dict[str, Any]]) -> float:
    """Median wall time of a step, waiting for data included, without the first few."""
    times: list[float] = [line["step_time_s"] for line in lines if "step_time_s" in line][WARM_UP_STEPS:]
    return statistics.median(times) * 1000


def draw_losses(lines: list[dict[str, Any]], path: Path) -> None:
    """Training loss, smoothed, and validation loss over steps."""
    training = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    validation = [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line]
    window = max(len(training) // 20, 1)
    smooth = [
        (training[end - 1][0], statistics.fmean(loss for _, loss in training[end - window : end]))
        for end in range(window, len(training) + 1)
    ]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(*zip(*training, strict=True), color="tab:blue", alpha=0.2, linewidth=0.8, label="training, each step")
    axes.plot(*zip(*smooth, strict=True), color="tab:blue", label=f"training, mean of {window} steps")
    axes.plot(*zip(*validation, strict=True), color="tab:orange", marker="o", label="validation, fixed noise")
    axes.set(xlabel="step", ylabel="loss", title="LoRA on a tiny random model")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120)


def draw_pictures(config: Config, shards: Path, adapter: Path, path: Path) -> None:
    """Input, target, and the images of base model and adapter, for rows kept out of training."""
    source = open_rows(config, "the photographs")
    stream = open_stream(shards, seed=config.train.seed, validation_rows=config.validation.rows)
    assert isinstance(stream.samples, ShardSet)
    held_out = [stream.samples.entries[batch.positions[0]].row for batch in stream.validation_batches()[:ROWS_SHOWN]]
    predictors = [open_predictor(config, None), open_predictor(config, adapter)]
    figure, grid = pyplot.subplots(len(held_out), 4, figsize=(10, 2.6 * len(held_out)), layout="constrained")
    for line, number in zip(grid, held_out, strict=True):
        row = source.read(number)
        control, target = (
            decode_image(content, row.name, Recipe.background) for content in (row.controls[0], row.target)
        )
        images = [predictor.generate([control], row.prompt, steps=STEPS) for predictor in predictors]
        pictures: dict[str, Image.Image] = dict(
            zip(("input", "target", "before", "after"), (control, target, *images), strict=True)
        )
        for axes, (title, picture) in zip(line, pictures.items(), strict=True):
            axes.imshow(picture)
            text = title if title != "target" else textwrap.fill(f"target: {row.prompt}", TITLE_CHARACTERS)
            axes.set_title(text, fontsize=8)
            axes.axis("off")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
