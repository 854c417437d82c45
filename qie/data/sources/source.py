"""What a source is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from qie.types import Row


class Source(Protocol):
    """Rows by index. The order is fixed: the same source opened anywhere gives the same row for an index.

    Opening reads no image. Sources can be sent to other processes and read by many threads at once. A mixture also has
    `part`, see `part_of`.
    """

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """What the owner calls the row, known without reading its images. For messages: it may not be unique."""

    def read(self, index: int) -> Row:
        """The row with its bytes.

        Raises:
            RowError: something of the row is missing or cannot be read.
            SourceError: the source is not what it was when it was opened.
            StoreError: a store cannot be reached or refuses, which is not the row's fault.
        """


def part_of(source: Source, index: int) -> str:
    """The name of the row's source in a mixture; "" for a source alone."""
    part: Callable[[int], str] | None = getattr(source, "part", None)
    return part(index) if part else ""
