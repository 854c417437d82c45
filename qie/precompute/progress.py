"""What runs tell of themselves in their output folder: a small file of each worker, `progress/<worker>.json`.

Whoever sees the folder sees who works there, how fast, and who has gone silent: `qie watch`, on this machine or another
one. No reader of shards looks into the folder, and nothing depends on it: a worker that cannot write its file works on.
A file is rewritten while its worker lives, so one that no longer changes is that of a worker that was killed.
"""

from __future__ import annotations

import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import FiniteFloat, TypeAdapter, ValidationError

from qie.recipe import canonical_json
from qie.shards.grid import Range
from qie.stores import File, Folder, LocalFolder, MissingError, StoreError

PROGRESS_FOLDER = "progress"
PROGRESS_VERSION = 1

SILENT_BEATS = 5
"""A worker that has missed so many is called silent."""

FORGET_S = 86_400.0
"""What workers that died or failed left is kept so long, unless a later run has taken over their rows."""

_MOST_BYTES = 2**20
_READ_AT_ONCE = 16

WorkerState = Literal["running", "finished", "failed", "stopped"]


@dataclass(frozen=True)
class PrecomputeRun:
    """A command and its rows, which one worker or several encode.

    Attributes:
        id: tells it from every other.
        rows: the half-open range that it was given.
        source_rows: how many its source has.
    """

    id: str
    rows: Range
    source_rows: int

    @classmethod
    def new(cls, rows: Range, source_rows: int) -> PrecomputeRun:
        return cls(secrets.token_hex(6), rows, source_rows)


@dataclass(frozen=True)
class StageLoad:
    """A stage in the last minute: the share of the time that it worked, and its rows per second of work."""

    busy: FiniteFloat
    rate: FiniteFloat


@dataclass(frozen=True)
class WorkerProgress:
    """A worker's file. Times are Unix seconds by the worker's clock; rates are rows per second.

    Attributes:
        worker: its name, that of the file without ending.
        task: number of the task in an array of SLURM, or name of the process among those of a command.
        state, message: how it does; why it failed, a line.
        interval_s: seconds to the next writing.
        advanced: when it had last done a row.
        rows: done by this worker: published by now, or before; or skipped.
        rows_open: those of them whose shard is not yet published.
        skipped: by reason; the rarest are left out if there are very many.
        rate_minute, rate: since it began to encode, in the last minute and overall; None before that.
        bytes_per_row: of the shards that it has written; None before the first.
        newest: names of the shards that it published last, the newest first.
    """

    format_version: int
    worker: str
    host: str
    pid: int
    task: str | None
    run: PrecomputeRun
    state: WorkerState
    message: str | None
    started: FiniteFloat
    updated: FiniteFloat
    interval_s: FiniteFloat
    advanced: FiniteFloat
    rows: int
    rows_open: int
    encoded: int
    reused: int
    skipped: dict[str, int]
    rate_minute: FiniteFloat | None
    rate: FiniteFloat | None
    shards_written: int
    shards_kept: int
    shards_busy: int
    bytes_written: int
    bytes_per_row: FiniteFloat | None
    stages: dict[str, StageLoad]
    bottleneck: str | None
    newest: list[str] = field(default_factory=list)


_WORKER = TypeAdapter(WorkerProgress)


def progress_folder(output: Folder) -> Folder:
    return output.child(PROGRESS_FOLDER)


def parsed_progress(content: bytes) -> WorkerProgress | None:
    """What a file says; None of one that no qie of this version wrote."""
    try:
        found = _WORKER.validate_json(content)
    except ValidationError:
        return None
    return found if found.format_version == PROGRESS_VERSION else None


def write_progress(output: Folder, one: WorkerProgress) -> None:
    """Write a worker's file. Raises StoreError."""
    progress_folder(output).write(f"{one.worker}.json", canonical_json(asdict(one)).encode("utf-8", "replace"))


def read_progress(output: Folder) -> list[WorkerProgress]:
    """What the workers of a folder say, by name. Raises StoreError where it cannot be read, or not be listed."""
    folder = progress_folder(output)
    files = [File(folder, name) for name in folder.listing() if name.endswith(".json")]
    if isinstance(folder, LocalFolder):
        found = [read_worker(file) for file in files]
    else:
        with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
            found = list(pool.map(read_worker, files))
    return [one for one in found if one is not None]


def read_worker(file: File) -> WorkerProgress | None:
    """What a worker's file says; None where it was removed since, and of what is no such file. Raises StoreError."""
    try:
        one = parsed_progress(file.read(most=_MOST_BYTES))
    except MissingError:
        return None
    return one if one is not None and f"{one.worker}.json" == file.name else None


def is_silent(one: WorkerProgress, age_s: float) -> bool:
    """Whether a worker that should be at work was last heard of too long ago."""
    return one.state == "running" and age_s > SILENT_BEATS * one.interval_s


def forget_others(output: Folder, run: PrecomputeRun) -> None:
    """Remove the files of workers that have finished, and of dead ones that are old or whose rows `run` takes over.

    A worker that was taken for dead because of its clock writes its file again.
    """
    now = time.time()
    for one in read_progress(output):
        age_s = now - one.updated
        dead = one.state in ("failed", "stopped") or is_silent(one, age_s)
        taken_over = one.run.rows[0] < run.rows[1] and run.rows[0] < one.run.rows[1]
        if one.run.id != run.id and (one.state == "finished" or (dead and (taken_over or age_s > FORGET_S))):
            progress_folder(output).delete(f"{one.worker}.json")
    folder = progress_folder(output)
    if isinstance(folder, LocalFolder):
        _remove_old_partials(folder.root, now)


def withdraw(output: Folder, run: PrecomputeRun) -> None:
    """Remove the files of a run that had nothing to do, as far as that is possible."""
    folder = progress_folder(output)
    with suppress(StoreError):
        for one in read_progress(output):
            if one.run.id == run.id:
                folder.delete(f"{one.worker}.json")
    if isinstance(folder, LocalFolder):
        with suppress(OSError):  # others have files there
            folder.root.rmdir()


def _remove_old_partials(folder: Path, now: float) -> None:
    """What workers left that were killed in the midst of writing."""
    for partial in folder.glob("*.json.partial"):
        with suppress(FileNotFoundError):
            if now - partial.lstat().st_mtime > FORGET_S:
                partial.unlink()
