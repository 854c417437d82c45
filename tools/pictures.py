#!/usr/bin/env python3
"""Write the pictures of the documentation, docs/*.svg, *.jpg and *.png, each by the function that PICTURES names.

    python tools/pictures.py NAME [NAME …] [--demo DEMO] [--small-model WORK]

    data.svg, memory.svg                            at once
    demo.jpg, report.png                            from DEMO, as `make demo` leaves it
    watch.png, watch-pictures.png, watch-precompute.png
                                                    from DEMO: Chromium opens the pages of `qie watch`
    small-model-edits.jpg, small-model-curves.png   from WORK, as tools/train_small_model.py leaves it
    fp8-edits.jpg, preferences.jpg, preservation.jpg
                                                    by benchmarks, which train

For watch-pictures.png the run of DEMO has to have some: --set validation.samples. Screenshots need chromium.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tools")]
WIDE, HIGH = 1200, 1300
"""Of a screenshot, in pixels; a longer page is cut there."""
LOADED = "[...document.images].every((one) => one.complete)"


def draw_data(_: argparse.Namespace, picture: Path) -> None:
    from data_diagram import data_diagram

    picture.write_text(data_diagram(), encoding="utf-8")


def draw_memory(_: argparse.Namespace, picture: Path) -> None:
    from chart import memory_chart
    from tables import load, rows_of

    picture.write_text(memory_chart(rows_of(load()["cpu"]["claims.py"])), encoding="utf-8")


def take_demo(sources: argparse.Namespace, picture: Path) -> None:
    with Image.open(sources.demo / "pictures.png") as image:
        image.convert("RGB").save(picture, quality=88)


def take_edits(sources: argparse.Namespace, picture: Path) -> None:
    shutil.copyfile(sources.small_model / "edits.jpg", picture)


def take_curves(sources: argparse.Namespace, picture: Path) -> None:
    shutil.copyfile(sources.small_model / "curves.png", picture)


def by(benchmark: str, *options: str) -> Callable[[argparse.Namespace, Path], None]:
    def train(_: argparse.Namespace, picture: Path) -> None:
        command = [sys.executable, f"benchmarks/{benchmark}", *options, "--pictures", str(picture)]
        subprocess.run(command, cwd=ROOT, check=True)

    return train


def show_run(sources: argparse.Namespace, picture: Path) -> None:
    with watching(sources.demo, "run") as address:
        screenshot(address, picture)


def show_pictures(sources: argparse.Namespace, picture: Path) -> None:
    with watching(sources.demo, "run") as address:
        screenshot(address, picture, "#pictures", 560)


def show_shards(sources: argparse.Namespace, picture: Path) -> None:
    with watching(sources.demo, "shards") as address:
        screenshot(address, picture)


def show_report(sources: argparse.Namespace, picture: Path) -> None:
    with TemporaryDirectory() as folder:
        page = Path(folder, "shards.html")
        with started(sources.demo, "stats", "shards", "--html", str(page)) as command:
            assert command.stdout
            command.stdout.read()
        screenshot(page, picture, "#samples")


PICTURES: dict[str, Callable[[argparse.Namespace, Path], None]] = {
    "data.svg": draw_data,
    "demo.jpg": take_demo,
    "fp8-edits.jpg": by(
        "quality.py", "--steps", "200", "--photographs", "4", "--runs", "3", "--only", "fp8", "fp8 products"
    ),
    "memory.svg": draw_memory,
    "preferences.jpg": by("preferences.py", "--runs", "1", "--beta", "50", "500", "2000"),
    "preservation.jpg": by("preservation.py", "--photographs", "4", "--runs", "1"),
    "report.png": show_report,
    "small-model-curves.png": take_curves,
    "small-model-edits.jpg": take_edits,
    "watch-pictures.png": show_pictures,
    "watch-precompute.png": show_shards,
    "watch.png": show_run,
}


@contextmanager
def started(demo: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A command of qie, in DEMO: pages show the names that it is given, and no path of this machine."""
    command = [sys.executable, "-u", "-m", "qie", *words]
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=demo, env=path, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@contextmanager
def watching(demo: Path, place: str) -> Iterator[str]:
    """The address of a page of `qie watch`."""
    with started(demo, "watch", place, "--port", "0") as server:
        assert server.stdout
        told = re.search(r"http://\S+", server.stdout.readline())
        assert told, "qie watch told no address"
        yield told[0]


def screenshot(page: str | Path, picture: Path, top: str = "body", height: int = HIGH) -> None:
    """A page as a person sees it, from an element on, in 256 colours."""
    from tests.stats.chromium import chromium

    with TemporaryDirectory(ignore_cleanup_errors=True) as profile, chromium(Path(profile)) as tab:
        tab.open(page, width=WIDE, height=HIGH)
        tab.value(
            "new Promise((done) => {"
            f"const look = () => {LOADED} ? done() : requestAnimationFrame(look);"
            "setTimeout(look, 1000)})"  # the first answer of the page's server
        )
        first = round(tab.value(f"document.querySelector({top!r}).getBoundingClientRect().top + scrollY"))
        pixels = tab.picture()[first : first + height]
    Image.fromarray(pixels).quantize(256, dither=Image.Dither.NONE).save(picture, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write pictures of the documentation.")
    parser.add_argument("names", metavar="NAME", nargs="+", choices=PICTURES, help=", ".join(PICTURES))
    parser.add_argument("--demo", type=Path, default=ROOT / "demo", help="as `make demo` leaves it (%(default)s)")
    parser.add_argument("--small-model", metavar="WORK", type=Path, help="folder of tools/train_small_model.py")
    sources = parser.parse_args()
    sources.demo = sources.demo.resolve()
    for name in sources.names:
        if sources.small_model is None and PICTURES[name] in (take_edits, take_curves):
            parser.error(f"{name} needs --small-model")
        PICTURES[name](sources, DOCS / name)
        print(DOCS / name)


if __name__ == "__main__":
    main()
