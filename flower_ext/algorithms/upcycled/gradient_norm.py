"""What Upcycled-FedProx's convergence rests on: Lemma 5.5's constants and Theorem 5.6's bound.

====================  =====================================================
paper                 here
====================  =====================================================
L                     ``smoothness`` of the local losses F_i
B                     ``dissimilarity``: ‖∇F_i‖² is at most B² ‖∇f‖² on average, so B >= 1
μ                     ``proximal_weight``
ρ                     ``strong_convexity`` of F_i + (μ/2) ‖· − w̄‖²
K                     ``cohort_size``
μ / (μ + λ_m)         ``coefficient``
====================  =====================================================

Two steps of the printed proofs do not hold. Lemma B.1 bounds ⟨∇f, Φ⟩ by ‖∇f‖ ‖Φ‖ / μ, where the
Cauchy-Schwarz inequality gives no 1/μ; Lemma B.2 loses the factor L of E‖w̄ − w̃‖² when it collects
terms. With μ <= 1 and L <= 1 the printed constants are only too careful; above they can promise a
descent that does not happen. Both sets are here; `docs/errata-upcycled-fl.md` applies them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flower_ext.checks import require_not_negative, require_positive
from flower_ext.errors import InvalidValue


@dataclass(frozen=True, kw_only=True)
class ConvergenceConstants:
    """C₁, C₂, C₃ of Lemma 5.5; the theorem needs C₁ > 0."""

    c1: float
    c2: float
    c3: float

    @property
    def converges(self) -> bool:
        """Whether Theorem 5.6 applies."""
        return self.c1 > 0


def convergence_constants(
    *,
    smoothness: float,
    dissimilarity: float,
    proximal_weight: float,
    strong_convexity: float,
    cohort_size: int,
    coefficient: float,
    basis: Literal["published", "provable"] = "provable",
) -> ConvergenceConstants:
    """Eqs. 11–13 of Appendix C as ``published``, or with the two steps of the proof put right.

    C₁ does not depend on the coefficient; C₂ grows with it, and C₃ with its square.

    Raises
    ------
    ValueError
        A parameter is out of range.
    """
    for name, value in (
        ("smoothness", smoothness),
        ("proximal_weight", proximal_weight),
        ("strong_convexity", strong_convexity),
    ):
        require_positive(name, value)
    require_not_negative("dissimilarity", dissimilarity)
    if not 1 <= cohort_size < math.inf:
        raise InvalidValue(f"cohort_size={cohort_size!r}: expected an integer >= 1")
    if not 0 <= coefficient <= 1:
        raise InvalidValue(f"coefficient={coefficient!r}: expected μ/(μ+λ), a number in [0, 1]")
    L, B, mu, rho, K = smoothness, dissimilarity, proximal_weight, strong_convexity, cohort_size
    root = math.sqrt(2 / K)
    inner, variance = (1 / mu, 1.0) if basis == "published" else (1.0, L)
    c1 = (
        1 / mu
        - inner * L * B / (mu * rho)
        - L * B**2 / (2 * rho**2)
        - variance * 2 * B**2 / (K * rho**2)
        - (2 * L * B + rho) / rho * root * B / rho
    )
    c2 = (
        inner * (L**2 / (mu * rho) + (L + mu) / mu)
        + L * (L + rho) * B / rho**2
        + variance * 4 * L * B / (K * rho**2)
        + (4 * L**2 * B + rho * L * (1 + 2 * B)) / rho**2 * root
    ) * coefficient
    c3 = (
        L * (L + rho) ** 2 / (2 * rho**2)
        + variance * 2 * L**2 / (K * rho**2)
        + 2 * L * (L + rho) / rho * root * L / rho
    ) * coefficient**2
    return ConvergenceConstants(c1=c1, c2=c2, c3=c3)


def gradient_norm_bound(
    constants: Sequence[ConvergenceConstants],
    *,
    initial_gap: float,
    gradient_norms: Sequence[float],
    steps: Sequence[float],
) -> float:
    """Theorem 5.6: a bound on min_m E‖∇f(w̄²ᵐ⁻¹)‖² after M odd rounds, by either basis' constants.

    Parameters
    ----------
    constants : Sequence[ConvergenceConstants]
        Of each of the M rounds; they share C₁.
    initial_gap : float
        f(w̄⁰) − f(w*).
    gradient_norms : Sequence[float]
        ‖∇f(w̄²ᵐ⁻¹)‖ of each round, or an upper bound d (Assumption 5.7).
    steps : Sequence[float]
        ‖w̄²ᵐ⁻¹ − w̄²ᵐ⁻²‖ of each round, or an upper bound h (Assumption 5.7).

    Raises
    ------
    ValueError
        No rounds, sequences of different lengths, a negative or undefined number, different C₁,
        or C₁ <= 0, where the theorem says nothing: take another proximal weight or a larger cohort.
    """
    M = len(constants)
    for name, values in (
        ("initial_gap", [initial_gap]),
        ("gradient_norms", gradient_norms),
        ("steps", steps),
    ):
        if not all(0 <= value < math.inf for value in values):
            raise InvalidValue(f"{name}: expected finite numbers >= 0, got {list(values)}")
    if M == 0 or not M == len(gradient_norms) == len(steps):
        raise InvalidValue(
            f"{M} constants, {len(gradient_norms)} gradient norms, {len(steps)} steps: expected "
            "the same number of each, at least one"
        )
    c1 = constants[0].c1
    if any(not math.isclose(one.c1, c1) for one in constants):
        raise InvalidValue("constants with different C₁: μ, ρ, L, B and K must not change")
    if c1 <= 0:
        raise InvalidValue(
            f"C₁={c1:.4g} <= 0: Theorem 5.6 does not apply; take another proximal weight, or ask "
            "more clients a round"
        )
    drift = sum(
        one.c2 * norm * step + one.c3 * step**2
        for one, norm, step in zip(constants, gradient_norms, steps, strict=True)
    )
    return (initial_gap + drift) / (M * c1)
