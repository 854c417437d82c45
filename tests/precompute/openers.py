"""What worker processes of tests open: sources and encoders that die, fail or wait, by name and plain arguments."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from qie.errors import RowError
from qie.types import Row, Sample
from tests.stubs import RECIPE, StubEncoder, StubSource


def rows(count: int) -> StubSource:
    """Some of them cannot be encoded."""
    return StubSource.of(count).changed(7, target=b"broken").changed(20, target=b"missing")


def plain(count: int) -> tuple[StubSource, StubEncoder]:
    return rows(count), StubEncoder()


def noting(count: int, notes: str) -> tuple[StubSource, StubEncoder]:
    """Appends a line with process and row for each row that is encoded."""
    return rows(count), Noting(Path(notes))


def chatty(count: int) -> tuple[StubSource, StubEncoder]:
    """Reports after every row."""
    import qie.precompute.local

    qie.precompute.local.REPORT_EVERY_S = 0
    return plain(count)


def dying(count: int, row: int, once: str, notes: str, progress: str = "") -> tuple[StubSource, StubEncoder]:
    """Kills itself with -9 before it encodes `row`, unless the file `once` says that this happened already; with a
    folder of progress, when it has told of itself there."""
    import qie.precompute.heartbeat

    if progress:
        qie.precompute.heartbeat.FIRST_BEAT_S = 0
    return rows(count), Dying(row, Path(once), Path(notes), Path(progress) if progress else None)


def dying_when_it_has_asked(count: int) -> tuple[StubSource, StubEncoder]:
    """Kills itself as soon as it has asked for its third shard."""
    from multiprocessing.connection import Connection

    send, asked = Connection.send, 0

    def then_dies(self: Connection, message: object) -> None:
        nonlocal asked
        send(self, message)
        asked += message is None
        if asked == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    Connection.send = then_dies  # type: ignore[method-assign]
    return plain(count)


def of_another_recipe(count: int) -> tuple[StubSource, StubEncoder]:
    return rows(count), StubEncoder(replace(RECIPE, vae_dtype="bfloat16"))


def refusing(count: int, row: int) -> tuple[StubSource, StubEncoder]:
    return StubSource.of(count), Refusing(row)


def crashing(count: int) -> tuple[StubSource, StubEncoder]:
    raise ZeroDivisionError("not foreseen")


class Noting(StubEncoder):
    def __init__(self, notes: Path) -> None:
        super().__init__()
        self.notes = notes

    def encode(self, row: Row) -> Sample:
        sample = super().encode(row)
        with self.notes.open("a") as file:
            file.write(f"{os.getpid()} {row.index}\n")
        return sample


class Dying(Noting):
    def __init__(self, row: int, once: Path, notes: Path, progress: Path | None = None) -> None:
        super().__init__(notes)
        self.row, self.once, self.progress = row, once, progress

    def encode(self, row: Row) -> Sample:
        if row.index == self.row:
            try:
                os.close(os.open(self.once, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                if self.progress is not None:
                    until(lambda: any(f"-{os.getpid()}-" in name for name in map(str, self.progress.glob("*.json"))))
                os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(row)


class Refusing(StubEncoder):
    def __init__(self, row: int) -> None:
        super().__init__()
        self.row = row

    def encode(self, row: Row) -> Sample:
        if row.index == self.row:
            raise RowError("it is not wanted", expected="another", found=self.row)
        return super().encode(row)


def elastic(count: int, folder: str) -> tuple[StubSource, StubEncoder]:
    """Two workers of equal speed. Appends its node to `opened`. The first waits at row 42 until the second is there;
    then none gets more than four rows ahead of the other; together they wait after a hundred until there is a file
    `told`."""
    with (Path(folder) / "opened").open("a") as file:
        first = file.tell() == 0
        file.write("first\n" if first else "late\n")
    if not first:
        (Path(folder) / "late").touch()
    return rows(count), Elastic(Path(folder), first)


class Elastic(StubEncoder):
    def __init__(self, folder: Path, first: bool) -> None:
        super().__init__()
        self.folder, self.first = folder, first
        self.mine, self.other = (folder / name for name in (("first", "late") if first else ("late", "first")))

    def encode(self, row: Row) -> Sample:
        if self.first and row.index == 42:
            until((self.folder / "late").exists)
        if (self.folder / "late").exists():
            until(self.may_go_on)
            with self.mine.open("a") as file:
                file.write(".")
        return super().encode(row)

    def may_go_on(self) -> bool:
        if (self.folder / "told").exists():
            return True
        mine, others = size(self.mine), size(self.other)
        return mine - others < 4 and mine + others < 100


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def until(holds: Callable[[], bool], most_s: float = 120) -> None:
    """Wait until something in another process has happened."""
    for _ in range(int(most_s * 100)):
        if holds():
            return
        threading.Event().wait(0.01)
    raise RuntimeError(f"nothing happened in {most_s} s")


def waiting_at(count: int, row: int) -> tuple[StubSource, StubEncoder]:
    """From `row` on, waits until it is killed."""
    return rows(count), Waiting(row)


class Waiting(StubEncoder):
    def __init__(self, row: int) -> None:
        super().__init__()
        self.row = row

    def encode(self, row: Row) -> Sample:
        if row.index >= self.row:
            until(lambda: False)
        return super().encode(row)


def asking(count: int, stopping: str, marker: str) -> tuple[StubSource, StubEncoder]:
    """Reports after every row. Makes the file `marker` when it waits for a shard while there is a file `stopping`."""
    from multiprocessing.connection import Connection

    receive = Connection.recv

    def noted_receive(self: Connection) -> object:
        while not self.poll(0.01):
            if Path(stopping).exists():
                Path(marker).touch()
        return receive(self)

    Connection.recv = noted_receive  # type: ignore[method-assign]
    return chatty(count)
