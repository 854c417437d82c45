"""Data: sources give rows, a plan orders samples, a stream hands out batches. Knows nothing of models."""

from qie.data.door import open_stream

__all__ = ["open_stream"]
