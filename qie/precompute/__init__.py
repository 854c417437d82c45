"""Precompute: a range of rows becomes shards. Rows that are published already are not encoded again."""

from qie.precompute.local import precompute
from qie.precompute.ranges import resolve_part, resolve_range
from qie.precompute.report import Report
from qie.precompute.work import Settings

__all__ = ["Report", "Settings", "precompute", "resolve_part", "resolve_range"]
