"""Precompute on a Ray cluster: shards as tasks, on any node with the GPUs, tried again when a node dies.

A task that is tried again finds its published shards and continues after them. Every node must reach source, model and
output: URLs, or paths of a shared file system.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from qie.data.live import RowEncoder
from qie.data.sources import Source
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

_opened: dict[str, tuple[Source, RowEncoder]] = {}
"""In a worker: the source and encoder of its run. Ray keeps workers, so each loads the weights once."""


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
    run = uuid.uuid4().hex
    # Not in the driver: its node may have no GPU, where `auto` would mean another recipe.
    _require_a_slot(ray.nodes(), gpus)
    slots = slots_of(ray.nodes(), gpus)
    resources: dict[str, Any] = {"num_gpus": gpus, "num_cpus": 1, "max_retries": RETRIES}
    with _explained(ray):
        recipe, source_rows = ray.get(ray.remote(**resources)(_describe).remote(run, opener))
        shards = plan_shards(output, recipe, rows, shard_size, source_rows)
        task = ray.remote(**resources)(_encode)
        work = partial(task.remote, run, opener, output, settings or Settings())
        size = max(1, len(shards) // (slots * TASKS_PER_SLOT))
        waiting = iter([shards[at : at + size] for at in range(0, len(shards), size)])
        report, reports, started = Report(), list[Report](), time.monotonic()
        # Twice as many as can run, so that a slot that becomes free has the next one there.
        running = [work(part) for _, part in zip(range(2 * slots), waiting, strict=False)]
        while running:
            (done,), running = _first(ray, running)
            reports.append(ray.get(done))
            report = _together(reports, slots, time.monotonic() - started)
            progress(report)
            running += [work(part) for _, part in zip(range(1), waiting, strict=False)]
    require_disjoint((index, rows_of(index)) for index in published(output))
    return report


def _together(reports: Sequence[Report], slots: int, seconds: float) -> Report:
    """The report of all tasks. `slots` run at once: a stage's workers are those of the slots, not of all tasks."""
    whole = sum(reports, Report())
    loads = {
        name: replace(load, workers=max(1, load.workers * slots // len(reports))) for name, load in whole.loads.items()
    }
    return replace(whole, loads=loads, seconds=seconds)


def _first(ray: Any, running: list[Any]) -> Any:
    """The first task that is done, and the others. Ctrl-C cancels them."""
    try:
        return ray.wait(running, num_returns=1)
    except BaseException:
        for task in running:
            ray.cancel(task, force=True)
        raise


def gpus_of(*devices: str) -> int:
    """How many GPUs a task needs for encoders on `devices`; `auto` is a GPU if the cluster has any."""
    some = bool(_ray().cluster_resources().get("GPU"))
    return len({"cuda:0" if device == "auto" else device for device in devices if device != "auto" or some} - {"cpu"})


def _describe(run: str, opener: Opener) -> tuple[Recipe, int]:
    source, encoder = _open(run, opener)
    return encoder.recipe, len(source)


def _encode(run: str, opener: Opener, output: Folder, settings: Settings, shards: Sequence[Range]) -> Report:
    source, encoder = _open(run, opener)
    return Engine(source, encoder, output, settings).run(shards)


def _open(run: str, opener: Opener) -> tuple[Source, RowEncoder]:
    if run not in _opened:
        _opened.clear()
        _opened[run] = opener()
    return _opened[run]


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


def _require_a_slot(nodes: Sequence[Mapping[str, Any]], gpus: int) -> None:
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
            f"a task died {RETRIES + 1} times",
            found=" ".join(str(error).split())[:300],
            hint="was a node out of memory? Published shards stay; run the same command again to continue",
        ) from error
