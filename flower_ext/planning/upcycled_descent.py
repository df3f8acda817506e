"""Convergence of Upcycled-FedProx: the constants of Lemma 5.5 and the bound of Theorem 5.6.

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

Two steps of the printed proofs do not hold. Lemma B.1 bounds ⟨∇f, Φ⟩ by ‖∇f‖ ‖Φ‖ / μ, but the
Cauchy-Schwarz inequality gives no 1/μ. Lemma B.2 loses the factor L of E‖w̄ − w̃‖² when it collects
terms. If μ <= 1 and L <= 1, the printed constants are merely cautious; otherwise they can promise a
descent that does not happen. `docs/proved/upcycled.md` applies the printed and the corrected
constants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ConvergenceConstants:
    """C₁, C₂, C₃ of Lemma 5.5; the theorem needs C₁ > 0."""

    c1: float
    c2: float
    c3: float

    @property
    def converges(self) -> bool:
        """True if Theorem 5.6 applies, which needs C₁ > 0."""
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
    """Return the constants of Eqs. 11–13 of Appendix C.

    With ``basis="published"`` they are as printed, with ``"provable"`` the two steps of the proof
    are corrected. C₁ does not depend on the coefficient; C₂ grows with it, and C₃ with its square.
    """
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
    """Return the bound of Theorem 5.6 on min_m E‖∇f(w̄²ᵐ⁻¹)‖² after M odd rounds.

    The bound holds on the basis, published or provable, of ``constants``.

    Parameters
    ----------
    constants : Sequence[ConvergenceConstants]
        Constants of each of the M rounds; all have the same C₁.
    initial_gap : float
        f(w̄⁰) − f(w*).
    gradient_norms : Sequence[float]
        ‖∇f(w̄²ᵐ⁻¹)‖ of each round, or an upper bound d (Assumption 5.7).
    steps : Sequence[float]
        ‖w̄²ᵐ⁻¹ − w̄²ᵐ⁻²‖ of each round, or an upper bound h (Assumption 5.7).
    """
    M, c1 = len(constants), constants[0].c1
    drift = sum(
        one.c2 * norm * step + one.c3 * step**2
        for one, norm, step in zip(constants, gradient_norms, steps, strict=True)
    )
    return (initial_gap + drift) / (M * c1)
