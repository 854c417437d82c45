"""Training: the transformer learns from batches. Never loads an encoder."""
