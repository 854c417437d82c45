"""The side of a Ray cluster that encodes: an actor that keeps source, encoder and GPUs for as long as the run lasts.

The driver deals it shards, one ahead of the one that it has begun, so that its stages overlap across shards, and what
a dead worker leaves to others, or one that joins late finds taken, are few.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from qie.data.live import RowEncoder
from qie.data.sources import Source
from qie.precompute.counts import Report
from qie.precompute.engine import Engine, Settings
from qie.precompute.progress import PrecomputeRun
from qie.recipe import Recipe
from qie.shards.grid import Range
from qie.stores import Folder


@dataclass(frozen=True)
class News:
    """What a worker has done.

    Attributes:
        report: of all that it has done so far.
        finished: shards that it has finished since the last news.
        counted: the report up to the last finished shard; None if there is none since the last news.
        waiting: shards that it was dealt and has not begun.
        ended: it has done all that it was dealt.
        said: warnings since the last news.
    """

    report: Report
    finished: list[Range]
    counted: Report | None
    waiting: int
    ended: bool
    said: list[str]


class Worker:
    """Loads the weights once and keeps its GPUs. Ray ends a process after each task on GPUs, or gives the next task
    another GPU than that of the weights."""

    def __init__(self, opener: Callable[[], tuple[Source, RowEncoder]]) -> None:
        self._opener = opener
        self._changed = threading.Condition()
        self._dealt: deque[Range] = deque()
        self._more, self._runs = True, False
        self._error: BaseException | None = None
        self._before, self._report = Report(), Report()
        self._counted: Report | None = None
        self._finished: list[Range] = []
        self._said: list[str] = []
        warnings.showwarning = lambda message, *_, **__: self._said.append(str(message))

    def node(self) -> str:
        """Where it runs."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def open(self) -> tuple[Recipe, int]:
        """The recipe, and the number of rows of the source."""
        self._source, self._encoder = self._opener()
        return self._encoder.recipe, len(self._source)

    def work(
        self,
        output: Folder,
        settings: Settings,
        told: PrecomputeRun | None,
        shards: Sequence[Range],
        more: bool,
        every_s: float,
    ) -> News:
        """Deal `shards`, and wait for news: a finished shard, none left to begin, or `every_s` seconds.

        Args:
            output, settings, told: see `Engine`.
            more: whether more shards may follow. If not, the engine ends, and may be started again.
        """
        with self._changed:
            self._dealt.extend(shards)
            self._more = more
            if self._dealt and not self._runs:
                self._runs, self._before = True, self._report
                threading.Thread(
                    target=self._run, args=(output, settings, told), name="qie-engine", daemon=True
                ).start()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._runs or self._finished or (more and not self._dealt), every_s)
            if self._error is not None:
                raise self._error
            return self._news()

    def _news(self) -> News:
        ended = not self._runs and not self._dealt
        news = News(self._report, self._finished, self._counted, len(self._dealt), ended, self._said[:])
        self._finished, self._counted = [], None
        del self._said[: len(news.said)]
        return news

    def _run(self, output: Folder, settings: Settings, told: PrecomputeRun | None) -> None:
        try:
            engine = Engine(self._source, self._encoder, output, settings, self._progressed, self._has_finished, told)
            self._progressed(engine.run(self._iter_dealt()))
        except BaseException as error:
            self._error = error
        with self._changed:
            self._runs = False
            self._changed.notify_all()

    def _iter_dealt(self) -> Iterator[Range]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._dealt or not self._more)
                if not self._dealt:
                    return
                shard = self._dealt.popleft()
                self._changed.notify_all()
            yield shard

    def _progressed(self, report: Report) -> None:
        with self._changed:  # a copy: the engine goes on counting while this one travels
            self._report = self._before + replace(report, notes=report.notes.copy(), skipped=list(report.skipped))

    def _has_finished(self, shard: Range) -> None:
        with self._changed:
            self._finished.append(shard)
            self._counted = self._report
            self._changed.notify_all()
