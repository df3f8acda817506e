"""Metrics of models, their spread over clients, and lower bounds on ε from samples."""

from flower_ext.evaluation.concordance import concordance_index
from flower_ext.evaluation.lower_bounds import LowerBound, by_rates, if_gaussian, in_one_run
from flower_ext.evaluation.ranking import average_precision, roc_auc
from flower_ext.evaluation.spread import Distribution, summarize

__all__ = [
    "Distribution",
    "LowerBound",
    "average_precision",
    "by_rates",
    "concordance_index",
    "if_gaussian",
    "in_one_run",
    "roc_auc",
    "summarize",
]
