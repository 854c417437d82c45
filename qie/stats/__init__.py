"""What shards hold, why rows are not in them, and what an epoch over them would be: all from their indexes."""

from qie.stats.explain import Explanation, explain_rows
from qie.stats.planning import EpochPlan, preview_epoch
from qie.stats.summary import Coverage, Range, Summary, merged, one_line, summarise

__all__ = [
    "Coverage",
    "EpochPlan",
    "Explanation",
    "Range",
    "Summary",
    "explain_rows",
    "merged",
    "one_line",
    "preview_epoch",
    "summarise",
]
