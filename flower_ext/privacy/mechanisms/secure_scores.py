"""Scores of an evaluation as one noised sum over clients.

For an evaluation with k scores, each client has a vector (1, x₁, …, x_k), where x_j is its j-th
score, clipped to public bounds and mapped from [low, high] to [−½, ½]. A client without test
examples has a vector of zeros. One client's vector therefore has a norm of at most √(1 + k/4). The
sum over all clients is released with Gaussian noise, and the mean of a score is the ratio of two of
its numbers. The count carries noise too, because it reveals which clients have test examples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flower_ext.checks import is_number, require_at_least_one, require_positive
from flower_ext.errors import InvalidValue

Bounds = tuple[tuple[str, float, float], ...]
"""Names of scores, each with its smallest and its largest value."""
ACCURACY: Bounds = (("accuracy", 0.0, 1.0),)


@dataclass(frozen=True, kw_only=True)
class SecureScores:
    """Settings with which a run's evaluations release mean scores over all clients.

    Parameters
    ----------
    noise_multiplier : float
        Standard deviation of the noise on the sum, divided by the norm bound of a client's vector.
    evaluations : int
        Planned number of evaluations.
    bounds : tuple of (str, float, float)
        Names of scores, each with its smallest and its largest value. Values outside are clipped. A
        score that a client cannot compute counts as the middle. Scores that are not named here stay
        on the clients. A loss has no natural bound, so choose one, such as ``("loss", 0.0, 4.0)``.

    Raises
    ------
    InvalidValue
        Noise or evaluations are not above 0; there are no bounds; a name occurs twice; or a largest
        value is not above the smallest.
    """

    noise_multiplier: float
    evaluations: int
    bounds: Bounds = ACCURACY

    def __post_init__(self) -> None:
        require_positive("noise_multiplier", self.noise_multiplier)
        require_at_least_one("evaluations", self.evaluations)
        names = [name for name, *_ in self.bounds]
        if not names or len({*names}) < len(names):
            raise InvalidValue(f"bounds={self.bounds!r}: expected one or more scores, each once")
        for name, low, high in self.bounds:
            numbers = is_number(low) and is_number(high)
            if not (numbers and -math.inf < low < high < math.inf):
                raise InvalidValue(
                    f"bounds of {name!r}: expected two finite numbers, the second above the first; "
                    f"found {low!r} and {high!r}"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the scores."""
        return tuple(name for name, *_ in self.bounds)

    @property
    def norm(self) -> float:
        """Norm bound of one client's vector: √(1 + k/4)."""
        return math.sqrt(1 + len(self.bounds) / 4)

    def means(self, total: np.ndarray, stddev: float) -> dict[str, float]:
        """Return the means of the scores, each with its standard error due to noise.

        Parameters
        ----------
        total : ndarray
            The noised sum of 1 + k numbers.
        stddev : float
            Standard deviation of the noise on each of them.

        Returns
        -------
        dict[str, float]
            ``…_mean`` and ``…_mean_error`` by score, and the noised number of ``scored_clients``.
            The error is the standard error of the ratio to first order. It is valid if the count is
            several ``stddev``. Noise may move a mean beyond its bounds. The result is empty if the
            count is below 1, because the means would then be meaningless.
        """
        count = float(total[0])
        if count < 1:
            return {}
        means = {"scored_clients": count}
        for (name, low, high), value in zip(self.bounds, total[1:], strict=True):
            centred = float(value) / count
            means[f"{name}_mean"] = (low + high) / 2 + (high - low) * centred
            error = stddev / count * math.sqrt(1 + centred**2)
            means[f"{name}_mean_error"] = (high - low) * error
        return means

    def describe(self) -> str:
        """Return one line for the log."""
        return f"scores in secure sums, noise multiplier {self.noise_multiplier:.4g}"


def scores_vector(scores: Mapping[str, float], bounds: Bounds) -> np.ndarray:
    """Return the vector by which one client takes part in the sum of scores.

    Its 1 + k numbers are a one, which counts the client, and k scores, each scaled to the range
    from −½ to ½. A client without any scores takes part with zeros.
    """
    if not scores:
        return np.zeros(1 + len(bounds))
    parts = [1.0]
    for name, low, high in bounds:
        middle = (low + high) / 2
        value = scores.get(name, middle)
        value = middle if math.isnan(value) else min(max(value, low), high)
        parts.append((value - middle) / (high - low))
    return np.asarray(parts)
