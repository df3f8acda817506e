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
descent that does not happen. This module has the printed and the corrected constants;
`docs/errata-upcycled-fl.md` applies both.
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

    Raises
    ------
    InvalidValue
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

    Raises
    ------
    InvalidValue
        There are no rounds, the sequences differ in length, a number is negative or not finite,
        the C₁ differ, or C₁ <= 0, for which the theorem does not apply: take another proximal
        weight or a larger cohort.
    """
    M = len(constants)
    for name, values in (
        ("initial_gap", [initial_gap]),
        ("gradient_norms", gradient_norms),
        ("steps", steps),
    ):
        if not all(0 <= value < math.inf for value in values):
            raise InvalidValue(f"{name}={list(values)}: expected finite numbers >= 0")
    if M == 0 or not M == len(gradient_norms) == len(steps):
        raise InvalidValue(
            f"{M} constants, {len(gradient_norms)} gradient norms, {len(steps)} steps: expected "
            "the same number of each, at least one"
        )
    c1 = constants[0].c1
    if any(not math.isclose(one.c1, c1) for one in constants):
        raise InvalidValue(
            "constants: expected the same C₁ in every round, so keep μ, ρ, L, B and K fixed"
        )
    if c1 <= 0:
        raise InvalidValue(
            f"C₁={c1:.4g}: expected C₁ > 0, without which Theorem 5.6 does not apply; take another "
            "proximal weight or a larger cohort"
        )
    drift = sum(
        one.c2 * norm * step + one.c3 * step**2
        for one, norm, step in zip(constants, gradient_norms, steps, strict=True)
    )
    return (initial_gap + drift) / (M * c1)
