"""What goes on in a folder of shards: from what its workers tell, its indexes, and its exclude list."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from qie.errors import QieError, one_line
from qie.precompute.progress import PROGRESS_FOLDER, PrecomputeRun, WorkerProgress, is_silent, read_progress
from qie.shards.discovery import index_names
from qie.shards.excluded import read_excluded
from qie.shards.grid import Range, count_within, merged_ranges
from qie.shards.index import Skipped, parse_stem
from qie.stores import Folder, LocalFolder, open_folder
from qie.watch.index_follower import IndexFollower
from qie.watch.live_page import WebFile
from qie.watch.newest_samples import NewestSamples
from qie.watch.precompute_alerts import precompute_alerts
from qie.watch.skipped_pictures import SkippedPictures

REMOTE_S = 10.0
"""Between two looks at a store, where each is some requests."""

STUCK_S = 300.0
"""A worker that lives and has done no row for so long is said to be stuck."""

LEAST_PACE = 1e-6
"""Rows a second: below it, nothing is said of the time left."""

STAGES = {
    "read": "reading rows from the source",
    "merge": "comparing rows",
    "prepare": "decoding and resizing images",
    "vae": "the VAE",
    "text": "the text encoder",
    "record": "making records",
    "write": "writing tars",
    "publish": "publishing shards",
}
_ADVICE = {
    "read": "the source is slow: a disk nearer to the workers, or more of them",
    "prepare": "the CPU's cores: more of them for each GPU",
    "vae": "the encoders set the pace, as they should: more GPUs",
    "text": "the encoders set the pace, as they should: more GPUs",
    "write": "the disk that the tars are written to is slow",
    "publish": "the output is slow: a disk or a store nearer to the workers",
}
_BUSY = 0.5


def is_precompute(place: str | Path | Folder) -> bool:
    """Whether a folder holds shards, or is being filled. Raises StoreError when it cannot be listed."""
    names = open_folder(place).names()
    return PROGRESS_FOLDER in names or bool(index_names(names))


@dataclass
class _Heard:
    """When a worker was last heard of: its own clock's time of the last news, their age then, and ours since."""

    updated: float
    age_s: float
    at: float

    def now(self, at: float) -> float:
        return self.age_s + at - self.at


class PrecomputeReader:
    """The facts of a folder of shards, read anew by each call of `read`, which costs what has changed.

    Args:
        place: the folder, by path or URL.
        pictures: of skipped rows, if their source is known.
        clock, steady: the time in Unix seconds; seconds that never go back.
    """

    def __init__(
        self,
        place: str | Path | Folder,
        pictures: SkippedPictures | None = None,
        *,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = open_folder(place)
        self.indexes, self.newest = IndexFollower(self.folder), NewestSamples(self.folder)
        self.pictures, self._clock, self._steady = pictures, clock, steady
        self._heard: dict[str, _Heard] = {}
        self._facts: tuple[float, dict[str, Any]] | None = None

    def read(self) -> dict[str, Any]:
        """What is there now, as JSON values; of a store what was there `REMOTE_S` ago at most.

        `rows`, `bytes`: done, to come. `rate`, `left_s`, `stages`, `bottleneck`: of the workers that are alive.
        `workers`: each, and whether it is alive. `newest`: samples. `skipped`: by reason. `faults`: what could not be
        read.
        """
        now = self._steady()
        if self._facts is None or isinstance(self.folder, LocalFolder) or now - self._facts[0] >= REMOTE_S:
            self._facts = now, self._read()
        return self._facts[1]

    def forget(self) -> None:
        """Let the next call read anew, in a store, too."""
        self._facts = None

    def _read(self) -> dict[str, Any]:
        faults: list[str] = []

        def attempt(act: Callable[[], Any], otherwise: Any) -> Any:
            try:
                return act()
            except QieError as error:
                faults.append(one_line(error))
                return otherwise

        workers: list[WorkerProgress] = attempt(lambda: read_progress(self.folder), [])
        told = list(filter(parse_stem, dict.fromkeys(chain.from_iterable(_newest_first(workers)))))
        attempt(lambda: self.indexes.look(told), None)
        excluded = attempt(lambda: read_excluded(self.folder), {})
        alive = [one for one in workers if self._is_alive(one)]
        ages = {one.worker: self._heard[one.worker].now(self._steady()) for one in workers}
        rows, stages = _rows(self.indexes.rows, workers, alive), _stages(alive)
        samples = self.newest.look(self._newest_stems(told))
        found = {
            "place": self.folder.url,
            "state": _state(workers, alive),
            "rows": rows,
            "rate": _rate(alive),
            "left_s": _left_s(self.indexes.rows, alive),
            "bytes": self._bytes(rows),
            "stages": stages,
            "bottleneck": _bottleneck(stages),
            "workers": [_worker(one, one in alive, ages[one.worker], self._clock()) for one in workers],
            "newest": [asdict(one) | {"excluded": one.key in excluded} for one in samples],
            "skipped": self._skipped(),
            "excluded": len(excluded),
            "shards": self.indexes.shards,
            "indexes_left": self.indexes.unread,
            "faults": faults + [f"{stem}.json: {fault}" for stem, fault in sorted(self.indexes.faults.items())],
        }
        return found | {"alerts": precompute_alerts(found)}

    def _is_alive(self, one: WorkerProgress) -> bool:
        """By the worker's clock when it is first heard of; once its file has changed, by ours: clocks differ."""
        now, heard = self._steady(), self._heard.get(one.worker)
        if heard is None:
            self._heard[one.worker] = _Heard(one.updated, max(self._clock() - one.updated, 0.0), now)
        elif heard.updated != one.updated:
            self._heard[one.worker] = _Heard(one.updated, 0.0, now)
        return one.state == "running" and not is_silent(one, self._heard[one.worker].now(now))

    def _newest_stems(self, told: Sequence[str]) -> list[str]:
        """By what came while we looked, what workers tell, and the numbers of rows."""
        arrived = self.indexes.arrived[-8:][::-1]
        return [*dict.fromkeys([*arrived, *told, *self.indexes.last(8)])]

    def _bytes(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        indexes = self.indexes
        each = indexes.tar_bytes / indexes.counted_rows if indexes.counted_rows else None
        free = None
        if isinstance(self.folder, LocalFolder):
            with suppress(OSError):
                free = shutil.disk_usage(self.folder.root).free
        to_come = None if each is None else round(each * max(rows["total"] - rows["published"], 0))
        written = None if each is None else round(each * rows["published"])
        fits = None if free is None or to_come is None else to_come < free
        return {"written": written, "to_come": to_come, "free": free, "fits": fits, "per_row": each}

    def _skipped(self) -> dict[str, Any]:
        reasons = self.indexes.reasons.most_common()
        found = [
            {"reason": reason, "count": count, "rows": [self._pictured(gone) for gone in self.indexes.skipped(reason)]}
            for reason, count in reasons[:20]
        ]
        return {"count": self.indexes.reasons.total(), "of_reasons": len(reasons), "reasons": found}

    def _pictured(self, gone: Skipped) -> dict[str, Any]:
        names: list[str] = []
        if self.pictures is not None:
            self.pictures.want([gone])
            names = self.pictures.names(gone.row)
        return asdict(gone) | {"pictures": names}

    def picture(self, name: str) -> WebFile | None:
        """A picture by the name that the facts give it."""
        found = self.newest.picture(name)
        return found if found is not None or self.pictures is None else self.pictures.picture(name)


def _newest_first(workers: Sequence[WorkerProgress]) -> list[list[str]]:
    """What each worker published last, then what each published before that."""
    latest = sorted(workers, key=lambda one: -one.advanced)
    return [[one.newest[at] for one in latest if at < len(one.newest)] for at in range(4)]


def _runs(workers: Sequence[WorkerProgress]) -> dict[PrecomputeRun, list[WorkerProgress]]:
    found: dict[PrecomputeRun, list[WorkerProgress]] = {}
    for one in workers:
        found.setdefault(one.run, []).append(one)
    return found


def _rows(
    shards: Sequence[Range], workers: Sequence[WorkerProgress], alive: Sequence[WorkerProgress]
) -> dict[str, Any]:
    """Rows in shards or skipped, on their way there, and of how many: of what runs were given, and is there already."""
    published = count_within(shards)
    total = count_within(merged_ranges([*shards, *(one.run.rows for one in workers)]))
    on_the_way = min(sum(one.rows_open for one in alive), total - published)
    source = max((one.run.source_rows for one in workers), default=None)
    return {"done": published + on_the_way, "published": published, "total": total, "source": source}


def _rate(alive: Sequence[WorkerProgress]) -> dict[str, float | None]:
    lately = [one.rate_minute for one in alive if one.rate_minute is not None]
    overall = [one.rate for one in alive if one.rate is not None]
    return {"minute": sum(lately) if lately else None, "overall": sum(overall) if overall else None}


def _left_s(shards: Sequence[Range], alive: Sequence[WorkerProgress]) -> float | None:
    """Until the last of the commands has done its rows; None while one of them does not know its pace."""
    left = []
    for run, workers in _runs(alive).items():
        pace = sum(one.rate_minute or 0.0 for one in workers)
        start, stop = run.rows
        there = sum(max(min(last, stop) - max(first, start), 0) for first, last in shards)
        # Of a run that writes changed rows again, all shards may be there.
        rows = (stop - start - there - sum(one.rows_open for one in workers)) or stop - start - sum(
            one.rows for one in workers
        )
        if pace < LEAST_PACE:
            return None
        left.append(max(rows, 0) / pace)
    return max(left, default=None)


def _state(workers: Sequence[WorkerProgress], alive: Sequence[WorkerProgress]) -> str:
    """running, silent, failed, stopped or finished; idle when no worker has told of itself."""
    if alive:
        return "running"
    if any(one.state == "running" for one in workers):
        return "silent"
    return max(workers, key=lambda one: one.updated).state if workers else "idle"


def _stages(alive: Sequence[WorkerProgress]) -> list[dict[str, Any]]:
    """In their order: the mean share of the time that a worker's stage works, and rows a second of work of all."""
    names = dict.fromkeys([*STAGES, *(name for one in alive for name in one.stages)])
    found = []
    for name in names:
        loads = [one.stages[name] for one in alive if name in one.stages]
        if loads:
            busy = sum(load.busy for load in loads) / len(loads)
            words = STAGES.get(name, name)
            found.append({"name": name, "words": words, "busy": busy, "rate": sum(load.rate for load in loads)})
    return found


def _bottleneck(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    if not stages:
        return None
    busiest = max(stages, key=lambda stage: stage["busy"])
    name, words = busiest["name"], busiest["words"]
    if busiest["busy"] < _BUSY:
        return {"name": name, "words": f"{words}, but none works more than half of the time", "advice": None}
    return {"name": name, "words": words, "advice": _ADVICE.get(name)}


def _worker(one: WorkerProgress, alive: bool, age_s: float, now: float) -> dict[str, Any]:
    state: str = one.state if alive or one.state != "running" else "silent"
    idle_s = max(one.updated - one.advanced, 0.0)  # by its own clock
    if alive and idle_s > STUCK_S and one.rows:
        state = "stuck"
    return {
        "worker": one.worker,
        "host": one.host,
        "pid": one.pid,
        "task": one.task,
        "rows": list(one.run.rows),
        "run": one.run.id,
        "state": state,
        "message": one.message,
        "age_s": age_s,
        "idle_s": idle_s,
        "started": one.started,
        "seconds": max((now if alive else one.updated) - one.started, 0.0),
        "done": one.rows,
        "encoded": one.encoded,
        "reused": one.reused,
        "skipped": sum(one.skipped.values()),
        "waits_for": one.shards_busy,
        "rate": one.rate_minute,
        "bottleneck": one.bottleneck,
        "bytes_written": one.bytes_written,
    }
