"""Shards: how samples are stored, found and read. This package knows nothing of models. docs/format.md is the norm."""
