"""Metrics of models and over clients."""

from flower_ext.evaluation.concordance import concordance_index
from flower_ext.evaluation.fairness import Distribution, summarize
from flower_ext.evaluation.ranking import average_precision, roc_auc

__all__ = ["Distribution", "average_precision", "concordance_index", "roc_auc", "summarize"]
