"""Scores of models among clients' metrics, and the direction in which each is better."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping


def reported_by_most(by_client: Iterable[Mapping[str, float]]) -> set[str]:
    """Return the metrics that more than half of the clients report; rarer names are ignored."""
    everyone = list(by_client)
    reported = Counter(name for metrics in everyone for name in metrics)
    return {name for name, count in reported.items() if 2 * count > len(everyone)}


def lower_is_better(metric: str) -> bool:
    """Return True for a metric that is a loss."""
    return metric.endswith("loss")
