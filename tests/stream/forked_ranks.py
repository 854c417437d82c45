"""Four ranks on one machine, linked by gloo, whose streams keep samples together or follow shards. Run as a script, it
forks them: see `run_ranks`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from qie.data.announcements import Announcements
from qie.data.follow import GrowingPlans, GrowingSamples
from qie.data.kept_samples import Keep, KeptSamples
from qie.data.opening import open_stream
from qie.data.plan_settings import PlanSettings
from qie.data.stream import Stream
from qie.errors import QieError
from qie.stores import LocalFolder
from tests.conftest import ROOT
from tests.stream.checks import all_facts

RANKS, EPOCHS, LIMIT_S = 4, 6, 200
ROWS, STEPS = 72, 20
LIFE_OF_THE_LAST = (-1, -1)
"""A pipe, whose end to write the last rank has open for longest."""
CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {"batch_size": 2, "seed": 5, "world_size": RANKS}


def run_ranks(shards: Path, *runs: tuple[str, Sequence[Any]]) -> list[tuple[list[int], list[Any]]]:
    """Run functions of this module in four processes each. Gives, for each run, their statuses and what they return.

    Args:
        shards: a folder of shards.
        runs: the name of each function, and what it takes beside the folder and the rank.
    """
    command = [sys.executable, "-m", __name__, str(shards), json.dumps(runs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=len(runs) * LIMIT_S)
    lines = done.stdout.splitlines()
    assert len(lines) == len(runs), done.stderr[-3000:]
    return [tuple(json.loads(line)) for line in lines]


def gather(mine: Any) -> list[Any]:
    everyone = [None] * RANKS
    dist.all_gather_object(everyone, mine)
    return everyone


def epochs(folder: Path, rank: int, budget_bytes: int) -> dict[str, Any]:
    """Batches of all epochs, what was read in each, and what the machine's memory holds in the end."""
    stream = open_stream(folder, rank=rank, **SETTINGS)
    said: list[str] = []
    keep, count = Keep(CPU, CPU, budget_bytes), len(stream.samples.digests)
    stream.kept = kept = KeptSamples.of_machine(keep, count, gather, said.append, first=rank == 0)
    reads: list[int] = []
    read = stream.samples.fetch
    stream.samples.fetch = lambda position: reads.append(position) or read(position)  # type: ignore[method-assign]
    batches, read_by_epoch = [], []
    for _ in range(EPOCHS):
        batches.append(digest(all_facts(stream)))
        dist.barrier()
        read_by_epoch.append(reads.copy())
        reads.clear()
    ((tier, _),) = kept._tiers
    file = tier._file
    return {
        "batches": batches,
        "reads": read_by_epoch,
        "places": [tier._place(position) for position in range(count)],
        "bytes": kept.bytes,
        "memory": os.fstat(file).st_blocks * 512,
        "file": [os.readlink(f"/proc/self/fd/{file}"), os.fstat(file).st_ino],
        "said": said,
    }


def digest(facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def killed(folder: Path, rank: int) -> dict[str, Any]:
    """The last rank is killed while it keeps a sample, with the lock in its hands; the others go on."""
    stream = open_stream(folder, rank=rank, **SETTINGS)
    keep, count = Keep(CPU, CPU), len(stream.samples.digests)
    reader, writer = LIFE_OF_THE_LAST
    kept = KeptSamples.of_machine(keep, count, gather, sys.stderr.write, first=rank == 0)
    ((tier, _),) = kept._tiers
    if rank == RANKS - 1:
        tier._take(0, 1)
        with tier._locked():
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(writer)
    os.read(reader, 1)  # returns when nobody can write any more
    for _ in range(2):
        found = [kept.fetch(position, stream.samples.fetch).key for position in range(count)]
    return {
        "right": found == [stream.samples.table.key(position) for position in range(count)],
        "lacking": [position for position in range(count) if tier.get(position) is None],
    }


@dataclass(frozen=True)
class AskedFolder(LocalFolder):
    """A folder that remembers what it was asked."""

    asked: list[str] = field(default_factory=list, compare=False)

    def names(self) -> list[str]:
        self.asked.append("names")
        return super().names()

    def listing(self) -> dict[str, int]:
        self.asked.append("listing")
        return super().listing()

    def stamps(self) -> dict[str, str]:
        self.asked.append("stamps")
        return super().stamps()

    def size(self, name: str) -> int | None:
        self.asked.append(f"size {name}")
        return super().size(name)

    def read(self, name: str, *arguments: Any, **named: Any) -> bytes:
        self.asked.append(f"read {name}")
        return super().read(name, *arguments, **named)


def following(folder: LocalFolder, rank: int, **settings: Any) -> Stream:
    samples = GrowingSamples(folder, ROWS, timeout_s=LIMIT_S, poll_s=0.01, **settings)
    return Stream(samples, GrowingPlans(samples, PlanSettings(2 * RANKS, seed=5)), rank, RANKS)


def followed(folder: Path, rank: int, shards: int) -> dict[str, Any]:
    """The first rank publishes a shard each time that it looked for one in vain, and is killed after so many."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = gather(server and server.port)[0]
    announcements = Announcements(server or dist.TCPStore("127.0.0.1", port), first=rank == 0)
    growing = AskedFolder(folder.with_name(f"growing {shards}"))
    unpublished = sorted(folder.glob("*.tar"))[:shards]

    def publish() -> None:
        if not unpublished:
            os.kill(os.getpid(), signal.SIGKILL)
        tar = unpublished.pop(0)
        growing.root.mkdir(exist_ok=True)
        for file in (tar, tar.with_suffix(".json")):
            shutil.copy(file, growing.root)

    alive = publish if rank == 0 else lambda: None
    try:
        stream = following(growing, rank, alive=alive, announcements=announcements)
        found: dict[str, Any] = {"batches": digest(all_facts(stream.forever(), STEPS))}
        dist.barrier()
    except QieError as error:
        found = {"error": str(error)}
    return found | {"asked": growing.asked}


def run(folder: Path, rank: int, work: str, arguments: list[Any], out: int) -> None:
    signal.alarm(LIMIT_S)
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(str(folder / f"{work} {arguments}"), RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        os.write(out, json.dumps([rank, globals()[work](folder, rank, *arguments)]).encode() + b"\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    finally:
        os._exit(0)


def main(folder: Path, runs: list[tuple[str, list[Any]]]) -> None:
    global LIFE_OF_THE_LAST
    for work, arguments in runs:
        LIFE_OF_THE_LAST = os.pipe()
        reader, writer = os.pipe()
        children = []
        for rank in range(RANKS):
            children.append(os.fork())
            if children[-1] == 0:
                run(folder, rank, work, arguments, writer)
        for file in (*LIFE_OF_THE_LAST, writer):
            os.close(file)
        with os.fdopen(reader) as told:
            said = dict(map(json.loads, told))
        statuses = [os.waitpid(child, 0)[1] for child in children]
        sys.stdout.write(json.dumps([statuses, [said.get(rank) for rank in range(RANKS)]]) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
