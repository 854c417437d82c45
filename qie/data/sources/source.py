"""The protocol of sources, and the libraries that only some sources need."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

from qie.errors import SourceError
from qie.types import Row

TEXT_TO_IMAGE = "; rows without controls are text-to-image, which Qwen-Image-2.1 alone is trained for"
"""For hints, where controls are missing."""


class Source(Protocol):
    """Rows by index. The order is fixed: the same source opened anywhere gives the same row for an index.

    Opening reads no image. Sources can be sent to other processes and read by many threads at once. A mixture also has
    `part`, see `source_name`.
    """

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """The owner's name of the row, read without its images. For messages: it need not be unique."""

    def read(self, index: int) -> Row:
        """The row with its bytes.

        Raises:
            RowError: a part of the row is missing or cannot be read.
            SourceError: the source has changed since it was opened.
            StoreError: a store cannot be reached or refuses, which is not the row's fault.
        """


def source_name(source: Source, index: int) -> str:
    """The name of the row's source in a mixture; "" for a source alone."""
    part: Callable[[int], str] | None = getattr(source, "part", None)
    return part(index) if part else ""


def source_notes(source: Source) -> list[str]:
    """What a user should know of an opened source, such as which of several splits was taken."""
    return list(getattr(source, "notes", ()))


def library(name: str) -> Any:
    """`datasets` or a module of pyarrow. Raises SourceError with what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SourceError(
            f"this source needs {name.partition('.')[0]}, which cannot be imported",
            found=str(error),
            hint='pip install "qie[datasets]"',
        ) from error
