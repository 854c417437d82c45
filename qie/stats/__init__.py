"""Facts about shards, all from their indexes: their content, why a row is not in them, and a preview of an epoch."""

from qie.stats.epoch_preview import EpochPlan, preview_epoch
from qie.stats.exclusion import Exclusion, change_excluded
from qie.stats.explain import Explanation, explain_rows
from qie.stats.pairs import KINDS, Pairs, PairWarning, warning_of
from qie.stats.summary import Coverage, Summary, excluded_in, summarise

__all__ = [
    "KINDS",
    "Coverage",
    "EpochPlan",
    "Exclusion",
    "Explanation",
    "PairWarning",
    "Pairs",
    "Summary",
    "change_excluded",
    "excluded_in",
    "explain_rows",
    "preview_epoch",
    "summarise",
    "warning_of",
]
