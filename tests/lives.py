"""Runs of precompute as real processes, which may die at a chosen moment. Run as a script, it forks them.

A line that it reads is JSON: directory, family of models, how many events a run may live to see, ranges of rows with a
shard size, for each of which a run is started at once, and rows that the source has lost: then runs prune. It prints
their wait statuses and the rows that they encoded. An event is a moment at which something can be half done: a row
about to be encoded, and every call that opens, syncs, renames, removes, links or appends to a file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Sequence
from pathlib import Path

ROWS, SHARD_SIZE = 240, 4


class Lives:
    """Starts runs; see `live`."""

    def __enter__(self) -> Lives:
        self._warden = subprocess.Popen(
            [sys.executable, "-m", "tests.lives"],
            cwd=Path(__file__).resolve().parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._warden.communicate(timeout=200)

    def live(
        self,
        directory: Path,
        events: int = 1 << 60,
        ranges: Sequence[tuple[int, int]] = ((0, ROWS),),
        sizes: Sequence[int] = (SHARD_SIZE,),
        family: str = "edit",
        lost: Sequence[int] = (),
    ) -> tuple[bool, list[int]]:
        """Whether a run was killed, and which rows they encoded. The ranges take turns with shard `sizes`. With rows
        that are `lost` and renumbered, runs prune."""
        assert self._warden.stdin and self._warden.stdout
        runs = [(*rows, sizes[number % len(sizes)]) for number, rows in enumerate(ranges)]
        self._warden.stdin.write(json.dumps([str(directory), family, events, runs, list(lost)]) + "\n")
        self._warden.stdin.flush()
        statuses, encoded = json.loads(self._warden.stdout.readline())
        assert set(statuses) <= {0, signal.SIGKILL}, statuses
        return any(statuses), encoded


def _mortal(events: int, *, prunes: bool) -> None:
    lock = threading.Lock()
    left = [events]

    def count() -> None:
        with lock:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def counted(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def dying(*arguments: object, **named: object) -> object:
            count()
            return original(*arguments, **named)

        setattr(owner, name, dying)

    for owner, name in (
        (os, "fsync"),
        (os, "link"),
        (os, "open"),
        (Path, "replace"),
        (Path, "unlink"),
        (Path, "open"),
        (tarfile.TarFile, "addfile"),
    ):
        counted(owner, name)
    if prunes:
        counted(os, "unlink")  # of the folder of links; elsewhere it is what `Path.unlink` calls
    from tests.stubs import StubEncoder

    counted(StubEncoder, "encode")


def _run(
    directory: Path, family: str, events: int, rows: tuple[int, int], shard_size: int, report: int, lost: list[int]
) -> None:
    from qie.precompute import precompute
    from tests.stubs import RECIPES, StubEncoder, StubSource, without

    class Telling(StubEncoder):
        def encode(self, row):  # type: ignore[no-untyped-def]
            sample = super().encode(row)
            os.write(report, f"{row.index}\n".encode())
            return sample

    source = without(StubSource.of(rows[1] + len(lost)), lost) if lost else StubSource.of(ROWS)
    _mortal(events, prunes=bool(lost))
    encoder = Telling(RECIPES[family])
    precompute(source, encoder, directory, rows=rows, shard_size=shard_size, prune=bool(lost))


def main() -> None:
    import qie.precompute  # noqa: F401 - once, not in each child
    import tests.stubs  # noqa: F401

    for line in sys.stdin:
        directory, family, events, runs, lost = json.loads(line)
        reader, writer = os.pipe()
        children = []
        for first, last, shard_size in runs:
            children.append(os.fork())
            if children[-1] == 0:
                os.close(reader)
                _run(Path(directory), family, events, (first, last), shard_size, writer, lost)
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as told:
            encoded = [int(row) for row in told]
        statuses = [os.waitpid(child, 0)[1] for child in children]
        sys.stdout.write(json.dumps([statuses, encoded]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
