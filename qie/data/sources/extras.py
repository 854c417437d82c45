"""Libraries that only some sources need."""

from __future__ import annotations

import importlib
from typing import Any

from qie.errors import SourceError


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
