"""Merge, split, filter and copy shards, between any stores, without encoding or decoding them.

    python tools/reshard.py SHARDS... --output DIR|URL [--shard-size N] [--rows A-B] [--only-source NAME]
                            [--drop-keys FILE] [--renumber] [--quiet]

SHARDS are folders, globs or patterns with braces such as {a,b}/*.tar, paths or URLs, of one recipe. Rows keep their
numbers and records their bytes: the output is the one that qie-precompute would have written with that shard size. To
merge several places with the same row numbers, such as the shards of two sources, use --renumber: the rows of each
place continue the numbers of the place before.

--rows copies the rows [A, B), by their new numbers; A- means all from A. --only-source and --drop-keys (one key per
line, 64 hex characters) leave samples out; their rows are listed as skipped, with the reason. Keys that no row has,
such as those of rows that were pruned, are counted in a warning. After an interruption, run the tool again: it copies
the missing shards.

Exit status: 0 if everything is copied, 1 if a shard has a fault or no sample is left, 2 for wrong usage. The reason is
on stderr.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from qie.cli.common import explained
from qie.cli.progress import Progress
from qie.cli.terminal import warn
from qie.errors import UsageError
from qie.paths import local_path
from qie.precompute.reshard import Resharded, SampleChoice, reshard
from qie.shards.discovery import find_indexes
from qie.stores import open_folder

EVER = 1 << 62


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="merge, split, filter or move shards, without encoding")
    parser.add_argument("shards", nargs="+", metavar="SHARDS")
    parser.add_argument("--output", required=True, metavar="DIR|URL")
    parser.add_argument("--shard-size", type=int, default=64, metavar="N", help="rows per shard; default: 64")
    parser.add_argument("--rows", type=rows, metavar="A-B", help="copy the rows [A, B) only")
    parser.add_argument("--only-source", metavar="NAME", help="copy samples of this source only")
    parser.add_argument("--drop-keys", type=Path, metavar="FILE", help="leave out these keys, one per line")
    parser.add_argument("--renumber", action="store_true", help="continue the row numbers from place to place")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    return parser.parse_args()


def rows(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)-(\d*)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range such as 0-6400 or 6400-")
    return int(match[1]), int(match[2] or EVER)


def keys(path: Path) -> frozenset[str]:
    text = local_path(path).read_text(encoding="utf-8", errors="replace")
    lines = [word for line in text.splitlines() for word in line.partition("#")[0].split()]  # an exclude list will do
    for line in lines:
        if not re.fullmatch("[0-9a-f]{64}", line):
            raise UsageError("this is not a key", where=path, expected="64 hex characters per line", found=line[:100])
    return frozenset(lines)


def run(given: argparse.Namespace) -> int:
    dropped = keys(given.drop_keys) if given.drop_keys else frozenset[str]()
    places = [find_indexes([place]) for place in given.shards]
    with Progress("copying", sum(map(len, places)), "shards", quiet=given.quiet) as progress:

        def at(done: int, total: int) -> None:
            if done == 1:
                progress.begin(0, total)
            progress.at(done)

        report = reshard(
            places,
            open_folder(given.output),
            shard_size=given.shard_size,
            choice=SampleChoice(given.rows, given.only_source, dropped),
            renumber=given.renumber,
            progress=at,
        )
    return told(report, len(dropped))


def told(report: Resharded, dropped: int) -> int:
    """Print the outcome. Returns the exit status."""
    print(
        f"{report.shards} shards, {report.present} of them written before: {report.samples} samples, "
        f"{report.skipped} skipped rows, {report.left_out} left out"
    )
    if absent := dropped - len(report.dropped):
        warn(f"{absent} of {dropped} keys to drop are in none of the rows copied")
    if not report.samples:
        print("error: no sample is left", file=sys.stderr)
    return int(not report.samples)


@explained
def main() -> None:
    sys.exit(run(arguments()))


if __name__ == "__main__":
    main()
