"""Metrics of models, and their spread over clients."""

from flower_ext.metrics.ranking import average_precision, roc_auc
from flower_ext.metrics.spread import Spread, summarize

__all__ = ["Spread", "average_precision", "roc_auc", "summarize"]
