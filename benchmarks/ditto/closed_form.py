"""The closed form of DP-Ditto's Theorem 1 and the line below it: Eqns 16 to 19.

The package finds T* by comparing h(T) for every T and needs neither. Figure 2 draws the line.
"""

import math
from dataclasses import dataclass

from flower_ext.errors import InvalidValue
from flower_ext_planner.convergence import ConvergenceBound


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """h(T) = (h1 + h2 T + h3 T²) ε_L^T + (h4 + h5 T) ε_G^T + h6 T + h7, for Eqns 16 and 18.

    If the rates differ, h3 is 0 and the paper's H₁…H₆ are h1, h2, h4, h5, h6, h7. If they are
    equal, h4 and h5 are 0 and the paper's ℋ₁, ℋ₂, ℋ₃ are h1, h2, h3. Its ℋ₄ is misprinted; its
    proof gives h6 T + h7.
    """

    h1: float
    h2: float
    h3: float
    h4: float
    h5: float
    h6: float
    h7: float


def coefficients(bound: ConvergenceBound) -> Coefficients:
    """Return H₁…H₆ of Eqn 16b, or for equal rates the corrected ℋ₁… of Eqn 18b.

    Raises
    ------
    ValueError
        A rate is not in (0, 1); the sums then have no such form.
    """
    a, b = bound.personal_rate, bound.global_rate
    if not (0 < a < 1 and 0 <= b < 1):
        raise InvalidValue(f"rates {a!r} and {b!r}: expected numbers in (0, 1)")
    limit = bound.residual / (1 - a)
    gap, noise = bound.coupling * bound.initial_gap, bound.coupling * bound.gap_per_planned_round
    slope = noise / ((1 - a) * (1 - b))
    if a == b:
        return Coefficients(
            h1=bound.initial_distance - limit,
            h2=gap / a - slope,
            h3=-noise / (a * (1 - a)),
            h4=0.0,
            h5=0.0,
            h6=slope,
            h7=limit,
        )
    difference = a - b
    return Coefficients(
        h1=bound.initial_distance + gap / difference - limit,
        h2=-noise / ((1 - a) * difference),
        h3=0.0,
        h4=-gap / difference,
        h5=noise / ((1 - b) * difference),
        h6=slope,
        h7=limit,
    )


def line_below(bound: ConvergenceBound) -> tuple[float, float]:
    """Return intercept and slope of a line below h: Eqn 17, and its counterpart for equal rates.

    Eqn 19 as published is no line but tends to a constant, so it limits no search.
    """
    c, a, b = coefficients(bound), bound.personal_rate, bound.global_rate
    least = (
        min(c.h1, 0.0)
        + min(c.h2, 0.0) * _largest_term(a, 1)
        + min(c.h3, 0.0) * _largest_term(a, 2)
        + min(c.h4, 0.0)
        + min(c.h5, 0.0) * _largest_term(b, 1)
    )
    return least + c.h7, c.h6


def search_limit(bound: ConvergenceBound) -> float:
    """Return T′, above which h exceeds h(0). Infinite if noise or coupling is 0, or h diverges."""
    if not (bound.converges and bound.personal_rate > 0):
        return math.inf
    intercept, slope = line_below(bound)
    return (bound.initial_distance - intercept) / slope if slope > 0 else math.inf


def _largest_term(rate: float, power: int) -> float:
    """Return the maximum of T^power rate^T over T >= 0, for a rate below 1."""
    return 0.0 if rate == 0 else float((power / (math.e * -math.log(rate))) ** power)
