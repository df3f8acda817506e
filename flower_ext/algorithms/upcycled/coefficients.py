"""The coefficient c_m of the m-th even round: w̄²ᵐ = w̄²ᵐ⁻¹ + c_m (w̄²ᵐ⁻¹ − w̄²ᵐ⁻²).

The paper writes one free coefficient in two ways; its theory is about `proximal_ratio`. A number
stands for the same coefficient in every even round; with 0, an even round repeats the model.

====================  ==================================  ================================
coefficient           c_m                                 source
====================  ==================================  ================================
a number c            c                                   the experiments' tuned parameter
``proximal_ratio``    μ / (μ + λ)                         Eq. 6
a number λ / 2        λ / 2                               Algorithm 1, line 6
``Decaying(c)``       c / √m, i.e. λ_m = μ (√m / c − 1)   Corollary 5.8: increasing λ_m
====================  ==================================  ================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from flower_ext.checks import require_not_negative, require_positive

Coefficient = Callable[[int], float]
"""A function from m = 1, 2, … to c_m, which is finite and not negative."""


@dataclass(frozen=True)
class Decaying:
    """c / √m: the increasing penalties under which Corollary 5.8's rate O(1/√M) holds."""

    first: float

    def __post_init__(self) -> None:
        require_not_negative("first", self.first)

    def __call__(self, m: int) -> float:
        """Return c / √m."""
        return self.first / math.sqrt(m)


def proximal_ratio(*, proximal_weight: float, penalty: float) -> float:
    """Return μ / (μ + λ): the extrapolation that FedProx's first-order condition gives (Eq. 6)."""
    require_positive("proximal_weight", proximal_weight)
    require_not_negative("penalty", penalty)
    return proximal_weight / (proximal_weight + penalty)
