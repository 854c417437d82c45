"""Data: sources give rows, a plan orders samples, a stream yields batches. This package knows nothing of models."""
