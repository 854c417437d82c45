"""The end of `make demo`: what the training did to photographs that it never saw, as a table, pictures and a page.

usage: python tools/demo_report.py DEMO

Reads DEMO/shards, DEMO/run, DEMO/held_out and the images of qie-predict in DEMO/before and DEMO/after. Writes
DEMO/loss.png, DEMO/pictures.png and DEMO/report.html.
"""

# ruff: noqa: E402 - what libraries say while they are imported is silenced before that
from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot
from PIL import Image
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from qie.quiet_libraries import quiet_imports, quiet_libraries

quiet_imports()
from qie.html_report.gallery import PICTURE_PX, SmallPicture
from qie.html_report.markup import Html, note, panel, table, tag
from qie.html_report.page import document, write_page
from qie.html_report.sections import section
from qie.quantities import human_bytes
from qie.shards.discovery import find_indexes
from qie.stats import Summary, summarise
from qie.training.reporting.metrics import METRICS_FILE, read_metrics

COLUMNS = ("input", "true edit", "before training", "after training")
WARM_UP_STEPS = 5
ACROSS = 2  # photographs in a line of pictures.png


@dataclass(frozen=True)
class HeldOut:
    """A photograph that training never saw, its true edit, and what the model made of it."""

    name: str
    images: tuple[Image.Image, ...]  # as COLUMNS

    def psnr(self, column: int) -> float:
        """Of a column's image beside the true edit, in dB."""
        return float(peak_signal_noise_ratio(*self._pair(column), data_range=255))

    def ssim(self, column: int) -> float:
        return float(structural_similarity(*self._pair(column), channel_axis=2, data_range=255))

    def _pair(self, column: int) -> tuple[Any, Any]:
        return np.asarray(self.images[1]), np.asarray(self.images[column])


def main() -> None:
    parser = argparse.ArgumentParser(description="table, pictures and page of the demo")
    parser.add_argument("demo", type=Path)
    demo = parser.parse_args().demo
    quiet_libraries()
    metrics = read_metrics(demo / "run" / METRICS_FILE)
    photographs = read_held_out(demo)
    facts = figures(summarise(find_indexes([demo / "shards"])), metrics, photographs)
    draw_losses(metrics, demo / "loss.png")
    draw_pictures(photographs, demo / "pictures.png")
    write_page(demo / "report.html", page(photographs, facts, demo / "loss.png"))
    print()
    for name, value in facts.items():
        print(f"{name:<28} {value}")
    print(f"\n{demo}/pictures.png  {', '.join(COLUMNS)}: photographs that training never saw")
    print(f"{demo}/report.html   the same with figures, as a page")
    print(f"{demo}/loss.png      the loss curve")


def read_held_out(demo: Path) -> list[HeldOut]:
    """The photographs that all four folders hold."""
    folders = (demo / "held_out/control_images", demo / "held_out/training_images", demo / "before", demo / "after")
    found = []
    for file in sorted(folders[0].glob("*.png")):
        images = []
        for folder in folders:
            with Image.open(folder / file.name) as image:
                images.append(image.convert("RGB"))
        found.append(HeldOut(file.stem, tuple(images)))
    return found


def figures(summary: Summary, metrics: list[dict[str, Any]], photographs: Sequence[HeldOut]) -> dict[str, str]:
    """The figures of the demo by their names."""
    losses = [line["validation_loss"] for line in metrics if "validation_loss" in line]
    psnr = [statistics.fmean(one.psnr(column) for one in photographs) for column in (2, 3)]
    ssim = [statistics.fmean(one.ssim(column) for one in photographs) for column in (2, 3)]
    return {
        "rows": f"{summary.rows} ({sum(summary.skipped.values())} skipped)",
        "shards": f"{summary.shards}, {human_bytes(summary.bytes)}",
        "bytes per sample": human_bytes(sum(summary.tensor_bytes.values())),
        **{f"  {name}": human_bytes(size) for name, size in summary.tensor_bytes.items()},
        "step time": f"{step_time_ms(metrics):.1f} ms",
        "validation loss": f"{losses[0]:.4f} before, {losses[-1]:.4f} after ({losses[-1] / losses[0] - 1:+.0%})",
        "PSNR of the edit": f"{psnr[0]:.1f} dB before, {psnr[1]:.1f} dB after ({psnr[1] - psnr[0]:+.1f} dB), "
        f"{len(photographs)} photographs",
        "SSIM of the edit": f"{ssim[0]:.2f} before, {ssim[1]:.2f} after",
    }


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
    axes.set(xlabel="step", ylabel="loss", title="A LoRA learns one edit")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120)


def draw_pictures(photographs: Sequence[HeldOut], path: Path) -> None:
    """Input, true edit, before and after of each photograph, side by side."""
    lines = -(-len(photographs) // ACROSS)
    figure, grid = pyplot.subplots(
        lines,
        len(COLUMNS) * ACROSS,
        figsize=(1.7 * len(COLUMNS) * ACROSS, 1.8 * lines),
        layout="constrained",
        squeeze=False,
    )
    for axes in grid.flat:
        axes.axis("off")
    for number, photograph in enumerate(photographs):
        first = number % ACROSS * len(COLUMNS)
        for column, image in enumerate(photograph.images):
            axes = grid[number // ACROSS][first + column]
            axes.imshow(image)
            if number < ACROSS:
                axes.set_title(COLUMNS[column], fontsize=11, fontweight="bold" if column == 3 else None)
    figure.savefig(path, dpi=110)


def page(photographs: Sequence[HeldOut], facts: dict[str, str], losses: Path) -> str:
    """The page: figures, and each photograph with its true edit and both results."""
    rows = [
        [
            photograph.name,
            *(
                _picture(image, f"{photograph.name}, {column}")
                for column, image in zip(COLUMNS, photograph.images, strict=True)
            ),
            f"{photograph.psnr(2):.1f} → {photograph.psnr(3):.1f}",
            f"{photograph.ssim(2):.2f} → {photograph.ssim(3):.2f}",
        ]
        for photograph in photographs
    ]
    heads = ("photograph", *COLUMNS, "PSNR, dB", "SSIM")
    with Image.open(losses) as image:
        curve = _picture(image, "the loss over steps", 840)
    return document(
        "What the demo taught",
        tag(
            "header",
            tag("p", "make demo", class_="soft"),
            tag("h1", "One edit, taught to a small model"),
            note("Training saw none of these photographs. PSNR and SSIM: the model's edit beside the true one."),
        ),
        tag(
            "main",
            section("photographs", panel(table(heads, rows, numbers=(5, 6)))),
            section("figures", panel(table(("what", "found"), list(facts.items())))),
            section("loss", panel(curve)),
        ),
        tag("footer", "Written by tools/demo_report.py."),
    )


def _picture(image: Image.Image, name: str, width_px: int = 160) -> Html:
    small = SmallPicture.of(image, max(width_px, PICTURE_PX))
    return tag("img", src=small.uri, width=width_px, height=width_px * small.height // small.width, alt=name)


if __name__ == "__main__":
    main()
