"""Metrics of models and over clients."""

from flower_ext.evaluation.concordance import concordance_index
from flower_ext.evaluation.fairness import Distribution, summarize

__all__ = ["Distribution", "concordance_index", "summarize"]
