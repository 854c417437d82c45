"""Reading shards back: how fast, how evenly, how soon, and how many. On the CPU, from a warm page cache.

    python benchmarks/read.py [--samples 200] [--mb 10] [--runs 5] [--million 1000000] [--folder DIR]

read:    samples as they come of 1024² (two latents, a prompt's embedding, its null prompt as a short tail), one to a
         batch, in one process. Each peer reads the same tensors and copies each once into a new batch; the null
         prompt is stored as its tail by all. Its embedding is joined by no peer, and by all: the ratios to both are
         given, since a trainer wants it for some batches only. Peers take their turns within a run.
    Beside: webdataset (the same tars, safetensors.torch.load), safetensors.torch.load_file and torch.load
            (weights_only) of a file for each sample, and, where they are installed, MDS and litdata. To shuffle,
            webdataset draws from a buffer of as many samples as a shard has.
check:   what the first pass costs by `verify`: nothing, each record's SHA-256 once, or always.
start:   seconds from the start of a process to its first batch, imports included.
million: generated shards (tars without content, a compacted index): opening, the first plan, memory.
wait:    the share of time that training steps of 50 ms wait for the next of these samples, by `verify="first"`.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import safetensors
import torch
import webdataset
from safetensors.torch import load, load_file

from qie.data.stream import Stream
from qie.recipe import Recipe
from qie.shards.compact import Compact, CompactShard, write_compact
from qie.shards.index import Entry, shard_stem
from qie.shards.record import encode
from qie.shards.shard_set import ShardSet
from qie.shards.table import Table
from qie.shards.writer import ShardWriter
from qie.stores import LocalFolder
from qie.types import Batch, Row, Sample, Shape

SHARD_SIZE = 20
WIDTH = 3584
TAIL, NULL = 29, 5
"""Tokens behind the images: of the prompt, and of the null prompt."""
STEP_S = 0.05
SAME = "0" * 64
RECIPE = Recipe("edit", SAME, SAME, SAME, SAME, (1024 * 1024,), None, "float32", "float32", SAME, SAME)

Tensors = dict[str, torch.Tensor]
Pass = Callable[[bool], Iterable[Tensors]]
"""All samples once, as stored, in order or shuffled."""


def main() -> None:
    parser = argparse.ArgumentParser(description="reading shards back")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--mb", type=float, default=10, help="of a prompt's embedding")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--million", type=int, default=10**6, help="samples of the generated shards")
    parser.add_argument("--folder", type=Path, help="where to write some gigabytes; by default among temporary files")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, safetensors {safetensors.__version__}, webdataset {webdataset.__version__}")
    print(f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        write(folder, options.samples, round(options.mb * 1e6 / WIDTH / 2))
        print_reading(folder, options.samples, options.runs)
        print_checking(folder, options.samples, options.runs)
        print_waiting(folder, options.samples, options.runs)
        print_start(folder, options.runs)
        print_million(folder / "million", options.million, options.runs)
    print(f"load {os.getloadavg()[0]:.1f} at the end")


def write(folder: Path, count: int, tokens: int) -> None:
    """The samples as shards and in the peers' files. Random bits: their content costs nothing to read."""
    for name in ("safetensors", "pt"):
        (folder / name).mkdir()
    for start in range(0, count, SHARD_SIZE):
        stop = min(start + SHARD_SIZE, count)
        with ShardWriter(folder / "shards", start, stop, RECIPE) as shard:
            for number in range(start, stop):
                sample = made(number, tokens)
                record = encode(sample, RECIPE.digest)
                shard.add(Entry.of(sample, Row(number, str(number), b"", (), "")), record)
                file = folder / "safetensors" / f"{number}.safetensors"
                file.write_bytes(record)
                torch.save(load(record), folder / "pt" / f"{number}.pt")
            shard.publish()


def made(number: int, tokens: int) -> Sample:
    generator = torch.Generator().manual_seed(number)

    def half(*size: int) -> torch.Tensor:
        bits = torch.randint(-(2**15), 2**15, size, generator=generator, dtype=torch.int16)
        return bits.view(torch.float16)

    shared = tokens - TAIL
    return Sample(
        key=RECIPE.key(Row(number, "", b"%d" % number, (b"",), "")),
        prompt="make the sky a little darker",
        pixel_latent=half(16, 1, 128, 128),
        control_latent=(half(16, 1, 128, 128),),
        prompt_embed=half(tokens, WIDTH),
        prompt_embeds_mask=torch.ones(tokens, dtype=torch.bool),
        empty_tail=half(NULL, WIDTH),
        empty_prompt_embeds_mask=torch.ones(shared + NULL, dtype=torch.bool),
        shared_prefix=shared,
    )


# Reading


def print_reading(folder: Path, count: int, runs: int) -> None:
    """One line for each way of `verify`, and two for each peer: in order and shuffled."""
    passes = peers(folder)
    jobs: dict[tuple[str, bool], Callable[[], int]] = {}
    for shuffled in (False, True):
        for verify in ("off", "first"):
            jobs[f"qie, verify {verify}", shuffled] = reader(opened(folder, verify, shuffled), count)
        for name, samples in passes.items():
            jobs[name, shuffled] = lambda samples=samples, shuffled=shuffled: size(map(batch, samples(shuffled)))
            joined = lambda samples=samples, shuffled=shuffled: size(map(joined_batch, samples(shuffled)))  # noqa: E731
            jobs[f"{name}, joined", shuffled] = joined
    for job in jobs.values():
        job()
    seconds: dict[tuple[str, bool], list[float]] = {name: [] for name in jobs}
    # A record is counted once, whatever is made of it: the peers differ in what they copy.
    stored = sum(path.stat().st_size for path in (folder / "safetensors").iterdir())
    for run in range(runs):
        names = list(jobs)
        for name in names[run % len(names) :] + names[: run % len(names)]:
            started = time.perf_counter()
            jobs[name]()
            seconds[name].append(time.perf_counter() - started)
    for verify in ("off", "first"):
        ours = f"qie, verify {verify}"
        even = ratios(seconds[ours, False], seconds[ours, True])
        print(
            f"read, {ours}: {rates(stored, seconds[ours, False])}; shuffled {rates(stored, seconds[ours, True])}, "
            f"{even} of its speed in order"
        )
    for shuffled in (False, True):
        mine = seconds["qie, verify off", shuffled]
        for name in passes:
            alone, joined = seconds[name, shuffled], seconds[f"{name}, joined", shuffled]
            print(
                f"read, {'shuffled' if shuffled else 'in order'}, beside {name}: {ratios(alone, mine)} its speed "
                f"({rates(stored, alone)}); {ratios(joined, mine)} when it joins the null prompt"
            )


def peers(folder: Path) -> dict[str, Pass]:
    tars = [str(path) for path in sorted((folder / "shards").glob("*.tar"))]

    def from_webdataset(shuffled: bool) -> Iterator[Tensors]:
        dataset = webdataset.WebDataset(tars, shardshuffle=len(tars) if shuffled else False)
        for sample in dataset.shuffle(SHARD_SIZE) if shuffled else dataset:
            yield load(sample["safetensors"])

    def from_files(kind: str, read: Callable[[Path], Tensors]) -> Pass:
        files = sorted((folder / kind).iterdir(), key=lambda file: int(file.stem))
        return lambda shuffled: map(read, random.sample(files, len(files)) if shuffled else files)

    found = {
        "webdataset": from_webdataset,
        "safetensors files": from_files("safetensors", load_file),
        "torch.load": from_files("pt", lambda file: torch.load(file, weights_only=True)),
    }
    if importlib.util.find_spec("streaming"):
        found["MDS"] = from_mds(folder)
    if importlib.util.find_spec("litdata"):
        found["litdata"] = from_litdata(folder)
    return found


def from_mds(folder: Path) -> Pass:
    from streaming import MDSWriter, StreamingDataset

    with MDSWriter(out=str(folder / "mds"), columns={"record": "bytes"}) as writer:
        for file in sorted((folder / "safetensors").iterdir()):
            writer.write({"record": file.read_bytes()})
    datasets = {
        shuffled: StreamingDataset(local=str(folder / "mds"), shuffle=shuffled, batch_size=1)
        for shuffled in (False, True)
    }
    return lambda shuffled: (load(sample["record"]) for sample in datasets[shuffled])


def from_litdata(folder: Path) -> Pass:
    import litdata

    litdata.optimize(
        fn=_record,
        inputs=[str(file) for file in sorted((folder / "safetensors").iterdir())],
        output_dir=str(folder / "litdata"),
        chunk_bytes="256MB",
        num_workers=1,
        verbose=False,
    )
    datasets = {
        shuffled: litdata.StreamingDataset(str(folder / "litdata"), shuffle=shuffled) for shuffled in (False, True)
    }
    return lambda shuffled: (load(sample["record"]) for sample in datasets[shuffled])


def _record(file: str) -> dict[str, bytes]:
    return {"record": Path(file).read_bytes()}


def batch(tensors: Tensors) -> Tensors:
    return {name: torch.stack([tensor]) for name, tensor in tensors.items()}


def joined_batch(tensors: Tensors) -> Tensors:
    """The same with the null prompt's whole embedding, copied once, too."""
    shared = tensors["prompt_embed"][: len(tensors["prompt_embed"]) - TAIL]
    rest = {name: tensor for name, tensor in tensors.items() if name != "empty_prompt_embed"}
    return batch(rest) | {"empty_prompt_embed": torch.cat([shared, tensors["empty_prompt_embed"]])[None]}


def size(batches: Iterable[Tensors]) -> int:
    return sum(1 for _ in batches)


def opened(folder: Path, verify: str, shuffled: bool = True) -> Stream:
    samples = ShardSet.open([folder / "shards"], verify=verify)  # type: ignore[arg-type]
    return Stream(samples, 1, order="shuffle" if shuffled else "sequence")


def reader(stream: Stream, count: int) -> Callable[[], int]:
    """Reads the next `count` batches each time; what is prepared ahead is as much before as behind."""
    batches: Iterator[Batch] = iter(stream.forever())
    return lambda: sum(1 for _ in itertools.islice(batches, count))


def print_checking(folder: Path, count: int, runs: int) -> None:
    passes: dict[str, list[float]] = {"off": [], "first": [], "always": [], "always, again": []}
    for _ in range(runs):
        for verify in ("off", "first", "always"):
            read = reader(opened(folder, verify), count)
            passes[verify].append(timed(read))
            if verify == "always":
                passes["always, again"].append(timed(read))
    line = [f"{name} {statistics.median(took) / count * 1000:.1f}" for name, took in passes.items()]
    print(f"check: ms per sample of the first pass: {', '.join(line)}")


# Waiting


def print_waiting(folder: Path, count: int, runs: int) -> None:
    shares: list[list[tuple[float, float]]] = [[], []]
    for _ in range(runs):
        batches = opened(folder, "first").forever()
        held = next(batches)
        for share in shares:
            waited = freed = 0.0
            started = time.perf_counter()
            for _ in range(count):
                time.sleep(STEP_S)
                before = time.perf_counter()
                upcoming = next(batches)
                there = time.perf_counter()
                held = upcoming
                del upcoming  # the batch before is nobody's any more
                waited += there - before
                freed += time.perf_counter() - there
            total = time.perf_counter() - started
            share.append((100 * waited / total, 100 * freed / total))
        assert len(held) == 1
    for name, share in zip(("first", "second"), shares, strict=True):
        waits, frees = zip(*share, strict=True)
        print(
            f"wait, {name} pass: {statistics.median(waits):.2f} % of the time ({min(waits):.2f}–{max(waits):.2f}); "
            f"freeing the batch before: {statistics.median(frees):.2f} % ({min(frees):.2f}–{max(frees):.2f})"
        )


# Starting

_STARTS = {
    "qie": "from qie.data import open_stream\nnext(iter(open_stream({shards!r})))",
    "webdataset": "import torch, webdataset\nfrom safetensors.torch import load\n"
    "sample = next(iter(webdataset.WebDataset({tars!r}, shardshuffle=False)))\n"
    "{{name: torch.stack([tensor]) for name, tensor in load(sample['safetensors']).items()}}",
    "safetensors file": "import torch\nfrom safetensors.torch import load_file\n"
    "{{name: torch.stack([tensor]) for name, tensor in load_file({file!r}).items()}}",
    "import torch": "import torch",
    "import qie.data": "import qie.data",
}


def print_start(folder: Path, runs: int) -> None:
    places = {
        "shards": str(folder / "shards"),
        "tars": [str(path) for path in sorted((folder / "shards").glob("*.tar"))],
        "file": str(folder / "safetensors" / "0.safetensors"),
    }
    took: dict[str, list[float]] = {name: [] for name in _STARTS}
    for _ in range(runs):
        for name, script in _STARTS.items():
            took[name].append(timed(lambda script=script: first_batch(script.format(**places))))  # type: ignore[misc]
    medians = [f"{name} {statistics.median(times):.2f} s" for name, times in took.items()]
    print(f"start: {'; '.join(medians)}")


def first_batch(script: str) -> None:
    """Wait until a process says that it is there; not until it has ended."""
    command = [sys.executable, "-W", "ignore", "-c", f"{script}\nprint('there', flush=True)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        process.kill()


# A million

_OPEN = """
import json, sys, time
from pathlib import Path
from qie.data.stream import Stream
from qie.shards.shard_set import ShardSet

def memory(name):
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) * 1024

Path("/proc/self/clear_refs").write_text("5")
before, started = memory("VmRSS"), time.perf_counter()
samples = ShardSet.open([sys.argv[1]])
opened = time.perf_counter()
stream = Stream(samples, 8)
planned = time.perf_counter()
peak, after = memory("VmHWM") - before, memory("VmRSS") - before
print(json.dumps([len(samples), len(stream), opened - started, planned - opened, peak, after]))
"""


def print_million(folder: Path, count: int, runs: int) -> None:
    generate(folder, count)
    found = []
    for _ in range(runs):
        command = [sys.executable, "-c", _OPEN, str(folder)]
        found.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    samples, batches, *_ = found[0]
    opening, planning, peak, after = zip(*(one[2:] for one in found), strict=True)
    both = [sum(pair) for pair in zip(opening, planning, strict=True)]
    print(
        f"million: {samples:,} samples in {batches:,} batches: {statistics.median(both):.2f} s "
        f"({min(both):.2f}–{max(both):.2f}): open {statistics.median(opening):.2f}, plan "
        f"{statistics.median(planning):.2f}; memory at most {max(peak) / 1e6:.0f} MB, then {max(after) / 1e6:.0f} MB"
    )


def generate(folder: Path, count: int, per_shard: int = 64) -> None:
    """Shards of three shapes that open as if they held samples. Their tars are holes, their indexes are not read."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    record = 11 * 2**20
    position = np.arange(count, dtype=np.int64)
    bounds = [(start, min(start + per_shard, count)) for start in range(0, count, per_shard)]
    for start, stop in bounds:
        stem = shard_stem(start, stop)
        (folder / f"{stem}.json").touch()
        with (folder / f"{stem}.tar").open("wb") as tar:
            tar.truncate((stop - start) * record)
    stamps = LocalFolder(folder).stamps()
    shards = tuple(
        CompactShard(shard_stem(*rows), (rows[1] - rows[0]) * record, SAME, stamps[f"{shard_stem(*rows)}.json"], ())
        for rows in bounds
    )
    tokens = draw.integers(400, 1400, count, dtype=np.int32)
    table = Table(
        keys=draw.integers(0, 256, (count, 32), dtype=np.uint8),
        hashes=draw.integers(0, 256, (count, 32), dtype=np.uint8),
        shards=(position // per_shard).astype(np.int32),
        rows=position,
        variants=np.zeros(count, np.int32),
        offsets=position % per_shard * record,
        sizes=np.full(count, record, np.int64),
        shapes=draw.integers(0, 3, count, dtype=np.int32),
        tokens=tokens,
        empty_tokens=tokens - TAIL + NULL,
        prefixes=tokens - TAIL,
        widths=np.full(count, WIDTH, np.int32),
        masked=np.zeros(count, np.bool_),
        sources=np.zeros(count, np.int32),
        shape_names=tuple(Shape((128, 128 + 2 * number), ((128, 128),)) for number in range(3)),
        source_names=("",),
    )
    write_compact(LocalFolder(folder), Compact(RECIPE, shards, table))


# Telling


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def ratios(theirs: list[float], ours: list[float]) -> str:
    """How many times as fast `ours` is, run by run."""
    found = [one / other for one, other in zip(theirs, ours, strict=True)]
    return f"{statistics.median(found):.2f}× ({min(found):.2f}–{max(found):.2f})"


def rates(stored: int, seconds: list[float]) -> str:
    found = [stored / one / 1e9 for one in seconds]
    return f"{statistics.median(found):.2f} GB/s ({min(found):.2f}–{max(found):.2f})"


if __name__ == "__main__":
    main()
