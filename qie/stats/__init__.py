"""What shards hold, why rows are not in them, and what an epoch over them would be: all from their indexes."""

from qie.stats.explain import Explanation, explain_rows
from qie.stats.planning import EpochPlan, plan_shards
from qie.stats.reading import summarise
from qie.stats.summary import Coverage, Summary

__all__ = ["Coverage", "EpochPlan", "Explanation", "Summary", "explain_rows", "plan_shards", "summarise"]
