"""Convergence of Upcycled-FedProx: the constants of Lemma 5.5, and an estimate of L and B.

Source: Yin et al., Upcycled-FL (TMLR 2024), Section 5 and Appendices B and C.

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
descent that does not happen: see `docs/proved/upcycled.md`.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flower_ext.checks import require_at_least_one, require_not_negative, require_positive
from flower_ext.errors import InvalidValue
from flower_ext.privacy.guarantee import Basis


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
    basis: Basis = "provable",
) -> ConvergenceConstants:
    """Return the constants of Eqs. 11–13 of Appendix C.

    With ``basis="published"`` they are as printed, with ``"provable"`` the two steps of the proof
    are corrected. C₁ does not depend on the coefficient; C₂ grows with it, and C₃ with its square.

    Raises
    ------
    ValueError
        A constant is out of range.
    """
    require_positive("smoothness", smoothness)
    require_positive("proximal_weight", proximal_weight)
    require_positive("strong_convexity", strong_convexity)
    require_not_negative("dissimilarity", dissimilarity)
    require_not_negative("coefficient", coefficient)
    require_at_least_one("cohort_size", cohort_size)
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


@dataclass(frozen=True, kw_only=True)
class DescentEstimate:
    """L, B, and the least curvature; ρ is at most the proximal weight plus the curvature."""

    smoothness: float
    dissimilarity: float
    curvature: float


def estimate_descent(
    models: ArrayLike, gradients: ArrayLike, weights: ArrayLike | None = None
) -> DescentEstimate:
    """Estimate L, B and the curvature of clients' losses from their gradients at a few models.

    The estimates of L and B are too small and that of the curvature is too large, because they are
    extremes over the given models only. C₁ ≤ 0 thus means that Theorem 5.6 does not apply. C₁ > 0
    does not prove that it applies.

    **This function reads clients' data.** No guarantee covers its arguments or its result. Use
    simulations or public data, or keep arguments and result on the machine that holds the data.

    Parameters
    ----------
    models : array of shape (models, dimension)
        At least two models, no two alike, such as those of some rounds.
    gradients : array of shape (models, clients, dimension)
        ∇F_i of each client at each model, over all its records.
    weights : array of shape (clients,), optional
        p_i, the clients' shares of the records; equal by default.

    Raises
    ------
    ValueError
        Shapes do not fit, two models are alike, or the mean gradient is 0 at a model.
    """
    w, g = np.asarray(models, dtype=np.float64), np.asarray(gradients, dtype=np.float64)
    if w.ndim != 2 or g.ndim != 3 or len(w) < 2 or g.shape != (len(w), g.shape[1], w.shape[1]):
        raise InvalidValue(
            f"models {w.shape} and gradients {g.shape}: expected (models, dimension) and (models, "
            "clients, dimension), with at least two models"
        )
    p = np.full(g.shape[1], 1.0) if weights is None else np.asarray(weights, dtype=np.float64)
    if p.shape != g.shape[1:2] or (p < 0).any() or not 0 < p.sum() < math.inf:
        raise InvalidValue("weights: expected one number >= 0 for each client, not all 0")
    p = p / p.sum()
    means = np.linalg.norm(np.einsum("i,kid->kd", p, g), axis=1)
    squares = (g**2).sum(axis=2) @ p
    first, second = np.triu_indices(len(w), k=1)
    steps, changes = w[first] - w[second], g[first] - g[second]
    lengths = np.linalg.norm(steps, axis=1)[:, None]
    if not ((lengths > 0).all() and (means > 0).all()):  # also refuses NaN
        raise InvalidValue(
            "models and gradients: expected finite numbers, no two models alike, and at every "
            "model a mean gradient other than 0"
        )
    along = np.einsum("kid,kd->ki", changes, steps) / lengths**2
    return DescentEstimate(
        smoothness=float((np.linalg.norm(changes, axis=2) / lengths).max()),
        dissimilarity=float((np.sqrt(squares) / means).max()),
        curvature=float(along.min()),
    )
