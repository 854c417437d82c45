"""What benchmarks share: peers in turn, spread, rows of results, and the machine they were measured on."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("torch", "diffusers", "transformers", "accelerate", "peft", "safetensors", "webdataset", "numpy", "pillow")
OPTIONAL = {"mosaicml-streaming": "MDS", "litdata": "litdata"}
"""Peers that are measured where they are installed; they pull gigabytes, so no extra of qie holds them."""

if importlib.util.find_spec("qie") is None:  # not installed: this checkout's, here and in processes that start here
    sys.path.append(str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))


@dataclass(frozen=True)
class Row:
    """One finding.

    Attributes:
        key: names it among its script's rows, whatever the sizes.
        what: is measured.
        beside: the peer, measured in turn in the same run; empty where a number stands alone.
        value, low, high: median, least and most of the runs; where there is a peer, of the ratios of each run.
        unit: of the value, as it follows a number: "× as fast", " s", " % of a step".
        runs: how many.
        detail: what the ratio is made of: medians of both.
        command: repeats it.
    """

    key: str
    what: str
    beside: str
    value: float
    low: float
    high: float
    unit: str
    runs: int
    detail: str = ""
    command: str = ""

    def __str__(self) -> str:
        beside = f", compared with {self.beside}" if self.beside else ""
        spread = f" ({self.spread})" if self.spread else ""
        return f"{self.what}{beside}: {self.found}{spread}{f'; {self.detail}' if self.detail else ''}"

    @property
    def found(self) -> str:
        return f"{figure(self.value)}{self.unit}"

    @property
    def spread(self) -> str:
        """Empty for one run, and for what was computed: no runs."""
        if self.runs < 2:
            return ""
        return f"{figure(self.low)} to {figure(self.high)}"


def figure(value: float) -> str:
    """Three digits, and no exponent."""
    if abs(value) >= 999.5:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:#.3g}".rstrip(".") if value else "0"


def absolute(key: str, what: str, values: Sequence[float], unit: str, beside: str = "", detail: str = "") -> Row:
    """A row of values that are no ratios."""
    return Row(key, what, beside, statistics.median(values), min(values), max(values), unit, len(values), detail)


def beside(
    key: str,
    what: str,
    peer: str,
    theirs: Sequence[float],
    ours: Sequence[float],
    *,
    unit: str = "× as fast",
    share: bool = False,
    shown: Callable[[float], str] | None = None,
    more: str = "",
) -> Row:
    """A row of `theirs` by `ours`, run by run; as a `share`, of `ours` by `theirs`.

    `shown` tells what their medians are; by default seconds.
    """
    pairs = zip(ours, theirs, strict=True) if share else zip(theirs, ours, strict=True)
    ratios = [one / other for one, other in pairs]
    told = shown or (lambda value: f"{figure(value)} s")
    detail = f"{told(statistics.median(ours))}, peer {told(statistics.median(theirs))}{f'; {more}' if more else ''}"
    return absolute(key, what, ratios, unit, peer, detail)


def in_turn(jobs: Mapping[str, Callable[[], object]], runs: int, warm_up: bool = True) -> dict[str, list[float]]:
    """Seconds of each job, by run. They take turns, and each run begins with another, so that none is always first."""
    names = list(jobs)
    for name in names if warm_up else ():
        jobs[name]()
    taken: dict[str, list[float]] = {name: [] for name in names}
    for run in range(runs):
        first = run % len(names)
        for name in names[first:] + names[:first]:
            taken[name].append(seconds(jobs[name]))
    return taken


def seconds(work: Callable[[], object]) -> float:
    """How long it takes, with all that it put on a GPU."""
    synchronize()
    started = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - started


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def parser(about: str | None, runs: int) -> argparse.ArgumentParser:
    """With the options that all benchmarks have. `about` is a module's docstring, of which the first line is taken."""
    made = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    made.add_argument("--runs", type=int, default=runs, help="how often each is measured (%(default)s)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    return made


class Results:
    """Rows as they are found: printed, kept, and written at the end."""

    def __init__(self, script: str, options: argparse.Namespace, arguments: Sequence[str] | None) -> None:
        words = list(sys.argv[1:] if arguments is None else arguments)
        if "--json" in words:
            at = words.index("--json")
            del words[at : at + 2]
        self.command = shlex.join(["python", f"benchmarks/{Path(script).name}", *words])
        self.rows: list[Row] = []
        self._file: Path | None = options.json
        print(f"{described(machine())}; {', '.join(f'{name} {at}' for name, at in versions().items())}", flush=True)

    def add(self, *rows: Row) -> None:
        for row in rows:
            print(row, flush=True)
            self.rows.append(Row(**asdict(row) | {"command": self.command}))

    def say(self, line: str) -> None:
        """What is no row: a reason, a remark."""
        print(line, flush=True)

    def save(self, **more: Any) -> None:
        """Write the file that was asked for, and in it `more` than rows."""
        if self._file:
            content = {"rows": [asdict(row) for row in self.rows], **more}
            self._file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def forget_peak() -> int:
    """Begin to watch for the most memory that this process holds; what it holds now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def grown_bytes(before: int) -> tuple[int, int]:
    """How much more it held at most since then, and how much more it holds now."""
    return _status_bytes("VmHWM") - before, _status_bytes("VmRSS") - before


def own_bytes() -> tuple[int, int]:
    """What this process alone holds in memory, without pages of files, which others may map, too; and with its part of
    the pages that it shares."""
    lines = (line.split() for line in _lines("/proc/self/smaps_rollup"))
    found = {words[0]: int(words[1]) * 1024 for words in lines if words[-1] == "kB"}
    return found["Private_Dirty:"], found["Pss:"]


def machine() -> dict[str, Any]:
    """What it was measured on, as the system tells it."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "CPU"
    )
    memory_kb = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    found: dict[str, Any] = {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory_kb * 1024 / 1e9, 1),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
        found["cuda"] = torch.version.cuda
    return found


def described(one: Mapping[str, Any]) -> str:
    gpu = f"{one['gpu']} (CUDA {one['cuda']}), " if "gpu" in one else ""
    return (
        f"{gpu}{one['cpu']}, {one['cores']} cores, {one['memory_gb']} GB, torch threads: {one['threads']}, "
        f"load {one['load']} at the start"
    )


def versions() -> dict[str, str]:
    """Of qie in this checkout, Python and the libraries that are measured with or beside."""
    from qie import __version__  # of this checkout, if none is installed: see above

    found = {"qie": __version__, "Python": sys.version.split()[0]}
    for name in (*LIBRARIES, *OPTIONAL):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _status_bytes(name: str) -> int:
    line = next(line for line in _lines("/proc/self/status") if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return []
