"""Privacy that a run costs because its sums are not exactly the sampled Gaussians of an accountant.

A protocol that computes sums under encryption moves each of them by a little, and may leave a trace
of units that were not drawn. `with_residue` adds what this costs to what an accountant says. Four
runs stand in a row, and three steps between them are Gaussians that a shift of norm μ separates, in
standard deviations of the noise:

1. from the run with a unit to one whose sums are exact, but for the unit's trace;
2. from there to the exact run with the unit's trace alone: the step of the accountant, (ε₁, δ₁);
3. to the exact run without the unit;
4. to the run without the unit.

A Gaussian step costs (ε₂, δ₂) with ε₂ = μ²/2 + μ √(2 ln 1/δ₂), since its privacy loss is Gaussian
with mean μ²/2 and deviation μ. All steps together cost ε₁ + 3ε₂ and at most
e^(3ε₂) (δ₁ + 3 e^ε₁ δ₂).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from flower_ext.privacy.loss import PrivacyLoss

_STEPS = 3
_SPARED = (2.0**-10, 2.0**-5, 0.5)
"""Shares of δ that are tried for the Gaussian steps, the smaller first."""


def with_residue(loss: Callable[[float], PrivacyLoss], shift: float, delta: float) -> PrivacyLoss:
    """Return the (ε, δ) of a run with its residue, an upper bound.

    Parameters
    ----------
    loss : Callable[[float], PrivacyLoss]
        The run without it, at a given δ.
    shift : float
        μ: bound on the norm of every step, over all sums together, in standard deviations of their
        noise.
    delta : float
        Of the result. Where the shift is too large, ε is infinite: above about 0.01.
    """
    if not shift:
        return loss(delta)
    for share in _SPARED:
        spared = share * delta
        first = loss(delta - spared)
        # Half of what is spared is for δ₂, the other half for the factor e^(3ε₂).
        tail = first.epsilon + math.log(2 * _STEPS / spared)
        second = shift**2 / 2 + shift * math.sqrt(2 * tail)
        if math.expm1(_STEPS * second) * (delta - spared / 2) <= spared / 2:
            return replace(first, epsilon=first.epsilon + _STEPS * second, delta=delta)
    return replace(first, epsilon=math.inf, delta=delta)
