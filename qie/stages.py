"""Stages of work: functions that items pass one after the other, in turn or overlapped in threads.

In turn or overlapped, the results are the same and in the same order. Overlapped, the time is that of the slowest
stage, and memory is bounded by what lies between the stages.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from qie.threads import Threads, submit


@dataclass(frozen=True)
class Stage:
    """One step.

    Attributes:
        name: for people.
        work: what is done to an item.
        workers: how many items may be in it at once; more than one only for work that keeps no state.
        size: as how many an item counts.
    """

    name: str
    work: Callable[[Any], Any]
    workers: int = 1
    size: Callable[[Any], int] = lambda item: 1


@dataclass(frozen=True)
class Load:
    """What a stage has done so far.

    Attributes:
        items: that it has worked on, by their size.
        busy_s: seconds of work, summed over its workers.
        workers: how many it has.
    """

    items: int = 0
    busy_s: float = 0.0
    workers: int = 1

    def share(self, wall_s: float) -> float:
        """How much of `wall_s` seconds it was at work, 0 to 1: the largest is the bottleneck's."""
        return self.busy_s / (self.workers * wall_s) if wall_s > 0 else 0.0

    @property
    def rate(self) -> float:
        """Items per second, if it never had to wait for others; 0 before the first."""
        return self.items * self.workers / self.busy_s if self.busy_s else 0.0

    def __add__(self, other: Load) -> Load:
        """Of two processes' stages side by side."""
        return Load(self.items + other.items, self.busy_s + other.busy_s, self.workers + other.workers)


def quick_turns() -> None:
    """Let threads of this process hand Python's lock on after 0.2 ms, not 5.

    For processes in which encoders work beside something else: qie-precompute and its workers, and whoever opens a
    stream that encodes live. It stays so until the process ends.

    Between any two operations of a model a thread needs the lock. While another runs many small ones, as a text encoder
    does for short prompts, it would wait up to 5 ms each time.
    """
    sys.setswitchinterval(0.0002)


def in_turn(stages: Sequence[Stage], item: Any) -> Any:
    """`item` through all stages, here and now."""
    for stage in stages:
        item = stage.work(item)
    return item


class Pipeline:
    """Stages that overlap: while one works on an item, the one before it works on the next.

    Args:
        stages: in their order.
        depth: how many finished items may wait before each stage.

    Attributes:
        loads: by stage name, kept up to date while it runs.
    """

    def __init__(self, stages: Sequence[Stage], depth: int = 2) -> None:
        self._stages, self._depth = stages, depth
        self.loads = {stage.name: Load(workers=stage.workers) for stage in stages}
        self._lock = threading.Lock()

    def run(self, items: Iterable[Any]) -> Generator[Any, None, None]:
        """The items after the last stage, in their order.

        `items` is iterated in a thread of its own. An error there or in a stage is raised here; when iteration ends,
        however it ends, no thread of the pipeline is at work any more.
        """
        channels = [_Channel(self._depth) for _ in range(len(self._stages) + 1)]
        threads = Threads()
        threads.start("items", _feed, items, channels[0])
        for stage, source, sink in zip(self._stages, channels, channels[1:], strict=False):
            threads.start(stage.name, self._pump, stage, source, sink)
        try:
            yield from channels[-1]
        finally:
            for channel in channels:
                channel.close()
            threads.stop()

    def _pump(self, stage: Stage, source: _Channel, sink: _Channel) -> None:
        if stage.workers == 1:
            _feed((self._timed(stage, item) for item in source), sink)
            return
        with ThreadPoolExecutor(stage.workers, thread_name_prefix=f"qie-{stage.name}") as pool:
            _feed(_ahead(pool, lambda item: self._timed(stage, item), source, stage.workers), sink)

    def _timed(self, stage: Stage, item: Any) -> Any:
        start = time.perf_counter()
        try:
            return stage.work(item)
        finally:
            busy_s = time.perf_counter() - start
            with self._lock:
                load = self.loads[stage.name]
                self.loads[stage.name] = replace(load, items=load.items + stage.size(item), busy_s=load.busy_s + busy_s)


def _ahead(pool: ThreadPoolExecutor, work: Callable[[Any], Any], source: _Channel, workers: int) -> Iterator[Any]:
    """`work` of each item, in order, `workers` of them at a time. What is done waits for no item long in coming."""
    running: deque[Future[Any]] = deque()
    items, error = iter(source), None
    while error is None:
        if running and (len(running) == workers or not source.has_item(running[0].done)):
            yield running.popleft().result()
            continue
        try:
            running.append(submit(pool, work, next(items)))
            running[-1].add_done_callback(lambda done: source.wake())
        except StopIteration:
            break
        except BaseException as failure:  # raised behind what came before it
            error = failure
    while running:
        yield running.popleft().result()
    if error is not None:
        raise error


class _ClosedError(Exception):
    """Nobody reads what is written any more."""


@dataclass(frozen=True)
class _Failure:
    error: BaseException


_END = object()


class _Channel:
    """A bounded queue that can be closed from either side."""

    def __init__(self, size: int) -> None:
        self._size, self._closed, self._watched = size, False, False
        self._items: deque[Any] = deque()
        self._changed = threading.Condition()

    def put(self, item: Any) -> None:
        with self._changed:
            while len(self._items) >= self._size and not self._closed:
                self._changed.wait()
            if self._closed:
                raise _ClosedError
            self._items.append(item)
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Any]:
        while True:
            with self._changed:
                while not self._items and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                item = self._items.popleft()
                self._changed.notify_all()
            if item is _END:
                return
            if isinstance(item, _Failure):
                raise item.error
            yield item

    def has_item(self, otherwise: Callable[[], bool]) -> bool:
        """Wait for an item or the end, and say that it is there; or, of which `wake` tells, for `otherwise`."""
        with self._changed:
            self._watched = True
            while not self._items and not self._closed and not otherwise():
                self._changed.wait()
            self._watched = False
            return bool(self._items) or self._closed

    def wake(self) -> None:
        # Who begins to watch just now looks at what has come true before it waits.
        if self._watched:
            with self._changed:
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _feed(items: Iterable[Any], channel: _Channel) -> None:
    """Put all items, then the end, or the error that ended them."""
    try:
        try:
            for item in items:
                channel.put(item)
                del item  # a batch is large
        except _ClosedError:
            raise
        except BaseException as error:  # handed to whoever iterates the pipeline
            channel.put(_Failure(error))
        else:
            channel.put(_END)
    except _ClosedError:
        pass
