"""Precomputing as a whole: do the two encoders overlap, and what does everything around them cost? On the CPU.

    python benchmarks/pipeline.py [--rows 60] [--engine-rows 100000] [--runs 3]

overlap, artificial: two stages that sleep equally long, as two GPUs would keep the host waiting.
overlap, encoders:   the real encoders on a tiny checkpoint, one thread each; the text pass is repeated until it costs
                     what the VAE does.
    Beside: the same stages in turn, row by row. The ideal is one stage alone; `start-up` is one row's way through all.
engine: rows per second through reading, keys, records, tar, index and publishing, around an encoder that costs nothing.
    Beside: webdataset's ShardWriter with the same tensors as .pth and metadata as .json, without keys, hashes or index.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import webdataset

from qie.data.sources import open_source
from qie.encode import Encoder, EncoderOptions
from qie.precompute import Report, precompute
from qie.pretrained import open_checkpoint
from qie.recipe import Recipe
from qie.stages import Pipeline, Stage
from qie.types import Row, Sample

ROOT = Path(__file__).resolve().parent.parent
SLEEP_S = 0.02
IMAGE_PX = 512 * 512


def main() -> None:
    parser = argparse.ArgumentParser(description="precomputing as a whole")
    parser.add_argument("--rows", type=int, default=60, help="rows for the overlap")
    parser.add_argument("--engine-rows", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, 1 thread per stage")
    sleeping = [Stage(name, _sleep) for name in ("vae", "text")]
    print_overlap("overlap, artificial", sleeping, lambda: list(range(options.rows)), options.runs)
    with tempfile.TemporaryDirectory() as folder:
        stages, rows = real_stages(Path(folder), options.rows)
        print_overlap("overlap, encoders", stages, rows, options.runs)
        print_engine(Path(folder), options.engine_rows, options.runs)


def print_overlap(name: str, stages: Sequence[Stage], new_items: Callable[[], Sequence[Any]], runs: int) -> None:
    """One line: overlapped beside in turn, and beside the ideal. `new_items` gives other ones each time."""
    ratios, bounds, walls = [], [], []
    for _ in range(runs):
        items, again = new_items(), new_items()
        alone = dict.fromkeys((stage.name for stage in stages), 0.0)
        started = time.perf_counter()
        first_s = 0.0
        for item in items:
            value = item
            for stage in stages:
                before = time.perf_counter()
                value = stage.work(value)
                alone[stage.name] += time.perf_counter() - before
            first_s = first_s or time.perf_counter() - started
        in_turn_s = time.perf_counter() - started
        started = time.perf_counter()
        assert sum(1 for _ in Pipeline(stages).run(again)) == len(again)
        wall_s = time.perf_counter() - started
        slowest = max(seconds / stage.workers for stage, seconds in zip(stages, alone.values(), strict=True))
        walls.append(wall_s)
        ratios.append(in_turn_s / wall_s)
        bounds.append((wall_s - first_s) / slowest)
    shares = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in alone.items())
    print(
        f"{name}: {statistics.median(walls):.2f} s; in turn: {statistics.median(ratios):.2f}× as long "
        f"({min(ratios):.2f}–{max(ratios):.2f}); without start-up {statistics.median(bounds):.3f} of the slowest stage "
        f"alone ({min(bounds):.3f}–{max(bounds):.3f}); alone: {shares}"
    )


def real_stages(folder: Path, count: int) -> tuple[list[Stage], Callable[[], list[list[Row]]]]:
    """The encoder's stages with text about as costly as the VAE, and rows for them."""
    for tool, place, *more in (("make_tiny_model.py", "model"), ("make_photo_edits.py", "photos", "--rows", "12")):
        subprocess.run([sys.executable, ROOT / "tools" / tool, folder / place, *more], check=True, capture_output=True)
    cpu = torch.device("cpu")
    options = EncoderOptions(areas_px=(IMAGE_PX,))
    encoder = Encoder.open(open_checkpoint(str(folder / "model")), vae_device=cpu, text_device=cpu, options=options)
    photos = open_source(folder / "photos")
    numbers = itertools.count()

    def new_rows() -> list[list[Row]]:
        """Rows with images of their own: of the same image, only the first would be encoded."""
        rows = [(photos.read(number % len(photos)), b"%d" % next(numbers)) for number in range(count)]
        return [[replace(row, target=row.target + tag, controls=(row.controls[0] + tag,))] for row, tag in rows]

    prepare, vae, text = encoder.stages
    first, *others = (prepare.work(row) for row in new_rows()[:4])
    text.work(vae.work(first))  # loads the weights
    vae_s = statistics.median([_seconds(lambda item=item: vae.work(item)) for item in others])
    latents = [vae.work(item) for item in others]
    text_s = statistics.median([_seconds(lambda item=item: text.work(item)) for item in latents])
    # Of the same images, the vision tower is asked once.
    again_s = statistics.median([_seconds(lambda item=item: text.work(item)) for item in latents])
    repeats = max(1, round(1 + (vae_s - text_s) / again_s))

    def repeated(item: Any) -> Any:
        for _ in range(repeats):
            result = text.work(item)
        return result

    return [prepare, vae, replace(text, work=repeated)], new_rows


class FreeEncoder:
    """Gives every row the same tensors."""

    def __init__(self) -> None:
        same = "0" * 64
        self.recipe = Recipe("edit", same, same, same, same, (4096,), None, "float32", "float32", same, same)
        embed = torch.zeros(12, 8, dtype=torch.float16)
        latent = torch.zeros(16, 1, 4, 4, dtype=torch.float16)
        mask = torch.ones(12, dtype=torch.bool)
        self._sample = Sample("", "", latent, (latent,), embed, mask, embed[10:], mask, 10)
        self.stages = (Stage("encode", self.encode_together),)

    def encode_together(self, rows: Sequence[Row]) -> list[Sample]:
        return [replace(self._sample, key=self.recipe.key(row), prompt=row.prompt) for row in rows]


class Generated:
    """Rows that exist when they are read."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def name(self, index: int) -> str:
        return f"row {index}"

    def part(self, index: int) -> str:
        return "" * index

    def read(self, index: int) -> Row:
        return Row(index, self.name(index), b"target %d" % index, (b"control %d" % index,), f"prompt {index}")


def print_engine(folder: Path, count: int, runs: int) -> None:
    """One line: the engine beside webdataset's writer, and how its memory grew."""
    ours, peers, grown = [], [], []
    for run in range(runs):
        memory = []

        def watch(report: Report, memory: list[int] = memory) -> None:
            if report.rows in (count // 10, count):
                memory.append(resident_bytes())

        started = time.perf_counter()
        precompute(Generated(count), FreeEncoder(), folder / f"ours-{run}", rows=(0, count), progress=watch)  # type: ignore[arg-type]
        ours.append(count / (time.perf_counter() - started))
        grown.append((memory[-1] - memory[0]) / 1e6)
        peers.append(webdataset_rate(folder / f"peer-{run}", count))
    ratios = [mine / peer for mine, peer in zip(ours, peers, strict=True)]
    print(
        f"engine: {statistics.median(ours):.0f} rows/s ({min(ours):.0f}–{max(ours):.0f}); webdataset's writer: "
        f"{statistics.median(peers):.0f}; {statistics.median(ratios):.2f}× ({min(ratios):.2f}–{max(ratios):.2f}); "
        f"memory grew by {max(grown):.0f} MB from a tenth of {count} rows to the last; peak {peak_bytes() / 1e6:.0f} MB"
    )


def webdataset_rate(folder: Path, count: int) -> float:
    folder.mkdir()
    encoder, source = FreeEncoder(), Generated(count)
    started = time.perf_counter()
    with webdataset.ShardWriter(str(folder / "%06d.tar"), maxcount=64, verbose=0) as writer:
        for number in range(count):
            row = source.read(number)
            (sample,) = encoder.encode_together([row])
            tensors = {
                "pixel_latent": sample.pixel_latent,
                "control_latent": sample.control_latent[0],
                "prompt_embed": sample.prompt_embed,
                "empty_prompt_embed": sample.empty_prompt_embed,
            }
            about = {"name": row.name, "prompt": row.prompt}
            writer.write(
                {"__key__": sample.key} | {f"{name}.pth": tensor for name, tensor in tensors.items()} | {"json": about}
            )
    return count / (time.perf_counter() - started)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _sleep(item: Any) -> Any:
    time.sleep(SLEEP_S)
    return item


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
