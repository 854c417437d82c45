"""Facts about shards, all from their indexes: their content, why a row is not in them, and a preview of an epoch."""

from qie.stats.epoch_preview import EpochPlan, preview_epoch
from qie.stats.explain import Explanation, explain_rows
from qie.stats.summary import Coverage, Summary, one_line, summarise

__all__ = [
    "Coverage",
    "EpochPlan",
    "Explanation",
    "Summary",
    "explain_rows",
    "one_line",
    "preview_epoch",
    "summarise",
]
