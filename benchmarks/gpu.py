"""All that the docs say of a GPU, measured by one command: half an hour on one GPU of 80 GB or more, without a network.

    python benchmarks/gpu.py --minutes 25 --out FILE
    python benchmarks/gpu.py --take FILE                          write it into the docs and README

Models have the released shapes and random weights, made on the GPU in bfloat16; nothing is downloaded, and qie need not
be installed. Each measurement is a line of FILE, written when it is done, in sections and most valuable first. Each has
a limit of time, and a process that dies or hangs loses its own line. In calls of nine minutes:

    python benchmarks/gpu.py --minutes 9 --skip-done --out FILE   again and again, until nothing is left

Without a GPU, the steps at full size on fake tensors, which have shapes and devices and no values, in five minutes:

    python benchmarks/gpu.py --fake 60
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path

from on_gpu.process import Limited, Line, apart, serve
from on_gpu.table import MEASUREMENTS, OPTIONS, Measurement


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--minutes", type=float, default=25, help="begin nothing that would take longer (%(default)s)")
    made.add_argument("--out", type=Path, metavar="FILE", help="lines of JSON; new ones are added at its end")
    made.add_argument("--skip-done", action="store_true", help="leave out what has a line in FILE")
    made.add_argument(
        "--only", nargs="+", metavar="WORD", default=[], help="those whose name matches, such as 'step *'"
    )
    made.add_argument("--take", type=Path, metavar="FILE", help="measure nothing: write FILE into the docs and README")
    made.add_argument("--size", choices=("full", "tiny"), default="full", help="tiny is for tests, on a CPU, too")
    made.add_argument("--work", type=Path, metavar="DIR", help="for models without weights and samples, 1 GB")
    made.add_argument("--in-process", action="store_true", help="measure here: what dies or hangs ends everything")
    made.add_argument(
        "--fake", type=int, metavar="BLOCKS", help="without a GPU: count FLOP and bytes of the steps on fake tensors"
    )
    made.add_argument("--worker", type=int, metavar="N", help=argparse.SUPPRESS)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser()
    options = made.parse_args(arguments)
    options.work = options.work or Path(tempfile.gettempdir()) / f"qie-gpu-{options.size}"
    if options.worker is not None:
        return work(options)
    if options.take:
        return take(options.take)
    if options.fake:
        return fake(options)
    if options.out is None:
        made.error("--out FILE, or --take FILE")
    options.work.mkdir(parents=True, exist_ok=True)
    done = {line["name"] for line in read(options.out)} if options.skip_done else set()
    wanted = [one for one in MEASUREMENTS.values() if chosen(one, options.only) and one.name not in done]
    began, left = time.monotonic(), []
    for one, line in (here if options.in_process else in_workers)(wanted, options):
        if line is None:
            left.append(one.name)
            continue
        add(options.out, one, line)
        print(told(one, line, time.monotonic() - began), flush=True)
    if left:
        print(f"no time for {len(left)}: {', '.join(left)}\ngo on with --skip-done")
    return 0


def chosen(one: Measurement, words: Sequence[str]) -> bool:
    return not words or any(fnmatch(one.name, word) for word in words)


def in_workers(wanted: list[Measurement], options: argparse.Namespace) -> Iterator[tuple[Measurement, Line | None]]:
    words = ["--size", options.size, "--work", str(options.work), "--worker"]
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), *words]
    deadline = time.monotonic() + 60 * options.minutes
    for one, line in apart(command, wanted, deadline, options.work / "printed.txt"):
        yield MEASUREMENTS[one.name], line


def here(wanted: list[Measurement], options: argparse.Namespace) -> Iterator[tuple[Measurement, Line | None]]:
    from on_gpu.work import SCALES, Place, measure_named  # imports torch

    place, deadline = Place(options.work, SCALES[options.size]), time.monotonic() + 60 * options.minutes
    for one in wanted:
        yield one, measure_named(one.name, place) if time.monotonic() < deadline else None


def work(options: argparse.Namespace) -> int:
    """What a process for measurements does."""
    from on_gpu.work import SCALES, Place, measure_named

    place = Place(options.work, SCALES[options.size])
    serve(options.worker, lambda name: measure_named(name, place))
    return 0


def fake(options: argparse.Namespace) -> int:
    """The steps on a GPU that is not there."""
    from on_gpu.fake import can_be_faked, dry_run

    steps = [one for one in MEASUREMENTS.values() if one.work == "step.option" and chosen(one, options.only)]
    names = [one.arguments[0] for one in steps if can_be_faked(OPTIONS[one.arguments[0]])]
    for line in dry_run(names, options.fake):
        print(line, flush=True)
    return 0


def take(file: Path) -> int:
    """Write a file's lines into docs/benchmarks.json, and from there into the pages."""
    from on_gpu.take import taken
    from run import SCRIPTS, write
    from tables import DATA, load

    name = Path(__file__).name
    try:
        run = taken(read(file), f"python benchmarks/{name} {SCRIPTS['gpu'][name]}")
    except ValueError as error:
        print(f"{file}: {error}", file=sys.stderr)
        return 2
    write(load() | {"gpu": {name: run}}, DATA)
    print(f"{len(run['rows'])} rows; not measured: {len(run['missing'])}")
    return 0


def read(file: Path) -> list[Line]:
    """The lines of a file, but for one that was cut when the machine was taken away."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def add(file: Path, one: Measurement, line: Line) -> None:
    line.pop("spent", None)
    known = {"name": one.name, "section": one.section, "at": datetime.now(UTC).isoformat(timespec="seconds")}
    cut = file.exists() and not file.read_text(encoding="utf-8").endswith("\n")
    with file.open("a", encoding="utf-8") as out:
        out.write("\n" * cut + json.dumps(known | line, ensure_ascii=False) + "\n")


def told(one: Limited, line: Line, passed_s: float) -> str:
    found = [f"{row['what']}: {row['value']:.4g}{row['unit']} ({row['detail']})" for row in line.get("rows", ())]
    return f"[{passed_s:4.0f} s] {one.name}: {line.get('error') or '; '.join(found) or 'done'}"


if __name__ == "__main__":
    sys.exit(main())
