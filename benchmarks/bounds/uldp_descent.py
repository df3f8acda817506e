"""Convergence of ULDP-AVG: Theorem 1 of Appendix E of Uldp-FL, with Remarks 2 and 4.

Source: Kato et al., Uldp-FL (PVLDB 2024). f is the plain mean of f_{s,u} over all pairs of a silo
and a user, a stochastic gradient has norm G at most, and Σ_s w_{s,u} = 1.

====================  =====================================================
paper                 here
====================  =====================================================
L, G                  ``smoothness``, ``gradient_bound``
σ_l, σ_g              ``gradient_stddev``, ``heterogeneity``
η_l, η_g, Q           ``learning_rate``, ``server_rate``, ``local_steps``
S, U, d               ``num_silos``, ``num_users``, ``dimension``
σ, C                  ``noise_multiplier``, ``clipping_norm``
C̲, C̄                  ``least_factor``, ``largest_factor``
====================  =====================================================

Three steps of the printed proof fail: the number of silos belongs above the first term's fraction,
a sum does not telescope, and a local gradient is not independent of the noise of earlier steps.
`docs/proved/uldp.md` puts them right.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flower_ext.checks import Checked, Count, Fraction, NotNegative, Positive, require_at_least_one
from flower_ext.errors import InvalidValue
from flower_ext.privacy.guarantee import Basis


@dataclass(frozen=True, kw_only=True)
class UldpDescent(Checked):
    """Constants of the losses and of a run of ULDP-AVG.

    Parameters
    ----------
    initial_gap : float
        f(x₀) − f*. The printed f(x₀)/C̲ − f*/C̄ depends on the zero of f; here f* = 0.
    gradient_bound : float
        G. The bound needs it only if a bias of clipping or weighting is above 0.
    gradient_stddev, heterogeneity : float
        σ_l² bounds the variance of a stochastic gradient, σ_g the distance of ∇f_{s,u} from ∇f.
    least_factor, largest_factor : float
        Least and largest factor C/max(C, η_l ‖E Σ g‖) of any pair and round; 1 without clipping.
    """

    num_silos: Count
    num_users: Count
    dimension: Count
    local_steps: Count
    smoothness: Positive
    initial_gap: NotNegative
    learning_rate: Positive
    server_rate: Positive
    gradient_bound: float = math.inf
    gradient_stddev: NotNegative = 0.0
    heterogeneity: NotNegative = 0.0
    noise_multiplier: NotNegative = 0.0
    clipping_norm: Positive = 1.0
    least_factor: Fraction = 1.0
    largest_factor: Fraction = 1.0


def uldp_avg_bound(
    problem: UldpDescent,
    *,
    rounds: int,
    bias: float = 0.0,
    squared_bias: float = 0.0,
    basis: Basis = "provable",
) -> float:
    """Return the bound of Theorem 1 on (1/T) Σ_t E‖∇f(x_t)‖² over T rounds.

    Parameters
    ----------
    bias, squared_bias : float
        Mean over rounds of E Σ_{s,u} (|α − α̃| + |α̃ − ᾱ|), and of the same with squares. With full
        batches α = α̃, and `clipping_bias` gives the rest. 0 for equal weights without clipping.
    basis : {"published", "provable"}
        "published" is Eq. 5 as printed.

    Raises
    ------
    ValueError
        A learning rate is above the theorem's limit, or a bias is above 0 without a
        ``gradient_bound``.
    """
    require_at_least_one("rounds", rounds)
    S, U, Q, L = problem.num_silos, problem.num_users, problem.local_steps, problem.smoothness
    local, server = problem.learning_rate, problem.server_rate
    low, high = problem.least_factor, problem.largest_factor
    if local * math.sqrt(30) * Q * L >= 1:
        raise InvalidValue(
            f"learning_rate={local!r}: expected a number below 1/(√30 Q L) = "
            f"{1 / (math.sqrt(30) * Q * L):.4g}"
        )
    dependent = basis == "provable" and Q > 1 and problem.gradient_stddev > 0
    dependence_factor = 6 if dependent else 3
    if server * local * dependence_factor * Q * L * high > S * (1 + 1e-12):
        raise InvalidValue(
            f"server_rate={server!r}: expected at most S/({dependence_factor} Q L η_l C̄) = "
            f"{S / (dependence_factor * Q * L * local * high):.4g}"
        )
    c = 1 / 2 - 15 * (L * Q * local) ** 2
    step = c * server * local * Q
    variance, spread = problem.gradient_stddev**2, problem.heterogeneity**2
    noise = (problem.noise_multiplier * problem.clipping_norm) ** 2 * problem.dimension
    descent = problem.initial_gap / (low * rounds * step)
    drift = 5 / (2 * c) * L**2 * Q * local**2 * (variance + 6 * Q * spread)
    sampling = dependence_factor * high * L * server * local * variance / (2 * c * S**2 * U)
    if basis == "published":
        descent /= S
    else:
        descent, drift, sampling = descent * S, drift * high / low, sampling * high / low
    total = descent + drift + sampling
    total += L * server * noise / (2 * c * low * local * Q * S * U**2)
    if bias or squared_bias:
        if math.isinf(problem.gradient_bound):
            raise InvalidValue(
                "gradient_bound=inf: expected a finite G, because bias or squared_bias is above 0"
            )
        scale = problem.gradient_bound**2 / (c * low * U)
        total += scale * (bias + 3 / 2 * L * server * local * Q * squared_bias)
    return total


def uldp_avg_rates(
    *, num_silos: int, num_users: int, local_steps: int, smoothness: float, rounds: int
) -> tuple[float, float]:
    """Return (η_g, η_l) of Remark 2: S√(SUQ) and 1/(√T Q L), which give O(1/√(SUQT) + 1/T).

    They obey the limits of Theorem 1 from T = 36 S U Q on. The noise term grows with √T. It
    vanishes only if C falls as 1/√T and σ stays constant; at a fixed ε, σ grows.
    """
    require_at_least_one("rounds", rounds)
    server = num_silos * math.sqrt(num_silos * num_users * local_steps)
    return server, 1 / (math.sqrt(rounds) * local_steps * smoothness)


def clipping_bias(weights: ArrayLike, factors: ArrayLike) -> tuple[float, float]:
    """Return two distances of the users' clipping factors from their mean.

    The weighted factor of a user is α̃, and ᾱ is the mean of all α̃. The distances are Σ|α̃ − ᾱ|,
    which Remark 4 would minimise over the weights, and Σ|α̃ − ᾱ|².

    Without clipping, equal weights reach 0 and weights by records do not.

    Parameters
    ----------
    weights, factors : array of shape (silos, users)
        w_{s,u} >= 0, which add up to 1 for each user, and C/max(C, η_l ‖E Σ g‖) in (0, 1].

    Raises
    ------
    ValueError
        Shapes differ, a user's weights do not add up to 1, or a factor is outside (0, 1].
    """
    w, c = np.asarray(weights, dtype=np.float64), np.asarray(factors, dtype=np.float64)
    if w.ndim != 2 or w.shape != c.shape:
        raise InvalidValue(f"weights and factors: expected one shape, got {w.shape} and {c.shape}")
    if (w < 0).any() or not np.allclose(w.sum(axis=0), 1):
        raise InvalidValue("weights: expected numbers >= 0 that add up to 1 for each user")
    if not ((c > 0) & (c <= 1)).all():
        raise InvalidValue("factors: expected numbers in (0, 1]")
    distance = np.abs(w * c - (w * c).mean())
    return float(distance.sum()), float((distance**2).sum())
