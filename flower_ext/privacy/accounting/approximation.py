"""Extra privacy cost of sums that differ a little from the accountant's sampled Gaussians.

A protocol that computes sums under encryption changes each sum a little. Units that were not drawn
may also move a sum a little; this is their trace. `with_approximation_error` adds the cost of both
to the accountant's loss. The proof goes from the run with a unit to the run without it, in four
steps. Step 2 is the accountant's. In each other step, the two runs are Gaussians whose means lie at
a distance μ, in standard deviations of the noise:

1. from the run with a unit to a run with exact sums, except for the unit's trace;
2. from there to the exact run with only the unit's trace: the accountant's step, (ε₁, δ₁);
3. from there to the exact run without the unit;
4. from there to the real run without the unit.

A Gaussian step costs (ε₂, δ₂) with ε₂ = μ²/2 + μ √(2 ln 1/δ₂), because its privacy loss is Gaussian
with mean μ²/2 and standard deviation μ. All steps together cost ε₁ + 3ε₂ and a δ of at most
e^(3ε₂) (δ₁ + 3 e^ε₁ δ₂).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from flower_ext.privacy.accounting.events import PrivacyLoss, Release

_STEPS = 3
_SPARED = (2.0**-10, 2.0**-5, 0.5)
"""Shares of δ to try for the Gaussian steps, smallest first."""


def with_approximation_error(
    loss: Callable[[float], PrivacyLoss], releases: Mapping[Release, int], delta: float
) -> PrivacyLoss:
    """Return an upper bound (ε, δ) of a run with its approximation error.

    Parameters
    ----------
    loss : Callable[[float], PrivacyLoss]
        Returns the loss of the run without approximation error, at a given δ.
    releases : Mapping[Release, int]
        All sums with their errors, which together bound μ (see the module).
    delta : float
        δ of the result. ε is infinite if μ is too large, above about 0.01.
    """
    shift = math.sqrt(
        sum(
            count * (release.relation.sensitivity_factor * release.approximation_error) ** 2
            for release, count in releases.items()
        )
    )
    if not shift:
        return loss(delta)
    for share in _SPARED:
        spared = share * delta
        first = loss(delta - spared)
        # Half of the δ set aside pays for δ₂, the other half for the factor e^(3ε₂).
        tail = first.epsilon + math.log(2 * _STEPS / spared)
        second = shift**2 / 2 + shift * math.sqrt(2 * tail)
        if math.expm1(_STEPS * second) * (delta - spared / 2) <= spared / 2:
            epsilon = first.epsilon + _STEPS * second
            return replace(first, epsilon=epsilon, delta=delta, releases=None)
    return replace(first, epsilon=math.inf, delta=delta, releases=None)
