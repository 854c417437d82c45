"""Encoding rows into shards in the background, for a process that trains on them as they come."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from qie.data.live import RowEncoder
from qie.data.sources import Source
from qie.errors import QieError
from qie.precompute.counts import Report
from qie.precompute.engine import Settings
from qie.precompute.local import precompute


@dataclass(eq=False)
class BackgroundWriter:
    """Encodes and writes the rows of a source in a thread, until all are written or it is stopped.

    Attributes:
        source, encoder: the rows, and what encodes them.
        folder: where shards are written.
        settings: see `precompute`.
        rows: how many rows of the source are in shards and are what they are now.
    """

    source: Source
    encoder: RowEncoder
    folder: str
    settings: Settings
    rows: int = 0
    _failures: list[BaseException] = field(default_factory=list)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._write, name="qie-write-through", daemon=True)
        self._thread.start()

    def alive(self) -> None:
        """Raise what ended the writer, if it failed."""
        if self._failures:
            raise self._failures[0]

    def stop(self) -> None:
        """Return when it has stopped, at the latest after the rows that are being encoded."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _write(self) -> None:
        rows = (0, len(self.source))
        try:
            precompute(self.source, self.encoder, self.folder, rows=rows, settings=self.settings, progress=self._count)
        except BaseException as error:  # raised by whoever waits for shards
            self._failures.append(error)

    def _count(self, report: Report) -> None:
        self.rows = report.rows
        if self._stopped.is_set():
            raise QieError("the writer was stopped", where=self.folder)
