"""Precompute on a Ray cluster: shards are dealt to workers on any node with the GPUs, as nodes come and go.

The driver deals shards one by one to an actor in each place where one fits. Places that join get a worker at once,
for Ray is asked for more workers than there are places; an autoscaler starts nodes for them. What a dead worker held
goes to others, who find the shards that it had published. Every node must reach source, model and output: URLs, or
paths of a shared file system.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from qie.errors import QieError, UsageError, one_line
from qie.precompute.counts import OnReport, Report
from qie.precompute.engine import Settings
from qie.precompute.local import REPORT_EVERY_S, Opener, plan_shards
from qie.precompute.progress import PrecomputeRun, withdraw
from qie.precompute.ray_worker import News, Worker
from qie.quantities import human_count
from qie.recipe import Recipe
from qie.shards.discovery import published, rows_of
from qie.shards.grid import SHARD_ROWS, Range, merged_ranges, shard_ranges
from qie.shards.shard_set import require_disjoint
from qie.stores import Folder
from qie.threads import Threads, leave, pause

Result = TypeVar("Result")
Node = Mapping[str, Any]
"""A node as `ray.nodes()` describes it."""

RETRIES = 5
"""How often a shard is dealt again after the worker that held it has died."""

SHARDS_PER_PLACE = 8
"""A place that is still to start is asked for only if this many shards wait for it. One that is there takes any."""

MOST_ASKED = 64
"""The most workers for which Ray is asked at a time beyond the places that there are."""

LOOK_S = 1.0
"""Seconds between looks at the nodes."""

CONNECT_S = 20.0
"""How long the head of the cluster may take to answer."""

WAIT_S = 0.25
"""The longest that nothing but Ray is listened to: Ctrl-C has to be."""

STOP_S = 10.0
"""How long a run that was interrupted may take to end its workers, before its process ends without it."""

SIGTERM_STATUS = 128 + signal.SIGTERM

REMIND_S = 30.0
"""Seconds between lines that say what is waited for."""

DEATH_S = 20.0
"""How long the head of a cluster may take to learn that a node has died, by Ray's own settings. Until then it may be
that only a worker died there."""


def precompute_on_ray(
    opener: Opener,
    output: Folder,
    *,
    rows: Range,
    devices: Sequence[str],
    shard_size: int = SHARD_ROWS,
    settings: Settings | None = None,
    progress: OnReport = lambda report: None,
    say: Callable[[str], object] = warnings.warn,
    tell: bool = False,
) -> Report:
    """As `precompute`, with workers on the cluster of RAY_ADDRESS; without it, on the last one that was started on this
    machine, or on one that is started here.

    Args:
        opener: opens source and encoder in a worker; devices are numbered among its GPUs.
        output: where the shards go; the same place on all nodes.
        rows: the half-open range of rows.
        devices: of the encoders, see `gpus_of`.
        shard_size, settings, progress: see `precompute`.
        say: told what the run waits for, and which nodes died.
        tell: see `precompute`.

    Raises:
        UsageError: Ray is not installed, cannot be reached, or was started here and has not the GPUs of a worker.
        QieError: raised in a worker, or because workers died too often.
    """

    def run(connected: threading.Event) -> Report:
        with _connected() as (ray, alone), _explained(ray):
            connected.set()
            nodes = ray.nodes()
            gpus = gpus_of(devices, nodes)
            if alone:
                require_a_place(nodes, gpus)
            elif "auto" in devices and not gpus:
                say(
                    "no node of the Ray cluster has a GPU: encoding on CPUs. For GPUs of nodes that are still to "
                    "start, name them: --vae-device cuda:0 --text-device cuda:0"
                )
            # Not in the driver: its node may have no GPU, where `auto` would mean another recipe.
            with _Workers(ray, opener, gpus, say) as workers:
                recipe, source_rows = workers.describe(shard_ranges(*rows, shard_size, ()))
                shards = plan_shards(output, recipe, rows, shard_size, source_rows)
                started, report = time.monotonic(), Report()
                told = PrecomputeRun.new(rows, source_rows) if tell else None
                for done in workers.encode(output, settings or Settings(), shards, told):
                    report = replace(done, seconds=time.monotonic() - started)
                    progress(report)
                if told and not report.shards_written:
                    withdraw(output, told)
        require_disjoint((index, rows_of(index)) for index in published(output))
        return report

    return _in_a_thread(run)


def _in_a_thread(work: Callable[[threading.Event], Result]) -> Result:
    """The result of `work`, which sets the event when it is connected. Ctrl-C and SIGTERM ask it to stop. In the main
    thread they would be raised in the midst of Ray's native code, which ends the process with a stack of C++."""
    threads, connected, ended = Threads(), threading.Event(), threading.Event()
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work(connected))
        except BaseException as error:
            errors.append(error)
        finally:
            connected.set()
            ended.set()

    with _heard_sigterm() as hear:
        threads.start("ray", run)
        try:
            connected.wait()
            hear()  # again: Ray has put its own answer in the place of ours
            threads.join()
        except BaseException as interruption:
            threads.ask()
            if not ended.wait(STOP_S):
                threads.leave_behind()
            if isinstance(interruption, SystemExit):
                leave(SIGTERM_STATUS)
            raise
    for error in errors:
        raise error
    return results[0]


@contextmanager
def _heard_sigterm() -> Iterator[Callable[[], None]]:
    """Yields what lets SIGTERM, which `ray job stop` and Kubernetes send, raise SystemExit here. Not where the program
    has its own answer."""

    def hear() -> None:
        if mine:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(SIGTERM_STATUS))

    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    hear()
    try:
        yield hear
    finally:
        if mine:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@dataclass(eq=False)
class _Hand:
    """A worker as the driver sees it.

    Attributes:
        node: where it runs; None until Ray has found a place for it.
        opened: whether it has loaded source and encoder.
        held: shards that it was dealt and has not finished.
        waiting: how many of them it has not begun.
        ended: whether it has done all of them.
        gift: how many may wait for it.
        report, counted: of all that it has done, and of its finished shards.
    """

    actor: Any
    node: str | None = None
    opened: bool = False
    held: list[Range] = field(default_factory=list)
    waiting: int = 0
    ended: bool = True
    gift: int = 1
    report: Report = field(default_factory=Report)
    counted: Report = field(default_factory=Report)


class _Workers:
    """A worker for each place of the cluster, as nodes come and go. Leaving the context ends them, also after Ctrl-C.

    Attributes:
        waiting: shards that nobody holds.
        hands: all workers that live or are asked for.
        most: the most that worked at once.
    """

    def __init__(self, ray: Any, opener: Opener, gpus: int, say: Callable[[str], object]) -> None:
        self.ray, self.opener, self.gpus, self.say = ray, opener, gpus, say
        self.kind = ray.remote(num_gpus=gpus, num_cpus=1, max_restarts=0, max_task_retries=0)(Worker)
        self.waiting: deque[Range] = deque()
        self.hands: list[_Hand] = []
        self.calls: dict[Any, tuple[_Hand, str]] = {}
        self.recipe: tuple[Recipe, int] | None = None
        self.most, self._buried, self._stages = 0, Report(), dict[str, int]()
        self._deaths: Counter[Range | None] = Counter()
        """By shard; None for workers that died before they had any."""
        self._lost: dict[str, tuple[float, list[Range]]] = {}
        """Nodes whose workers died -> since when, and what those held; until it is told."""
        self._said: set[str] = set()
        self._nodes: list[Node] = []
        self._looked, self._alone_since, self._reminded = -1e9, time.monotonic(), -1e9

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for hand in self.hands:
            with suppress(Exception):  # of a cluster that is gone: it would take the place of what ended the run
                self.ray.kill(hand.actor)

    def describe(self, shards: Sequence[Range]) -> tuple[Recipe, int]:
        """The recipe and the number of rows of the source, from the first worker that opens them. For about as many
        `shards`, workers are started, or asked for, meanwhile."""
        self.waiting = deque(shards)
        while self.recipe is None:
            self._look()
            self._hear(WAIT_S)
        return self.recipe

    def encode(
        self, output: Folder, settings: Settings, shards: Sequence[Range], told: PrecomputeRun | None
    ) -> Iterator[Report]:
        """The report of all workers, as it grows."""
        self.waiting = deque(shards)
        reported = time.monotonic()
        while self.waiting or any(hand.held or not hand.ended for hand in self.hands):
            self._look()
            busy = {id(hand) for hand, _ in self.calls.values()}
            for hand in self.hands:
                if hand.opened and id(hand) not in busy and (self.waiting or not hand.ended):
                    self._deal(hand, output, settings, told)
            self._hear(WAIT_S)
            if time.monotonic() - reported >= REPORT_EVERY_S:
                reported = time.monotonic()
                yield self._report()
        self._tell_deaths(at_once=True)
        yield self._report()

    def _deal(self, hand: _Hand, output: Folder, settings: Settings, told: PrecomputeRun | None) -> None:
        part = [self.waiting.popleft() for _ in range(min(hand.gift - hand.waiting, len(self.waiting)))]
        hand.held += part
        hand.ended = False
        every_s = max(REPORT_EVERY_S, len(self.hands) / 100)  # a hundred reports a second at most
        call = hand.actor.work.remote(output, settings, told, part, bool(self.waiting), every_s)
        self.calls[call] = hand, "work"

    def _hear(self, seconds: float) -> None:
        """Wait for calls that are done, for `seconds` at most."""
        pause(0)  # raises what ends this thread after Ctrl-C
        if not self.calls:
            pause(seconds)
            return
        self.ray.wait(list(self.calls), timeout=seconds)
        done, _ = self.ray.wait(list(self.calls), num_returns=len(self.calls), timeout=0)
        for call in done:
            hand, what = self.calls.pop(call)
            try:
                result = self.ray.get(call)
            except (self.ray.exceptions.RayActorError, self.ray.exceptions.ObjectLostError) as error:
                self._died(hand, error)
                continue
            if what == "node":
                hand.node = result
                self.calls[hand.actor.open.remote()] = hand, "open"
            elif what == "open":
                self._opened(hand, *result)
            else:
                self._heard(hand, result)

    def _opened(self, hand: _Hand, recipe: Recipe, rows: int) -> None:
        if self.recipe is not None:
            where = f"the worker on node {self._name(hand.node)}"
            self.recipe[0].require_equal(recipe, where, "name devices of one kind, or set cache.compute_dtype")
        self.recipe = self.recipe or (recipe, rows)
        hand.opened = True
        self._deaths.pop(None, None)
        self.most = max(self.most, sum(hand.opened for hand in self.hands))

    def _heard(self, hand: _Hand, news: News) -> None:
        quick = bool(news.finished) and news.report.encoded == hand.report.encoded
        # Published shards go by faster than one that is asked for arrives. Others are dealt late, for fairness.
        fair = len(self.waiting) // (SHARDS_PER_PLACE * len(self.hands))
        hand.gift = max(1, min(2 * hand.gift, fair)) if quick else 1
        hand.report, hand.waiting, hand.ended = news.report, news.waiting, news.ended
        hand.counted = news.counted or hand.counted
        hand.held = [] if news.ended else [shard for shard in hand.held if shard not in news.finished]
        self._stages |= {name: load.workers for name, load in news.report.loads.items()}
        for line in news.said:
            if line not in self._said:
                self._said.add(line)
                self.say(f"node {self._name(hand.node)}: {line}")

    def _died(self, hand: _Hand, error: Exception) -> None:
        with suppress(Exception):
            self.ray.kill(hand.actor)  # in case that it only lost its connection
        self.hands.remove(hand)
        self._buried += hand.counted
        self.waiting.extendleft(reversed(hand.held))
        if hand.node is not None:
            _, held = self._lost.setdefault(hand.node, (time.monotonic(), []))
            held += hand.held
        lost: list[Range | None] = [*hand.held]
        for shard in lost or [None]:
            self._deaths[shard] += 1
            if self._deaths[shard] > RETRIES:
                work = f"with rows {shard[0]} to {shard[1]}" if shard else "before they had any rows"
                raise QieError(
                    f"workers died {RETRIES + 1} times {work}",
                    found=one_line(error, 300),
                    hint="was a node out of memory? Published shards stay; run the same command again to continue",
                ) from error

    def _look(self) -> None:
        """Look at the nodes, if it is time: ask for workers, and tell of deaths and of waiting."""
        if time.monotonic() - self._looked < LOOK_S:
            return
        self._nodes, self._looked = self.ray.nodes(), time.monotonic()
        self._ask()
        self._tell_deaths()
        self._tell_waiting()

    def _ask(self) -> None:
        """As many workers as there are places, and those of nodes that are still to start. Ray reports them as demands
        to its autoscaler, if there is one, until they have a place, or this process ends."""
        opened = sum(hand.opened for hand in self.hands)
        wanted = max(places_of(self._nodes, self.gpus) - opened, min(MOST_ASKED, len(self.waiting) // SHARDS_PER_PLACE))
        wanted = min(max(0 if opened else 1, wanted), len(self.waiting))
        asked = [hand for hand in self.hands if not hand.opened]
        for _ in range(wanted - len(asked)):
            hand = _Hand(self.kind.remote(self.opener))
            self.hands.append(hand)
            self.calls[hand.actor.node.remote()] = hand, "node"
        for hand in [hand for hand in asked if hand.node is None][: max(0, len(asked) - wanted)]:
            self.ray.kill(hand.actor)
            self.hands.remove(hand)
            self.calls = {call: (other, what) for call, (other, what) in self.calls.items() if other is not hand}

    def _tell_deaths(self, at_once: bool = False) -> None:
        alive = {node["NodeID"] for node in self._nodes if node["Alive"]}
        for node, (since, held) in list(self._lost.items()):
            if node in alive and not at_once and time.monotonic() - since < DEATH_S:
                continue
            del self._lost[node]
            what = f"a worker on node {self._name(node)}" if node in alive else f"node {self._name(node)}"
            rows = ", ".join(f"{start} to {stop}" for start, stop in merged_ranges(held))
            work = f"its rows {rows} go on elsewhere" if rows else "it had no rows"
            self.say(f"{what} of the Ray cluster died: {work}")

    def _tell_waiting(self) -> None:
        """That no worker has a place: at once if no node has one, else when it takes long."""
        now = time.monotonic()
        if any(hand.node for hand in self.hands) or not self.waiting:
            self._alone_since, self._reminded = now, -1e9
            return
        places = places_of(self._nodes, self.gpus)
        if now - max(self._reminded, self._alone_since if places else -1e9) < REMIND_S:
            return
        self._reminded = now
        asked = f"{len(self.hands)} × ({_resources(self.gpus, 1)})"
        there = f"the Ray cluster has {_words(self._nodes)}"
        if places:
            self.say(f"waiting for a worker to start: asked for {asked}; {there}, which others may use")
            return
        advice = "for one device for both encoders, half of the GPUs would do; " if self.gpus > 1 else ""
        self.say(
            f"waiting for a node with {_resources(self.gpus, 1)}: asked for {asked}; {there}; {advice}"
            "without an autoscaler, start one: ray start --address …"
        )

    def _name(self, node: str | None) -> str:
        address = next((one.get("NodeManagerAddress") for one in self._nodes if one["NodeID"] == node), None)
        return f"{address or '?'} ({str(node)[:8]})"

    def _report(self) -> Report:
        """Of all workers. A stage's are those of the workers that were there at once, not of all that ever were."""
        whole = Report.of_all([self._buried, *(hand.report for hand in self.hands)])
        loads = {
            name: replace(load, workers=self._stages.get(name, 1) * max(1, self.most))
            for name, load in whole.loads.items()
        }
        return replace(whole, loads=loads)


def gpus_of(devices: Sequence[str], nodes: Sequence[Node]) -> int:
    """How many GPUs a worker needs for encoders on `devices`; `auto` is a GPU if a node has any."""
    some = any(_gpus_and_cpus(node)[0] for node in nodes if node["Alive"])
    return len({"cuda:0" if device == "auto" else device for device in devices if device != "auto" or some} - {"cpu"})


def places_of(nodes: Sequence[Node], gpus: int) -> int:
    """How many workers the `nodes` of Ray can hold. A worker takes its CPU and GPUs from one of them."""
    there = (_gpus_and_cpus(node) for node in nodes if node["Alive"])
    return sum(min(node_gpus // gpus, cpus) if gpus else cpus for node_gpus, cpus in there)


def require_a_place(nodes: Sequence[Node], gpus: int) -> None:
    """For a cluster that nothing joins."""
    if places_of(nodes, gpus):
        return
    raise UsageError(
        f"this machine has not enough {'GPUs' if gpus else 'CPUs'} for one worker, and there is no Ray cluster",
        where="--engine ray",
        expected=f"{_resources(gpus, 1)}: a GPU for each device that cache.vae_encoder_device and "
        "cache.text_encoder_device name",
        found=_words(nodes),
        hint="start Ray on nodes that have them (ray start), and name their head: RAY_ADDRESS=HOST:6379",
    )


def _gpus_and_cpus(node: Node) -> tuple[int, int]:
    resources = node["Resources"]
    return int(resources.get("GPU", 0)), int(resources.get("CPU", 0))


def _words(nodes: Sequence[Node]) -> str:
    there = Counter(_gpus_and_cpus(node) for node in nodes if node["Alive"])
    return ", ".join(f"{count} × ({_resources(*one)})" for one, count in sorted(there.items()))


def _resources(gpus: int, cpus: int) -> str:
    return f"{human_count(gpus, 'GPU')} and {human_count(cpus, 'CPU')}"


@contextmanager
def _connected() -> Iterator[tuple[Any, bool]]:
    """Ray, and whether it was started here for this run alone. A program that has connected itself stays connected."""
    try:
        import ray
    except ImportError as error:
        raise UsageError("Ray is not installed", where="--engine ray", hint="pip install 'qie[ray]'") from error
    if ray.is_initialized():
        yield ray, False
        return
    _require_reachable(os.environ.get("RAY_ADDRESS", ""))
    logging.getLogger("ray").setLevel(logging.ERROR)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        ray.init(address="auto", **quiet)
        alone = False
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        if os.environ.get("RAY_ADDRESS") or isinstance(error, ray.exceptions.RayError):
            raise _unreachable(one_line(error, 300)) from error
        ray.init(address="local", include_dashboard=False, **quiet)
        alone = True
    # Of a dead node, Ray prints thirty lines of its log, whatever `log_to_driver` says; qie tells of it in one.
    ray._private.worker.print_to_stdstream = lambda *_, **__: None
    try:
        yield ray, alone
    finally:
        ray.shutdown()


def _require_reachable(address: str) -> None:
    """Ray itself would try for a quarter of an hour."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise _unreachable(str(error)) from error


def _unreachable(found: str) -> UsageError:
    return UsageError(
        "the Ray cluster cannot be reached",
        where=f"RAY_ADDRESS={os.environ.get('RAY_ADDRESS', '')}",
        found=found,
        hint="name the host and port of its head; `ray status` shows whether it runs, and whether it wants a token",
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
            found=one_line(error, 300),
            hint="published shards stay; run the same command again to continue",
        ) from error
