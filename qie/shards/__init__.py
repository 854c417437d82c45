"""Shards: how samples are stored, found and read. Knows nothing of models. The norm is docs/format.md."""
