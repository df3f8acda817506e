"""Scores of many clients: how a score varies over clients, and how many clients report it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flower_ext.errors import InvalidValue


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Summary of one value per client.

    ``worst_decile`` is the mean of the worst tenth of the values (at least one value). ``jain`` is
    Jain's index (Σx)² / (n Σx²): 1 if all values are equal, 1/n if only one value is not 0.
    """

    mean: float
    std: float
    variance: float
    worst_decile: float
    jain: float


def summarize(values: Sequence[float], *, lower_is_better: bool = False) -> Spread:
    """Summarise one value per client. Set ``lower_is_better`` for losses.

    Raises
    ------
    ValueError
        There is no value, or a value is not finite.
    """
    array = np.sort(np.asarray(values, dtype=np.float64))
    if array.size == 0 or not np.isfinite(array).all():
        raise InvalidValue(f"{array.size} values: expected at least one, and all of them finite")
    squares = float(np.sum(array**2))
    worst = array[::-1] if lower_is_better else array
    return Spread(
        mean=float(array.mean()),
        std=float(array.std()),
        variance=float(array.var()),
        worst_decile=float(worst[: math.ceil(array.size / 10)].mean()),
        jain=1.0 if squares == 0 else float(array.sum() ** 2 / (array.size * squares)),
    )


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
