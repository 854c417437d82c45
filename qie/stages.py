"""Stages of work: functions that items pass one after the other, in turn or overlapped in threads.

Both ways give the same results in the same order. Overlapped, the slowest stage sets the time, and the short queues
between the stages bound the memory.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from qie.threads import Threads, submit

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
X = TypeVar("X")


@dataclass(frozen=True)
class Stage(Generic[A, B]):
    """One step, from an A to a B.

    Attributes:
        name: for people.
        work: makes the one of the other.
        workers: how many items it works on at once; more than one only for work that keeps no state.
        size: how much an item counts for in `Load.items`.
    """

    name: str
    work: Callable[[A], B]
    workers: int = 1
    size: Callable[[A], int] = lambda item: 1


class Stages(Generic[A, B]):
    """Stages one after the other, from an A to a B. The types between them are checked where they are joined."""

    def __init__(self, *steps: Stage[Any, Any]) -> None:
        self._steps = steps

    @classmethod
    def of(cls, first: Stage[A, B]) -> Stages[A, B]:
        return cls(first)

    def then(self, more: Stage[B, C] | Stages[B, C]) -> Stages[A, C]:
        return Stages(*self, *([more] if isinstance(more, Stage) else more))

    def beside(self, size: Callable[[Any], int]) -> Stages[tuple[X, A], tuple[X, B]]:
        """The same stages for pairs. Each works on the second part, which counts by `size`, and hands the first on."""

        def paired(stage: Stage[Any, Any]) -> Stage[Any, Any]:
            return Stage(stage.name, lambda pair: (pair[0], stage.work(pair[1])), stage.workers, lambda p: size(p[1]))

        return Stages(*map(paired, self))

    def __iter__(self) -> Iterator[Stage[Any, Any]]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)


@dataclass(frozen=True)
class Load:
    """The work of a stage so far.

    Attributes:
        items: how many it has worked on, by their size.
        busy_s: seconds of work, summed over its workers.
        workers: how many it has.
    """

    items: int = 0
    busy_s: float = 0.0
    workers: int = 1

    def share(self, wall_s: float) -> float:
        """The share of `wall_s` seconds in which it worked, 0 to 1; the bottleneck has the largest."""
        return self.busy_s / (self.workers * wall_s) if wall_s > 0 else 0.0

    @property
    def rate(self) -> float:
        """Items per second of work, waiting for other stages left out; 0 before the first."""
        return self.items * self.workers / self.busy_s if self.busy_s else 0.0

    def __add__(self, other: Load) -> Load:
        """The load of one stage in two processes."""
        return Load(self.items + other.items, self.busy_s + other.busy_s, self.workers + other.workers)


def quick_turns() -> None:
    """Let the threads of this process hand Python's lock on after 0.2 ms instead of 5.

    For processes in which encoders share the CPU with other work: qie-precompute and its workers, and every
    stream that encodes live. It holds until the process ends.

    A thread needs the lock between any two operations of a model. While another thread runs many small operations, as a
    text encoder does for short prompts, it would wait up to 5 ms each time.
    """
    sys.setswitchinterval(0.0002)


def in_turn(stages: Stages[A, B], item: A) -> B:
    """`item` through all stages, here and now."""
    value: Any = item
    for stage in stages:
        value = stage.work(value)
    return value  # type: ignore[no-any-return]


class Pipeline(Generic[A, B]):
    """Stages that overlap: while one works on an item, the one before it works on the next.

    Args:
        stages: one or several.
        depth: how many finished items may wait before each stage.

    Attributes:
        loads: by stage name, kept up to date while it runs.
    """

    def __init__(self, stages: Stage[A, B] | Stages[A, B], depth: int = 2) -> None:
        self._stages, self._depth = tuple([stages] if isinstance(stages, Stage) else stages), depth
        self.loads = {stage.name: Load(workers=stage.workers) for stage in self._stages}
        self._lock = threading.Lock()

    def run(self, items: Iterable[A]) -> Generator[B, None, None]:
        """The items after the last stage, in their order.

        A thread of its own iterates `items`. An error there or in a stage is raised here. When the iteration ends,
        for whatever reason, all threads of the pipeline have stopped.
        """
        channels = [_Channel(self._depth) for _ in range(len(self._stages) + 1)]
        threads = Threads()
        try:
            threads.start("items", _feed, items, channels[0])
            for stage, source, sink in zip(self._stages, channels, channels[1:], strict=False):
                threads.start(stage.name, self._pump, stage, source, sink)
            yield from channels[-1]
        finally:
            for channel in channels:
                channel.close()
            threads.stop()

    def _pump(self, stage: Stage[Any, Any], source: _Channel, sink: _Channel) -> None:
        if stage.workers == 1:
            _feed((self._timed(stage, item) for item in source), sink)
            return
        with ThreadPoolExecutor(stage.workers, thread_name_prefix=f"qie-{stage.name}") as pool:
            _feed(_ahead(pool, lambda item: self._timed(stage, item), source, stage.workers), sink)

    def _timed(self, stage: Stage[Any, Any], item: Any) -> Any:
        start = time.perf_counter()
        try:
            return stage.work(item)
        finally:
            busy_s = time.perf_counter() - start
            with self._lock:
                load = self.loads[stage.name]
                self.loads[stage.name] = replace(load, items=load.items + stage.size(item), busy_s=load.busy_s + busy_s)


def _ahead(pool: ThreadPoolExecutor, work: Callable[[Any], Any], source: _Channel, workers: int) -> Iterator[Any]:
    """`work` of each item, in order, `workers` at a time. A finished item does not wait for a slow source."""
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
        except BaseException as failure:  # raised after the items before it
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
        """Wait for an item or the end, or until `otherwise()` holds, which `wake` announces. False for the latter."""
        with self._changed:
            self._watched = True
            while not self._items and not self._closed and not otherwise():
                self._changed.wait()
            self._watched = False
            return bool(self._items) or self._closed

    def wake(self) -> None:
        # A reader that begins to watch just now checks `otherwise` before it waits.
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
        except BaseException as error:  # raised where the pipeline is iterated
            channel.put(_Failure(error))
        else:
            channel.put(_END)
    except _ClosedError:
        pass
