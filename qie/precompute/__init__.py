"""Precompute: a range of rows becomes shards. Published rows are not encoded again."""

from qie.precompute.counts import Report
from qie.precompute.engine import Settings
from qie.precompute.local import precompute
from qie.precompute.ranges import resolve_part, resolve_range

__all__ = ["Report", "Settings", "precompute", "resolve_part", "resolve_range"]
