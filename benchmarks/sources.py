"""Opening a source of very many rows, which reads only the positions of rows.

    python benchmarks/sources.py [--rows 1000000] [--runs 3]

csv, jsonl, parquet: `qie.open_source` on a table of rows with the paths of two images and a prompt; no image is there.
    Peer: every row parsed by csv.DictReader, json.loads and pyarrow.

A row gives the peak of additional memory.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pyarrow
from measuring import Results, Row, beside, forget_peak, grown_bytes, in_turn
from measuring import parser as common
from pyarrow import parquet

from qie.data.sources import open_source

COLUMNS = ("path_target", "path_control", "prompt")


def parser() -> argparse.ArgumentParser:
    made = common(__doc__, runs=3)
    made.add_argument("--rows", type=int, default=1_000_000)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    results = Results(__file__, options, arguments)
    with tempfile.TemporaryDirectory() as folder:
        for name, (write, parse) in FORMATS.items():
            file = Path(folder) / f"rows.{name}"
            write(file, options.rows)
            results.add(opened(name, file, options.rows, parse, options.runs))
            file.unlink()
    results.save()


def opened(name: str, file: Path, count: int, parse: Callable[[Path], object], runs: int) -> Row:
    gc.collect()
    before = forget_peak()
    assert len(open_source(file)) == count
    peak_bytes, _ = grown_bytes(before)
    taken = in_turn({"peer": partial(parse, file), "ours": partial(open_source, file)}, runs, warm_up=False)
    what, peer = f"opening a source, {name}, {count:,} rows", "parsing every row"
    return beside(name, what, peer, taken["peer"], taken["ours"], more=f"{max(peak_bytes, 0) / 1e6:.0f} MB at most")


def rows(count: int) -> Iterator[tuple[str, str, str]]:
    for number in range(count):
        yield f"targets/{number:08d}.png", f"controls/{number:08d}.png", f"make the sky of picture {number} darker"


def write_csv(file: Path, count: int) -> None:
    with file.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines)
        writer.writerow(COLUMNS)
        writer.writerows(rows(count))


def write_jsonl(file: Path, count: int) -> None:
    with file.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(dict(zip(COLUMNS, row, strict=True))) + "\n" for row in rows(count))


def write_parquet(file: Path, count: int) -> None:
    columns = zip(*rows(count), strict=True)
    parquet.write_table(pyarrow.table(dict(zip(COLUMNS, map(list, columns), strict=True))), file)


def parse_csv(file: Path) -> int:
    with file.open(encoding="utf-8", newline="") as lines:
        return sum(1 for _ in csv.DictReader(lines))


def parse_jsonl(file: Path) -> int:
    with file.open(encoding="utf-8") as lines:
        return sum(1 for line in lines if json.loads(line))


def parse_parquet(file: Path) -> int:
    return len(parquet.read_table(file).to_pylist())


FORMATS: dict[str, tuple[Callable[[Path, int], None], Callable[[Path], object]]] = {
    "csv": (write_csv, parse_csv),
    "jsonl": (write_jsonl, parse_jsonl),
    "parquet": (write_parquet, parse_parquet),
}


if __name__ == "__main__":
    main()
