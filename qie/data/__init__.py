"""Data: sources give rows, a plan orders samples, a stream hands out batches. Knows nothing of models."""
