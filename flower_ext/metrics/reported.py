"""The metrics that clients report: how many clients report each, and which ones are losses."""

from collections import Counter
from collections.abc import Iterable, Mapping


def reported_by_most(by_client: Iterable[Mapping[str, float]]) -> set[str]:
    """Return the metrics that more than half of the clients report."""
    everyone = list(by_client)
    return set().union(*everyone) - reported_by_few(everyone).keys()


def reported_by_few(by_client: Iterable[Mapping[str, float]]) -> dict[str, int]:
    """Return, for each metric that at most half of the clients report, how many clients report it.

    The metric that most clients report comes first. A client leaves out a score that failed or that
    is not finite.
    """
    everyone = list(by_client)
    reported = Counter(name for metrics in everyone for name in sorted(metrics))
    few = len(everyone) // 2
    return {name: count for name, count in reported.most_common() if count <= few}


def is_loss(metric: str) -> bool:
    """Return True for a metric that is better when lower."""
    return metric.endswith("loss")
