"""What clients' metrics are scores of their models, and which way each is good."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping


def reported_by_most(by_client: Iterable[Mapping[str, float]]) -> set[str]:
    """Metrics that more than half of the clients report; the others have no say in what is one."""
    everyone = list(by_client)
    reported = Counter(name for metrics in everyone for name in metrics)
    return {name for name, count in reported.items() if 2 * count > len(everyone)}


def lower_is_better(metric: str) -> bool:
    """Whether a metric is a loss."""
    return metric.endswith("loss")
