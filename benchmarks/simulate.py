"""What one machine cannot hold: up to 512 GPUs that train from one store, simulated with a clock of its own.

    python benchmarks/simulate.py [--steps 200] [--latency-ms 20] [--machine-gbit 25]
                                  [--only NAME ...]

The plan is the real one, `PlanSettings.plan`, over columns without memory, and each process asks as a `Stream` does:
so many batches ahead, in so many threads, so many requests at once, and so far ahead for whole shards. Steps and
transfers only take time: a step as long as an H200 takes at its peak, a transfer its turn on the store's link and on
its machine's, after a latency between half of the given one and, seldom, several times as much. All processes step
together, as in data-parallel training. Samples are those of Qwen-Image-Edit at 1024² with one control.

waiting:  the part of the time in which no step ran, without the first steps.
fetched:  bytes that a machine fetched, by those that its processes trained on.
plan:     what the plan of an epoch holds in each process, measured: arrays, without those of the index.
Not simulated: disks, hashes, the CPU, errors and retries, machines that differ.
"""

from __future__ import annotations

import argparse
import heapq
import math
import tracemalloc
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
from many import SHARD_SIZE
from measuring import Results, Row, figure
from measuring import parser as common
from paper import NODE, PEAK
from work import encoding, record_bytes, training

from qie.data.plan import Order, raw_bits
from qie.data.plan_settings import PlanSettings
from qie.data.read_ahead import PARTS_AT_ONCE, SHARDS_AHEAD
from qie.data.stream import REQUESTS, Stream
from qie.shards.cache import PARALLEL_PARTS, PART_BYTES, ShardCache
from qie.shards.sample_table import Columns
from qie.types import Shape

THREADS, PREFETCH = Stream.threads, Stream.prefetch
SAMPLE_BYTES = record_bytes()
WARM = 20
"""Steps that are not counted: the first batches are waited for in any case."""
POLL_S = 1.0
"""Until a process that follows sees a new shard, at most: it waits this long between two looks."""


@dataclass(frozen=True)
class Run:
    """What is simulated.

    Attributes:
        name: for `--only`.
        samples, gpus, order: of the data and of the run, with a batch of one on each GPU.
        room: bytes of `cache.local_dir` on each machine as a share of all shards; None reads samples by ranges.
        encoders: GPUs that encode while this run follows them; 0 if all shards are there.
        steps: how many are simulated; 0 as many as `--steps` says.
        store_gbit: a second, of the store, to all machines.
    """

    name: str
    samples: int
    gpus: int
    order: Order = "shuffle"
    room: float | None = None
    encoders: int = 0
    steps: int = 0
    store_gbit: float = 100


RUNS = (
    Run("one machine", 10**6, 8),
    Run("eight machines", 10**7, 64),
    Run("64 machines", 10**8, 512),
    Run("10⁹ samples", 10**9, 512),
    Run("a slower store", 10**8, 512, store_gbit=50),
    Run("following", 10**8, 512, "sequence", encoders=27),
    Run("following, few encode", 10**8, 512, "sequence", encoders=20),
    Run("copies", 10**6, 8, "blocks", room=0.01, steps=1280),
    Run("copies, all kept", 64_000, 8, room=1, steps=8000),
    Run("copies, shuffled", 64_000, 8, room=0.1, steps=8000),
    Run("copies, eight machines", 10**6, 64, "blocks", room=0.01, steps=320),
    Run("copies, 64 machines", 10**6, 512, "blocks", room=0.01, steps=40),
)


@dataclass(frozen=True)
class Found:
    """What a simulation found: waiting as a share of the time, bytes and requests a second of all machines."""

    waiting: float
    fetched: float
    requests_s: float
    bytes_s: float
    plan_bytes: int


def parser() -> argparse.ArgumentParser:
    made = common(__doc__, runs=1)
    made.add_argument("--steps", type=int, default=200, help="steps of each run")
    made.add_argument("--latency-ms", type=float, default=20, help="until a request is answered")
    made.add_argument("--machine-gbit", type=float, default=25, help="a second, of a machine's link")
    made.add_argument("--only", nargs="+", metavar="NAME", choices=[run.name for run in RUNS], help="some of the runs")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    results, table = Results(__file__, options, arguments), []
    for run in RUNS:
        if options.only and run.name not in options.only:
            continue
        run = replace(run, steps=run.steps or options.steps)
        found = simulated(run, options.latency_ms / 1e3, options.machine_gbit * 125e6)
        told = (
            f"fetched {figure(found.fetched)} times what is needed, {figure(found.requests_s)} requests/s, "
            f"{figure(found.bytes_s / 1e9)} GB/s, plan {figure(found.plan_bytes / 1e6)} MB"
        )
        share = 100 * found.waiting
        results.add(Row(run.name, described(run), "", share, share, share, " % of the time", 0, told))
        table.append(line_of(run, found))
    results.save(simulated=[HEAD, *table])


def described(run: Run) -> str:
    """In words, for a row."""
    way = "ranges" if run.room is None else f"whole shards, room for {100 * run.room:g} % of them"
    beside = f", beside {run.encoders} GPUs that encode" if run.encoders else ""
    store = f"a store of {run.store_gbit:g} Gbit/s"
    return f"simulated waiting: {run.samples:,} samples, {run.gpus} GPUs, {store}, {run.order}, {way}{beside}"


HEAD = (
    "samples",
    "GPUs",
    "store, Gbit/s",
    "order",
    "read by",
    "waiting",
    "fetched ÷ needed",
    "requests/s",
    "GB/s",
    "plan",
)


def line_of(run: Run, found: Found) -> list[str]:
    """The run in the table of docs/scaling.md."""
    way = "ranges" if run.room is None else f"whole shards, room for {100 * run.room:g} %"
    order = f"{run.order}, {run.encoders} GPUs encode" if run.encoders else run.order
    return [
        f"{run.samples:,}",
        f"{run.gpus}",
        f"{run.store_gbit:g}",
        order,
        way,
        f"{100 * found.waiting:.2f} %",
        f"{found.fetched:.2f}",
        figure(found.requests_s),
        figure(found.bytes_s / 1e9),
        f"{figure(found.plan_bytes / 1e6)} MB",
    ]


# The run


def simulated(run: Run, latency_s: float, machine_bytes_s: float) -> Found:
    columns = columns_of(run.samples)
    tracemalloc.start()
    plan = PlanSettings(run.gpus, order=run.order).plan(columns, 0, np.zeros(0, np.int64))
    # Copies begin empty, and a run that follows begins with the first shard.
    begin = 0 if run.encoders or run.room is not None else (len(plan) - run.steps) // 2
    plan[begin + run.steps - 1]
    plan_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    batches = [plan[step].positions for step in range(begin, begin + run.steps)]
    clock = Clock()
    store = Store(clock, latency_s, machine_bytes_s, run.store_gbit * 125e6)
    training = Training(run, clock, store, batches)
    clock.run()
    needed = sum(len(set(batch)) for batch in batches) * SAMPLE_BYTES
    return Found(
        training.waited_s / (clock.now - training.counted_from_s),
        store.bytes / needed,
        store.requests / clock.now,
        store.bytes / clock.now,
        plan_bytes,
    )


def columns_of(samples: int) -> Columns:
    """Of equal samples: arrays that are one value each, but for where shards end."""
    zero, zeros = np.broadcast_to(np.int32(0), samples), np.broadcast_to(np.int64(0), samples)
    ends = np.arange(SHARD_SIZE, samples + SHARD_SIZE, SHARD_SIZE).clip(max=samples)
    return Columns(zero, (Shape((128, 128), ((128, 128),)),), zeros, zero, zero, ends, single=True)


class Clock:
    """Events in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def run(self) -> None:
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()


class Store:
    """A store and the links to its machines. A transfer takes its turn on both, after a latency."""

    def __init__(self, clock: Clock, latency_s: float, machine_bytes_s: float, store_bytes_s: float) -> None:
        self.bytes = self.requests = 0
        self._clock, self.latency_s = clock, latency_s
        self._rates, self._free = (store_bytes_s, machine_bytes_s), {-1: 0.0}
        self._chance = iter((raw_bits(0, 0, 0, 2**22) >> np.uint64(11)).tolist())

    def request(self, machine: int, size: int, parts: int, then: Callable[[], None]) -> None:
        """Ask for so many bytes in so many requests, of which `PARALLEL_PARTS` are on their way at once."""
        self.bytes, self.requests = self.bytes + size, self.requests + parts
        # Half of the latency, and what is exponentially distributed around the other half.
        spread = -math.log(1 - next(self._chance) / 2**53)
        arrives = self._clock.now + self.latency_s * (1 + spread) / 2
        ends = arrives + self.latency_s * (-(-parts // PARALLEL_PARTS) - 1)
        self._clock.at(arrives, lambda: self._send(machine, size, ends, then))

    def _send(self, machine: int, size: int, earliest: float, then: Callable[[], None]) -> None:
        begun = self._clock.now
        for link, rate in zip((-1, machine), self._rates, strict=True):
            begun = max(begun, self._free.get(link, 0.0))
            self._free[link] = begun + size / rate
        self._clock.at(max(earliest, self._free[-1], self._free[machine]), then)


class Ranges:
    """Samples of a machine, each of which is a request."""

    def __init__(self, store: Store, machine: int) -> None:
        self._store, self._machine = store, machine

    def fetch(self, position: int, then: Callable[[], None]) -> None:
        assert position >= 0
        self._store.request(self._machine, SAMPLE_BYTES, 1, then)

    def passed(self, step: int) -> None:
        """Nothing is fetched ahead of the batches that a stream prepares."""


class Copies:
    """Whole shards on a machine's disk, each fetched once for all its processes, and ahead as `ReadAhead` does.

    Ahead are those of the next steps, as far as they fit. What is not needed soon goes first, and of that what was used
    longest ago.

    Args:
        room: shards.
        steps: the shards that the machine's processes need in each.
    """

    def __init__(self, clock: Clock, store: Store, machine: int, room: int, steps: Sequence[set[int]]) -> None:
        self._clock, self._store, self._machine, self._steps, self._room = clock, store, machine, steps, room
        # As much as `ShardCache.ahead_bytes`.
        self._most_ahead = min(ShardCache(Path(), room).ahead_bytes, SHARDS_AHEAD)
        self._there: OrderedDict[int, None] = OrderedDict()
        self._coming: dict[int, list[Callable[[], None]]] = {}
        self._soon: Counter[int] = Counter()
        self._queue: deque[int] = deque()
        self._admitted = self._ahead = 0
        clock.at(0, self._look)

    def fetch(self, position: int, then: Callable[[], None]) -> None:
        shard = position // SHARD_SIZE
        if shard in self._there:
            self._there.move_to_end(shard)
            self._clock.at(self._clock.now, then)
            return
        if shard not in self._coming:
            self._get(shard, 0)
        self._coming[shard].append(then)

    def passed(self, step: int) -> None:
        """All processes of the machine have loaded the batch of a step."""
        if step < self._admitted:
            self._soon.subtract(self._steps[step])
            self._soon = +self._soon
        self._admitted = max(self._admitted, step + 1)
        self._look()

    def _look(self) -> None:
        while self._admitted < len(self._steps):
            new = [shard for shard in self._steps[self._admitted] if shard not in self._soon]
            if len(self._soon) + len(new) > self._most_ahead:
                break
            self._soon.update(self._steps[self._admitted])
            self._queue.extend(new)
            self._admitted += 1
        while self._queue and self._ahead < NODE * PARTS_AT_ONCE // PARALLEL_PARTS:
            shard = self._queue.popleft()
            if shard in self._soon and shard not in self._there and shard not in self._coming:
                self._get(shard, 1)

    def _get(self, shard: int, ahead: int) -> None:
        size = SHARD_SIZE * SAMPLE_BYTES
        self._coming[shard], self._ahead = [], self._ahead + ahead
        self._store.request(self._machine, size, -(-size // PART_BYTES), lambda: self._arrived(shard, ahead))

    def _arrived(self, shard: int, ahead: int) -> None:
        if len(self._there) >= self._room:
            old = next((one for one in self._there if one not in self._soon), next(iter(self._there)))
            del self._there[old]
        self._there[shard], self._ahead = None, self._ahead - ahead
        for then in self._coming.pop(shard):
            then()
        self._look()


class Process:
    """A process of the run, which asks as a `Stream` does."""

    def __init__(self, samples: Ranges | Copies, loaded: Callable[[int], None]) -> None:
        self._samples, self._loaded = samples, loaded
        self._batches: deque[tuple[int, Sequence[int]]] = deque()
        self._wanted: deque[tuple[int, int]] = deque()
        self._missing: dict[int, int] = {}
        self._asked = 0

    def load(self, step: int, positions: Sequence[int]) -> None:
        """Prepare the batch of a step, behind those before."""
        self._batches.append((step, positions))
        self._go_on()

    def _go_on(self) -> None:
        while self._batches and len(self._missing) < THREADS:
            step, positions = self._batches.popleft()
            wanted = dict.fromkeys(positions)
            self._missing[step] = len(wanted)
            self._wanted.extend((step, position) for position in wanted)
        while self._wanted and self._asked < REQUESTS:
            step, position = self._wanted.popleft()
            self._asked += 1
            self._samples.fetch(position, lambda step=step: self._came(step))  # type: ignore[misc]

    def _came(self, step: int) -> None:
        self._asked -= 1
        self._missing[step] -= 1
        if not self._missing[step]:
            del self._missing[step]
            self._loaded(step)
        self._go_on()


class Training:
    """All processes, which step together; and those that encode beside them."""

    def __init__(self, run: Run, clock: Clock, store: Store, batches: Sequence[Sequence[int]]) -> None:
        self.waited_s = self.counted_from_s = 0.0
        self._run, self._clock, self._batches = run, clock, batches
        shards = -(-run.samples // SHARD_SIZE)
        self._machines: list[Ranges | Copies] = []
        for first in range(0, run.gpus, NODE):
            if run.room is None:
                self._machines.append(Ranges(store, first))
                continue
            needed = [{position // SHARD_SIZE for position in batch[first : first + NODE]} for batch in batches]
            self._machines.append(Copies(clock, store, first, round(run.room * shards), needed))
        self._processes = [
            Process(machine, partial(self._loaded, machine))
            for machine in self._machines
            for _ in range(min(run.gpus, NODE))
        ]
        self._passed = Counter[tuple[int, int]]()
        step = training(1024, checkpointing=True)
        self._step_s = (step.model + step.recomputed) / PEAK
        self._shard_s = SHARD_SIZE * encoding(1024).ours / PEAK
        self._ready = [0] * len(batches)
        self._loading = self._step = 0
        self._asked_s: float | None = None
        clock.at(0, self._ask)

    def _ask(self) -> None:
        """Every process asks for the batch of the next step; the stream goes on to prepare those that follow."""
        self._asked_s = self._clock.now
        if self._step == WARM:
            self.counted_from_s = self._clock.now
        while self._loading < min(self._step + PREFETCH + 1, len(self._batches)):
            batch = self._batches[self._loading]
            self._clock.at(self._published(batch), lambda step=self._loading: self._load(step))  # type: ignore[misc]
            self._loading += 1
        self._start()

    def _load(self, step: int) -> None:
        batch = self._batches[step]
        for position, process in zip(batch, self._processes, strict=True):
            process.load(step, [position])

    def _published(self, batch: Sequence[int]) -> float:
        """When those who follow see all shards of a batch: each GPU that encodes makes one after another."""
        if not self._run.encoders:
            return self._clock.now
        done = (max(batch) // SHARD_SIZE // self._run.encoders + 1) * self._shard_s
        return max(self._clock.now, math.ceil(done / POLL_S) * POLL_S)

    def _loaded(self, machine: Ranges | Copies, step: int) -> None:
        self._ready[step] += 1
        self._passed[id(machine), step] += 1
        if self._passed[id(machine), step] == min(self._run.gpus, NODE):
            machine.passed(step)
        if step == self._step:
            self._start()

    def _start(self) -> None:
        """Take the step, if all processes are there with its batch."""
        if self._asked_s is None or self._ready[self._step] < len(self._processes):
            return
        if self._step >= WARM:
            self.waited_s += self._clock.now - self._asked_s
        self._asked_s = None
        self._clock.at(self._clock.now + self._step_s, self._end)

    def _end(self) -> None:
        self._step += 1
        if self._step < len(self._batches):
            self._ask()


if __name__ == "__main__":
    main()
