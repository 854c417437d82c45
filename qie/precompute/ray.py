"""Precompute on a Ray cluster: shards as tasks, on any node with the GPUs, tried again when a node dies.

A worker in each slot takes one task after the other. A task that is tried again finds its published shards and
continues after them. Every node must reach source, model and output: URLs, or paths of a shared file system.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from qie.errors import QieError, UsageError
from qie.precompute.counts import OnReport, Report
from qie.precompute.engine import Engine, Settings
from qie.precompute.local import Opener, plan_shards
from qie.precompute.ranges import Range
from qie.recipe import Recipe
from qie.shards.discovery import published, rows_of
from qie.shards.shard_set import require_disjoint
from qie.stores import Folder

RETRIES = 5
"""How often a task is tried again after its worker or node has died."""

TASKS_PER_SLOT = 8
"""Tasks per slot: several, to balance nodes, but each with many shards, to overlap them."""

RECOUNT_S = 5.0
"""Slots are counted after each task, and at least this often: nodes come and go."""


def precompute_on_ray(
    opener: Opener,
    output: Folder,
    *,
    rows: Range,
    gpus: int,
    shard_size: int = 64,
    settings: Settings | None = None,
    progress: OnReport = lambda report: None,
) -> Report:
    """As `precompute`, with tasks on the cluster of RAY_ADDRESS; without it, on the last one that was started on this
    machine, or on one that is started here.

    Args:
        opener: opens source and encoder in a worker; devices are numbered among the GPUs of its task.
        output: where the shards go; the same place on all nodes.
        rows: the half-open range of rows.
        gpus: GPUs of each task, see `gpus_of`; 0 for encoders on the CPU.
        shard_size, settings, progress: see `precompute`.

    Raises:
        UsageError: Ray is not installed, or no node has the GPUs of a task.
        QieError: raised in a task, or because a task died too often.
    """
    ray = _ray()
    # Not in the driver: its node may have no GPU, where `auto` would mean another recipe.
    require_a_slot(ray.nodes(), gpus)
    with _explained(ray), _Workers(ray, opener, gpus) as workers:
        recipe, source_rows = workers.describe()
        shards = plan_shards(output, recipe, rows, shard_size, source_rows)
        reports, started = list[Report](), time.monotonic()
        report = Report()
        for part in workers.encode(output, settings or Settings(), shards):
            reports.append(part)
            report = _together(reports, workers.most, time.monotonic() - started)
            progress(report)
    require_disjoint((index, rows_of(index)) for index in published(output))
    return report


class _Worker:
    """Loads the weights once and keeps its GPUs. Ray ends a process after each task on GPUs, or gives the next task
    another GPU than that of the weights."""

    def __init__(self, opener: Opener) -> None:
        self.opener = opener

    def open(self) -> tuple[Recipe, int]:
        self.source, self.encoder = self.opener()
        return self.encoder.recipe, len(self.source)

    def encode(self, output: Folder, settings: Settings, shards: Sequence[Range]) -> Report:
        return Engine(self.source, self.encoder, output, settings).run(shards)


class _Workers:
    """A worker for each slot of the cluster, as nodes come and go. Leaving the context ends them, also after Ctrl-C.

    Attributes:
        most: the most slots that there were.
    """

    def __init__(self, ray: Any, opener: Opener, gpus: int) -> None:
        self.ray, self.opener, self.gpus = ray, opener, gpus
        self.kind = ray.remote(num_gpus=gpus, num_cpus=1, max_restarts=0, max_task_retries=0)(_Worker)
        self.most = 0
        self.running: dict[Any, tuple[Any, list[Range]]] = {}
        """A call -> its worker and its shards; none while the worker opens source and encoder."""
        self.idle: list[Any] = []
        self.again: list[list[Range]] = []
        """Shards of workers that died."""
        self.deaths: Counter[Range | None] = Counter()
        """By the first shard of a task; None for workers that opened source and encoder."""

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in [*self.idle, *(worker for worker, _ in self.running.values())]:
            with suppress(Exception):  # of a cluster that is gone: it would take the place of what ended the run
                self.ray.kill(worker)

    def describe(self) -> tuple[Recipe, int]:
        """The recipe and the number of rows of the source, from the first worker."""
        done: list[tuple[list[Range], Any]] = []
        while not done:
            if not self.running:
                self._start()
            done = self._done()
        described: tuple[Recipe, int] = done[0][1]
        return described

    def encode(self, output: Folder, settings: Settings, shards: Sequence[Range]) -> Iterator[Report]:
        """The reports of tasks, each when it is done."""
        waiting = deque(shards)
        while waiting or self.again or any(part for _, part in self.running.values()):
            slots = slots_of(self.ray.nodes(), self.gpus)
            self.most = max(self.most, slots)
            size = max(1, len(shards) // (max(1, slots) * TASKS_PER_SLOT))
            while self.idle and (waiting or self.again):
                worker = self.idle.pop()
                part = self.again.pop() if self.again else [waiting.popleft() for _ in range(min(size, len(waiting)))]
                self.running[worker.encode.remote(output, settings, part)] = worker, part
            opening = sum(not part for _, part in self.running.values())
            wanted = min(slots - len(self.running), -(-len(waiting) // size) + len(self.again) - opening)
            for _ in range(wanted):
                self._start()
            yield from [report for part, report in self._done() if part]

    def _start(self) -> None:
        worker = self.kind.remote(self.opener)
        self.running[worker.open.remote()] = worker, []

    def _done(self) -> list[tuple[list[Range], Any]]:
        """The shards and result of a call that is done; none if it failed, or after RECOUNT_S."""
        if not self.running:
            warnings.warn("the Ray cluster has lost all nodes that can run a task: waiting for one", stacklevel=2)
            time.sleep(RECOUNT_S)
            return []
        done, _ = self.ray.wait(list(self.running), timeout=RECOUNT_S)
        results = []
        for call in done:
            worker, part = self.running[call]
            try:
                results.append((part, self.ray.get(call)))
            except (self.ray.exceptions.RayActorError, self.ray.exceptions.ObjectLostError) as error:
                self._died(worker, part, error)
            else:
                self.idle.append(worker)
                self.deaths.pop(part[0] if part else None, None)
            del self.running[call]
        return results

    def _died(self, worker: Any, part: list[Range], error: Exception) -> None:
        with suppress(Exception):
            self.ray.kill(worker)  # in case that it only lost its connection
        task = part[0] if part else None
        self.deaths[task] += 1
        if self.deaths[task] > RETRIES:
            raise QieError(
                f"a task died {RETRIES + 1} times",
                found=" ".join(str(error).split())[:300],
                hint="was a node out of memory? Published shards stay; run the same command again to continue",
            ) from error
        work = f"its shards from row {part[0][0]} to {part[-1][1]} go to another" if part else "another takes its place"
        warnings.warn(f"a worker of the Ray cluster died: {work}", stacklevel=2)
        if part:
            self.again.append(part)


def _together(reports: Sequence[Report], slots: int, seconds: float) -> Report:
    """The report of all tasks. `slots` run at once: a stage's workers are those of the slots, not of all tasks."""
    whole = sum(reports, Report())
    loads = {
        name: replace(load, workers=max(1, load.workers * slots // len(reports))) for name, load in whole.loads.items()
    }
    return replace(whole, loads=loads, seconds=seconds)


def gpus_of(*devices: str) -> int:
    """How many GPUs a task needs for encoders on `devices`; `auto` is a GPU if the cluster has any."""
    some = bool(_ray().cluster_resources().get("GPU"))
    return len({"cuda:0" if device == "auto" else device for device in devices if device != "auto" or some} - {"cpu"})


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise UsageError("Ray is not installed", where="--engine ray", hint="pip install 'qie[ray]'") from error
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    return ray


def slots_of(nodes: Sequence[Mapping[str, Any]], gpus: int) -> int:
    """How many tasks can run at once on the `nodes` of Ray. A task takes its CPU and GPUs from one of them."""
    there = (_gpus_and_cpus(node) for node in nodes if node["Alive"])
    return sum(min(node_gpus // gpus, cpus) if gpus else cpus for node_gpus, cpus in there)


def _gpus_and_cpus(node: Mapping[str, Any]) -> tuple[int, int]:
    resources = node["Resources"]
    return int(resources.get("GPU", 0)), int(resources.get("CPU", 0))


def require_a_slot(nodes: Sequence[Mapping[str, Any]], gpus: int) -> None:
    """Else Ray waits for ever, silently, for a node that can run the task."""
    if slots_of(nodes, gpus):
        return
    there = Counter(_gpus_and_cpus(node) for node in nodes if node["Alive"])
    raise UsageError(
        f"no node of the Ray cluster has enough {'GPUs' if gpus else 'CPUs'} for one task",
        expected=f"{gpus} GPUs and 1 CPU in one node: a GPU for each device that cache.vae_encoder_device and "
        "cache.text_encoder_device name",
        found=", ".join(f"{count} × ({one} GPUs, {cpus} CPUs)" for (one, cpus), count in sorted(there.items())),
        hint="name one device for both encoders" if gpus > 1 else "add a node with them: ray start --address …",
    )


@contextmanager
def _explained(ray: Any) -> Iterator[None]:
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, (QieError, OSError)):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        raise QieError(
            "the Ray cluster failed",
            found=" ".join(str(error).split())[:300],
            hint="published shards stay; run the same command again to continue",
        ) from error
