"""Precomputing as a whole: whether the two encoders overlap, and the cost of everything around them. On the CPU.

    python benchmarks/pipeline.py [--rows 60] [--engine-rows 100000] [--runs 3]

overlap, artificial: two stages that sleep equally long, as two GPUs would keep the host waiting.
overlap, encoders:   the real encoders on a tiny model, one thread each; the text pass is repeated until it costs
                     what the VAE does. So small a text encoder is nearly all Python, whose lock the VAE waits for.
overlap, wide:       the VAE and layers of Qwen2.5-VL in their released shapes, which compute rather than call.
    Peer: the same stages in turn, row by row. The ideal is one stage alone; `start-up` is one row's way through all.
engine: rows per second through reading, keys, records, tar, index and publishing, around an encoder that costs nothing.
    Peer: webdataset's ShardWriter with the same tensors as .pth and metadata as .json, without keys, hashes or index.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import webdataset
from diffusers import AutoencoderKLQwenImage
from encoders import Passes, config
from measuring import ROOT, Results, Row, absolute, beside, figure, forget_peak, grown_bytes, seconds
from measuring import parser as common

from qie.data.sources import open_source
from qie.encode import Encoder, EncoderOptions
from qie.encode.vae import still_encoder
from qie.precompute import Report, precompute
from qie.pretrained import open_pretrained
from qie.recipe import Recipe
from qie.stages import Pipeline, Stage, Stages, quick_turns
from qie.types import Row as DataRow
from qie.types import Sample

SLEEP_S = 0.02
IMAGE_PX = 512 * 512


def parser() -> argparse.ArgumentParser:
    made = common(__doc__, runs=3)
    made.add_argument("--rows", type=int, default=60, help="rows for the overlap")
    made.add_argument("--engine-rows", type=int, default=100_000)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    torch.set_num_threads(1)
    quick_turns()  # as qie-precompute does
    results = Results(__file__, options, arguments)
    sleeping = [Stage(name, _sleep) for name in ("vae", "text")]
    results.add(*overlap("artificial", "two stages that sleep", sleeping, lambda: [*range(options.rows)], options.runs))
    with tempfile.TemporaryDirectory() as folder:
        stages, rows = real_stages(Path(folder), options.rows)
        results.add(*overlap("encoders", "both encoders, tiny", stages, rows, options.runs))
        results.add(
            *overlap("wide", "both encoders, released widths", wide_stages(), lambda: [*range(5)], options.runs)
        )
        results.add(*engine(Path(folder), options.engine_rows, options.runs))
    results.save()


def overlap(
    key: str, what: str, stages: Sequence[Stage[Any, Any]], new_items: Callable[[], Sequence[Any]], runs: int
) -> list[Row]:
    """Overlapped compared with in turn, and with the ideal. `new_items` gives new items each time."""
    in_turn, overlapped, slowest = [], [], []
    alone: dict[str, float] = {}
    for _ in range(runs):
        items, again = new_items(), new_items()
        alone = dict.fromkeys((stage.name for stage in stages), 0.0)
        first_s, took = 0.0, 0.0
        for item in items:
            value = item
            for stage in stages:
                before = time.perf_counter()
                value = stage.work(value)
                spent = time.perf_counter() - before
                alone[stage.name] += spent
                took += spent
            first_s = first_s or took
        in_turn.append(took)
        overlapped.append(seconds(partial(_exhaust, stages, again)))
        ideal = max(spent / stage.workers for stage, spent in zip(stages, alone.values(), strict=True))
        ideal *= 1 - 1 / len(items)  # the first row is what start-up is
        slowest.append((overlapped[-1] - first_s) / ideal)
    shares = ", ".join(f"{name} {figure(spent)} s" for name, spent in alone.items())
    return [
        beside(
            f"overlap {key}", f"stages overlapped, {what}", "the same stages in turn", in_turn, overlapped, more=shares
        ),
        absolute(f"ideal {key}", f"without start-up, {what}", slowest, "× the time", "the slowest stage alone"),
    ]


def _exhaust(stages: Sequence[Stage[Any, Any]], items: Sequence[Any]) -> None:
    assert sum(1 for _ in Pipeline(Stages[Any, Any](*stages)).run(items)) == len(items)


def real_stages(folder: Path, count: int) -> tuple[list[Stage[Any, Any]], Callable[[], list[list[DataRow]]]]:
    """The encoder's stages with text about as costly as the VAE, and rows for them."""
    for tool, place, *more in (("make_tiny_model.py", "model"), ("make_photo_edits.py", "photos", "--rows", "12")):
        subprocess.run([sys.executable, ROOT / "tools" / tool, folder / place, *more], check=True, capture_output=True)
    cpu = torch.device("cpu")
    options = EncoderOptions(areas_px=(IMAGE_PX,))
    encoder = Encoder.open(open_pretrained(str(folder / "model")), vae_device=cpu, text_device=cpu, options=options)
    photos = open_source(folder / "photos")
    numbers = itertools.count()

    def new_rows() -> list[list[DataRow]]:
        """Rows with images of their own: of the same image, only the first would be encoded."""
        rows = [(photos.read(number % len(photos)), b"%d" % next(numbers)) for number in range(count)]
        return [[replace(row, target=row.target + tag, controls=(row.controls[0] + tag,))] for row, tag in rows]

    prepare, vae, text = encoder.stages
    first, *others = (prepare.work(row) for row in new_rows()[:4])
    text.work(vae.work(first))  # loads the weights
    vae_s = _median_s(vae, others)
    latents = [vae.work(item) for item in others]
    text_s = _median_s(text, latents)
    # Of the same images, the vision tower is asked once.
    again_s = _median_s(text, latents)
    repeats = max(1, round(1 + (vae_s - text_s) / again_s))

    def repeated(item: Any) -> Any:
        for _ in range(repeats):
            result = text.work(item)
        return result

    return [prepare, vae, replace(text, work=repeated)], new_rows


def wide_stages() -> list[Stage[Any, Any]]:
    """The whole VAE on 384², and one layer of each kind of Qwen2.5-VL on 504²: about as costly as one another."""
    torch.manual_seed(0)
    vae = still_encoder(AutoencoderKLQwenImage().eval())
    image = torch.randn(1, 3, 384, 384).contiguous(memory_format=torch.channels_last).unsqueeze(2)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config(layers=1)).model.eval()
    passes = Passes(model, torch.device("cpu"), torch.float32, patches=36)

    def work(compute: Callable[[], object], item: int) -> int:
        with torch.inference_mode():
            compute()
        return item

    return [Stage("vae", partial(work, partial(vae, image))), Stage("text", partial(work, passes.sharing_prefix))]


class FreeEncoder:
    """Gives every row the same tensors."""

    def __init__(self) -> None:
        same = "0" * 64
        self.recipe = Recipe("edit", same, same, same, same, (4096,), None, "float32", "float32", same, same)
        embed = torch.zeros(12, 8, dtype=torch.float16)
        latent = torch.zeros(16, 1, 4, 4, dtype=torch.float16)
        mask = torch.ones(12, dtype=torch.bool)
        self._sample = Sample("", "", latent, (latent,), embed, mask, embed[10:], mask, 10)
        self.stages = Stages.of(Stage("encode", self.encode_together))

    def encode_together(self, rows: Sequence[DataRow]) -> list[Sample]:
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

    def read(self, index: int) -> DataRow:
        return DataRow(index, self.name(index), b"target %d" % index, (b"control %d" % index,), f"prompt {index}")


def engine(folder: Path, count: int, runs: int) -> list[Row]:
    """The engine compared with webdataset's writer, and the growth of its memory."""
    ours, peers, grown = [], [], []
    forget_peak()
    for run in range(runs):
        memory: list[int] = []

        def watch(report: Report, memory: list[int] = memory) -> None:
            if report.rows in (count // 10, count):
                memory.append(grown_bytes(0)[1])

        started = time.perf_counter()
        source, encoder = Generated(count), FreeEncoder()
        precompute(source, encoder, folder / f"ours-{run}", rows=(0, count), progress=watch)  # type: ignore[arg-type]
        ours.append(time.perf_counter() - started)
        grown.append((memory[-1] - memory[0]) / 1e6)
        peers.append(seconds(partial(write_webdataset, folder / f"peer-{run}", count)))
    grew = absolute(
        "engine memory",
        f"growth of resident memory from row {count // 10:,} to row {count:,}",
        grown,
        " MB",
        detail=f"peak {grown_bytes(0)[0] / 1e6:.0f} MB",
    )
    what, peer = "rows through keys, records, tar, index", "webdataset's ShardWriter, without keys, hashes, index"
    return [beside("engine", what, peer, peers, ours, shown=lambda took: f"{figure(count / took)} rows/s"), grew]


def write_webdataset(folder: Path, count: int) -> None:
    folder.mkdir()
    encoder, source = FreeEncoder(), Generated(count)
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


def _sleep(item: Any) -> Any:
    time.sleep(SLEEP_S)
    return item


def _median_s(stage: Stage[Any, Any], items: Sequence[Any]) -> float:
    return statistics.median([seconds(partial(stage.work, item)) for item in items])


if __name__ == "__main__":
    main()
