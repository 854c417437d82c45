"""Precompute: a range of rows becomes shards. Rows that are published already are not encoded again."""

from qie.precompute.local import Report, precompute
from qie.precompute.ranges import resolve_range

__all__ = ["Report", "precompute", "resolve_range"]
