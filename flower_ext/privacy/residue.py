"""Privacy that a release costs beyond its sampled Gaussian: small shifts and distances.

A sum that parties compute under encryption can differ a little from the sampled Gaussian that an
accountant knows. Two differences are accounted here:

* ``shift``: one unit moves every sum a little, even the sums of rounds in which it was not drawn.
* ``distance``: the sum is only close, in statistical distance, to one with the noise that counts.

Both are composed over a run, and `with_residue` adds them to what the accountant says:

* Between a run with the unit and a run without it stands one in which the unit causes the shifts
  alone. The first two are a step of the accountant apart, (ε₁, δ₁), and the last two are Gaussians
  μ apart, (ε₂, δ₂) with ε₂ = μ²/2 + μ √(2 ln 1/δ₂).
* Two steps compose to ε₁ + ε₂ and at most δ₁ e^ε₂ + δ₂ e^ε₁.
* A distance of τ on either side adds (1 + e^(ε₁ + ε₂)) τ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flower_ext.privacy.accounting import PrivacyLoss

_SPARED = (2.0**-10, 0.5)
"""Shares of δ that are tried for the residue, the smaller first."""
_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True, kw_only=True)
class Residue:
    """Differences of a run's sums from sampled Gaussians.

    Parameters
    ----------
    shift : float
        L2 norm, in standard deviations of the noise, of what one unit moves in all sums together,
        drawn or not.
    distance : float
        Statistical distance of all sums together from those that are accounted.
    """

    shift: float = 0.0
    distance: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.shift or self.distance)


def with_residue(
    loss: Callable[[float], PrivacyLoss], residue: Residue, delta: float
) -> PrivacyLoss:
    """Return the (ε, δ) of a run with its residue, an upper bound.

    Parameters
    ----------
    loss : Callable[[float], PrivacyLoss]
        The run without it, at a given δ.
    residue : Residue
    delta : float
        Of the result. Where it is too small for the residue, ε is infinite.
    """
    if not residue:
        return loss(delta)
    for share in _SPARED:
        spared = share * delta
        first = loss(delta - spared)
        if first.epsilon > _LARGEST_EXPONENT:
            break
        growth = math.exp(first.epsilon)
        beyond = spared / 4 / growth
        second = residue.shift**2 / 2 + residue.shift * math.sqrt(-2 * math.log(beyond))
        total = (
            math.exp(second) * (delta - spared)
            + growth * beyond
            + (1 + growth * math.exp(second)) * residue.distance
        )
        if total <= delta:
            return replace(first, epsilon=first.epsilon + second, delta=delta)
    return replace(loss(delta / 2), epsilon=math.inf, delta=delta)
