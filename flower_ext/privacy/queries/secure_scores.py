"""Scores of an evaluation as one noised sum over clients.

For an evaluation with k scores, each client sends a vector (1, x₁, …, x_k), where x_j is its j-th
score, clipped to public bounds and mapped from [low, high] to [−½, ½]. A client without test
examples sends a vector of zeros. One client's vector therefore has a norm of at most √(1 + k/4).
The run releases the sum over all clients with Gaussian noise. The mean of a score is the ratio of
two numbers of this sum. The number of scored clients carries noise too, because it reveals which
clients have test examples.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flower_ext.checks import is_number
from flower_ext.errors import InvalidValue
from flower_ext.privacy.queries.vector_query import LocalView, VectorQuery

Bounds = tuple[tuple[str, float, float], ...]
"""Names of scores, each with its smallest and its largest value."""
ACCURACY: Bounds = (("accuracy", 0.0, 1.0),)


@dataclass(frozen=True, kw_only=True)
class SecureScores(VectorQuery):
    """A query for clients' mean scores, which each evaluation of a run releases.

    Parameters
    ----------
    noise_multiplier : float
        Standard deviation of the noise on the sum, divided by the norm bound of a client's vector.
    times : int
        Planned number of evaluations.
    bounds : tuple of (str, float, float)
        Names of scores, each with its smallest and its largest value. The client clips values
        outside this range. A missing score counts as the middle of its range, but a client without
        any score does not count. Scores that are not named here stay on the clients. A loss has no
        natural bound, so choose one, such as ``("loss", 0.0, 4.0)``.

    Raises
    ------
    InvalidValue
        ``noise_multiplier`` or ``times`` is not above 0; ``bounds`` is empty or has a name twice;
        or a largest value is not above the smallest.
    """

    name = "scores"
    schedule = "in evaluations"

    bounds: Bounds = ACCURACY

    def __post_init__(self) -> None:
        super().__post_init__()
        # Messages turn tuples into lists.
        object.__setattr__(self, "bounds", tuple((str(n), lo, hi) for n, lo, hi in self.bounds))
        names = [name for name, *_ in self.bounds]
        if not names or len({*names}) < len(names):
            raise InvalidValue(
                f"bounds={self.bounds!r}: expected one or more scores, each name once"
            )
        for name, low, high in self.bounds:
            numbers = is_number(low) and is_number(high)
            if not (numbers and -math.inf < low < high < math.inf):
                raise InvalidValue(
                    f"bounds of {name!r}: expected two finite numbers, the second above the first; "
                    f"found {low!r} and {high!r}"
                )

    @property
    def size(self) -> int:
        """Number of elements of a client's vector: 1 + k for k scores."""
        return 1 + len(self.bounds)

    @property
    def norm(self) -> float:
        """Largest norm of one client's vector: √(1 + k/4) for k scores."""
        return math.sqrt(1 + len(self.bounds) / 4)

    def vector(self, client: LocalView) -> NDArray[np.float64]:
        """Return the number 1, which counts the client, and k scores, each mapped to [−½, ½].

        A client without any scores sends zeros.
        """
        names = {name for name, *_ in self.bounds}
        scores = client.scores(training="training_loss" in names)
        if not scores:
            return np.zeros(self.size)
        parts = [1.0]
        # Centring scores on 0 halves their norm, and with it the noise.
        for name, low, high in self.bounds:
            middle = (low + high) / 2
            value = scores.get(name, middle)
            value = middle if math.isnan(value) else min(max(value, low), high)
            parts.append((value - middle) / (high - low))
        return np.asarray(parts)

    def answer(self, total: NDArray[np.float64], stddev: float) -> dict[str, float]:
        """Return the means of the scores, each with its standard error due to noise.

        The result has ``…_mean`` and ``…_mean_error`` for each score, and ``scored_clients``, the
        noised number of clients. If this number is below 1, the result is empty, because the means
        would be meaningless. Noise may move a mean beyond its bounds. Each error is a first-order
        estimate, which is valid if the number of clients is several times ``stddev``.
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
