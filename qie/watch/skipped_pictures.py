"""Pictures of rows that were skipped, from their source: what of them can be read and decoded."""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from qie.data.sources import Source
from qie.encode.images import decode_image
from qie.errors import QieError
from qie.html_report.gallery import SmallPicture
from qie.shards.index import Skipped
from qie.watch.live_page import WebFile

MOST = 120
"""So many rows are tried: a source may be far away."""
AT_ONCE = 4
"""So many are read for a look at most: the end of the process waits for them."""

_PICTURE = re.compile(r"row-(\d{1,12})-(\d{1,2})\.jpg")


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="qie-skipped")


@dataclass
class SkippedPictures:
    """Reads rows of a source in a thread of its own; no page waits for one.

    Attributes:
        source: of the rows.
    """

    source: Source
    _tried: set[int] = field(default_factory=set)
    _found: dict[int, list[bytes]] = field(default_factory=dict)
    _running: list[Future[None]] = field(default_factory=list)
    _pool: ThreadPoolExecutor = field(default_factory=_pool)

    def want(self, rows: Iterable[Skipped]) -> None:
        """Read some rows, later; of many, the first: whoever asks again gets the others."""
        for gone in rows:
            self._running = [one for one in self._running if not one.done()]
            if gone.row not in self._tried and len(self._tried) < MOST and len(self._running) < AT_ONCE:
                self._tried.add(gone.row)
                self._running.append(self._pool.submit(self._read, gone))

    def wait(self) -> None:
        """Return when the rows that are being read were read, and no thread is left."""
        self._pool.shutdown()
        self._pool = _pool()

    def names(self, row: int) -> list[str]:
        """The names of the pictures of a row that there are by now: its controls', then its target's."""
        return [f"row-{row}-{number}.jpg" for number, _ in enumerate(self._found.get(row, ()))]

    def picture(self, name: str) -> WebFile | None:
        """A picture by such a name."""
        match = _PICTURE.fullmatch(name)
        jpegs = self._found.get(int(match[1]), []) if match else []
        number = int(match[2]) if match else 0
        return WebFile(jpegs[number], "image/jpeg") if number < len(jpegs) else None

    def _read(self, gone: Skipped) -> None:
        try:
            # The source may have other rows by now, or another source the shards of another folder.
            if gone.row >= len(self.source) or self.source.name(gone.row) != gone.name:
                return
            row = self.source.read(gone.row)
        except (QieError, OSError):
            return
        jpegs = [jpeg for content in (*row.controls, row.target) if (jpeg := _small(content)) is not None]
        if jpegs:
            self._found[gone.row] = jpegs


def _small(content: bytes) -> bytes | None:
    try:
        return SmallPicture.of(decode_image(content, "a skipped row", "white")).jpeg
    except (QieError, OSError, ValueError):
        return None
