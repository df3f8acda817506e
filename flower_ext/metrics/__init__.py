"""Metrics of models, their spread over clients, and lower bounds on ε from samples."""

from flower_ext.metrics.lower_bounds import (
    BoundTerms,
    LowerBound,
    by_rates,
    if_gaussian,
    in_one_run,
)
from flower_ext.metrics.ranking import average_precision, concordance_index, roc_auc
from flower_ext.metrics.spread import Spread, summarize

__all__ = [
    "BoundTerms",
    "LowerBound",
    "Spread",
    "average_precision",
    "by_rates",
    "concordance_index",
    "if_gaussian",
    "in_one_run",
    "roc_auc",
    "summarize",
]
