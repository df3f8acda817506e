"""Extra privacy cost of sums that differ a little from the accountant's sampled Gaussians.

A protocol that computes sums under encryption changes each sum a little. Besides, a unit that was
not drawn may still move a sum a little; call this small change the unit's trace.
`with_approximation_error` adds the cost of both errors to the accountant's loss. The proof compares
the real run with a unit, A, to the real run without the unit, E. It goes from A to E through three
imagined runs:

* A: the real run with the unit;
* B: its sums are exact, except for the unit's trace;
* C: as B, but the unit contributes nothing except its trace;
* D: exact sums without the unit and its trace;
* E: the real run without the unit.

The accountant's loss (ε₁, δ₁) covers the step from B to C. In each of the three other steps, the
two runs are Gaussians with means that are at most μ standard deviations of the noise apart. Such a
step costs (ε₂, δ₂) with ε₂ = μ²/2 + μ √(2 ln 1/δ₂), because its privacy loss is Gaussian
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
"""Fractions of δ to try for the three Gaussian steps, the smallest first."""


def with_approximation_error(
    loss: Callable[[float], PrivacyLoss], releases: Mapping[Release, int], delta: float
) -> PrivacyLoss:
    """Return an upper bound on (ε, δ) of a run whose sums have approximation errors.

    Parameters
    ----------
    loss : Callable[[float], PrivacyLoss]
        Takes δ, and returns the loss that the run would have without approximation errors.
    releases : Mapping[Release, int]
        All releases, with their counts. Their approximation errors together bound the distance μ
        of the proof (see the top of this module).
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
