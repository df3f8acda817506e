"""Metrics over clients."""

from flower_ext.evaluation.fairness import Distribution, summarize

__all__ = ["Distribution", "summarize"]
