"""Run all benchmarks, sized for two cores and 15 minutes, and write their results into the docs.

    python benchmarks/run.py                      all, on this machine's CPU: `make bench`
    python benchmarks/run.py --only read.py       some; what was found of the others stays
    python benchmarks/run.py --none               none: the tables again from the data
    python benchmarks/run.py --take FILE          none, but what another machine has written as its --data

docs/benchmarks.json holds the rows. The tables of docs/benchmarks.md, docs/scaling.md and README stand between markers
and are written from it, so they cannot disagree; a test compares them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import ROOT, machine, versions
from tables import DATA, load, render

HERE = Path(__file__).resolve().parent
SCRIPTS = {
    "cpu": {
        "encoders.py": "--size 256 --layers 1 --runs 4",
        "pipeline.py": "--rows 24 --engine-rows 10000 --runs 2",
        "read.py": "--samples 60 --runs 5",
        "store.py": "",
        "loop.py": "--steps 30 --runs 5",
        "train_step.py": "--size small --steps 20 --runs 3 --skip fp8",
        "traffic.py": "--heads 8",
        "draws.py": "",
        "adapters.py": "",
        "claims.py": "--size small --steps 15 --runs 2",
        "preservation.py": "--photographs 4 --runs 3",
        "quality.py": "--steps 100 --photographs 4 --runs 3",
        "preferences.py": "--steps 40 --runs 3",
        "looking.py": "--shards 10000 --samples 60 --runs 2",
        "sources.py": "--rows 1000000 --runs 2",
        "plan.py": "--samples 1000000 --shapes 40 --runs 3",
        "scaling.py": "--runs 3",
        "simulate.py": "",
    },
    "gpu": {"gpu.py": "--minutes 25 --out FILE"},
}
"""What is run, in this order, and how; on a GPU by itself, and taken from its FILE."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--only", nargs="+", metavar="SCRIPT", choices=sorted(SCRIPTS["cpu"]), help="some of the scripts")
    made.add_argument("--none", action="store_true", help="run nothing, write the tables")
    made.add_argument("--take", type=Path, metavar="FILE", help="run nothing, take the results in this file")
    made.add_argument(
        "--data", type=Path, default=DATA, help="where the rows are kept; the tables are of the docs' own"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    data, failed = load(options.data), list[str]()
    if options.take or options.none:
        taken = load(options.take or options.data)
        write({kind: data[kind] | taken[kind] for kind in data}, options.data)
    else:
        for script, words in SCRIPTS["cpu"].items():
            if options.only is None or script in options.only:
                run = measured(script, words)
                failed += [] if run else [script]
                data["cpu"] |= {script: run} if run else {}
                write(data, options.data)  # what was found is not lost with what comes after it
    if failed:
        print(f"failed: {', '.join(failed)}; their rows are those of an earlier run, if there was one")
    return 1 if failed else 0


def measured(script: str, words: str) -> dict[str, Any] | None:
    """Run one, in a process of its own; None when it failed."""
    print(f"\n== {script} {words}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file, before, started = Path(folder) / "rows.json", machine(), time.perf_counter()
        command = [sys.executable, "-W", "ignore", str(HERE / script), *words.split(), "--json", str(file)]
        if subprocess.run(command, cwd=ROOT, check=False).returncode or not file.exists():
            return None
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return {
        "command": " ".join(["python", f"benchmarks/{script}", words]).strip(),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "seconds": round(time.perf_counter() - started),
        "machine": before,
        "versions": versions(),
        **found,
    }


def write(data: dict[str, Any], file: Path) -> None:
    """The data; and the pages, where the data is the docs' own."""
    file.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if file == DATA:
        for page, text in render(data, SCRIPTS).items():
            page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
