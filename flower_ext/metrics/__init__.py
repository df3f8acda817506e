"""Metrics of models, their spread over clients, and lower bounds on ε from samples."""

from flower_ext.metrics.lower_bounds import BoundTerms, LowerBound, by_rates, if_gaussian
from flower_ext.metrics.one_run import (
    gaussian_curve,
    in_one_run,
    in_one_run_by_curve,
    profile_curve,
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
    "gaussian_curve",
    "if_gaussian",
    "in_one_run",
    "in_one_run_by_curve",
    "profile_curve",
    "roc_auc",
    "summarize",
]
