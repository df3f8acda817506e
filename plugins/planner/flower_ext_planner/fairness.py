"""Fairness of personal models, and the fairest λ: DP-Ditto, Section V.

The setting is personalised Bayesian linear regression. Client n has the true model
u_n* = w* + N(0, ζ² I) and the labels Y_n = X_n u_n* + N(0, σ² I), with X_nᵀX_n = ρI. The client
estimates û_n, and uploads û_n + z_n with noise z_n. Its personal model v_n is (1 − α₀) û_n plus α₀
times the mean of all uploads.

====================  =====================================================
paper                 here
====================  =====================================================
λ, α₀                 ``global_weight``, ``interpolation``
N, b, d               ``num_clients``, ``num_examples``, ``dimension``
ρ                     ``feature_energy``
σ², ζ²                ``label_variance``, ``model_variance``
σ_u²                  ``upload_variance``: variance of z_n; the paper's σ_z² is N σ_u²
G₁, G₂ − G₁²          ``moments``
R                     ``unfairness``: variance over clients of ‖u_n* − v_n‖²
====================  =====================================================

The error B_n of client n's personal model has the variance σ_B² in each weight: σ_B² = σ_w² + q x²
with x = α₀, q = σ_u²/N and σ_w² = ``posterior_variance`` + ``shared_variance``. With
s = S₁ − x/N and N S₁ = ``shrinkage``, Theorem 2 has the form

    R = const + D q x² + 4 G₁ s² (W + q x²) + (G₂ − G₁²) s⁴

As published, D = 2d and W = σ_w². Two errors led to these values. First, the variance of σ_B² χ²_d
is 2d σ_B⁴, but the paper gives 2d σ_B². Second, the paper takes the errors B_n as independent over
clients, although all clients share the same noise and the same error in w*. A shared error moves
all losses alike and costs no fairness. Corrected, D = 4 (1 − 1/N) d τ² and W = σ_w² − τ²/N, with
τ² = σ²ζ²/(σ² + ρζ²).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.polynomial import Polynomial
from numpy.typing import ArrayLike, NDArray

from flower_ext.checks import (
    Checked,
    Scale,
    require_not_negative,
    require_one_of,
    require_positive,
)
from flower_ext.errors import InvalidValue
from flower_ext.privacy.guarantee import Basis, Condition
from flower_ext.privacy.theorems.dp_ditto_theorem import LARGEST_WEIGHT, check_global_weight
from flower_ext_planner.convergence import BASES, ScaleOrZero, Size


@dataclass(frozen=True, kw_only=True)
class LinearFairness(Checked):
    """Theorems 2 and 3 for one federation.

    Parameters
    ----------
    num_examples : int
        Number of examples b of every client.
    feature_energy : float
        ρ, the diagonal of XᵀX. Features of unit variance give about b.
    label_variance, model_variance : float
        σ², the variance of the noise in labels, and ζ², the variance between the clients' true
        models.
    """

    num_clients: Size
    num_examples: Size
    dimension: Size
    feature_energy: Scale
    label_variance: Scale
    model_variance: ScaleOrZero

    @property
    def moments(self) -> tuple[float, float]:
        """The expected values of G₁ and G₂ − G₁² for random û_n.

        With ū the mean of all û_n, G₁ is N² times the mean of ‖û_n − ū‖² over clients, and G₂ − G₁²
        is N⁴ times the variance of ‖û_n − ū‖² over clients.
        """
        N, d = self.num_clients, self.dimension
        spread = self.label_variance / self.feature_energy + self.model_variance
        variance = 2 * d * spread**2 * (1 - 1 / N) * abs(1 - 2 / N)
        return N**2 * (1 - 1 / N) * d * spread, N**4 * variance

    def interpolation(self, global_weight: float) -> float:
        """Return the weight α₀ of the global model in a personal model, for ``global_weight`` λ."""
        check_global_weight(global_weight)
        pull = self.num_examples * global_weight
        return pull / ((LARGEST_WEIGHT - global_weight) * self.feature_energy + pull)

    def global_weight(self, interpolation: float) -> float:
        """Return the λ at which the weight α₀ of the global model is ``interpolation``."""
        if not 0 <= interpolation <= 1:
            raise InvalidValue(f"interpolation={interpolation!r}: expected a number in [0, 1]")
        pull = self.feature_energy * interpolation
        return LARGEST_WEIGHT * pull / ((1 - interpolation) * self.num_examples + pull)

    @property
    def shrinkage(self) -> float:
        """N S₁: the mean's weight in the best estimate of a client's true model, without noise."""
        noise = self.label_variance
        return noise / (noise + self.feature_energy * self.model_variance)

    @property
    def posterior_variance(self) -> float:
        """τ²: the variance of a client's true model, given the client's data and w*."""
        return self.shrinkage * self.model_variance

    @property
    def shared_variance(self) -> float:
        """σ_w² − τ²: the part of every client's variance that comes from the shared error in w*."""
        spread = self.label_variance / self.feature_energy + self.model_variance
        return self.shrinkage**2 * spread / self.num_clients

    def unfairness(
        self, global_weight: ArrayLike, *, upload_variance: float, basis: Basis = "provable"
    ) -> NDArray[np.float64]:
        """Return R(λ) of Theorem 2, for one λ or many."""
        weights = np.asarray(global_weight, dtype=np.float64)
        shares = np.vectorize(self.interpolation, otypes=[float])(weights)
        return np.asarray(self.quartic(upload_variance=upload_variance, basis=basis)(shares))

    def best_global_weight(self, *, upload_variance: float, basis: Basis = "provable") -> float:
        """Return λ* of Theorem 3, the λ with the smallest R.

        Candidates are 0, 2, and each λ whose α₀ is a real root of dR/dα₀ (Eqn 32).
        """
        unfairness = self.quartic(upload_variance=upload_variance, basis=basis)
        roots = unfairness.deriv().roots()
        # Rounding gives real roots a small imaginary part.
        real = roots[np.abs(roots.imag) < 1e-7].real
        shares = np.concatenate([[0.0, 1.0], real[(real > 0) & (real < 1)]])
        return self.global_weight(float(shares[np.argmin(unfairness(shares))]))

    def uniqueness(self, *, clipping_norm: float, basis: Basis = "provable") -> Condition:
        """Return the condition of Theorem 3 under which R has one minimum, whatever the noise.

        R is convex in α₀ if D > 2 G₁ S₁² (symbols: top of this module). If models have norm at most
        C, the ``clipping_norm``, then G₁ ≤ N² C². The published condition, C < √d / (2 N S₁), uses
        D = 2d and G₁ ≤ 4 N² C² instead.
        """
        require_positive("clipping_norm", clipping_norm)
        N, d = self.num_clients, self.dimension
        if basis == "published":
            limit = math.sqrt(d) / (2 * self.shrinkage)
        else:
            limit = math.sqrt(2 * (1 - 1 / N) * d * self.posterior_variance) / self.shrinkage
        return Condition(
            f"R has one minimum whatever the noise, which is certain if C < {limit:.4g} "
            f"(C = {clipping_norm:.4g})",
            clipping_norm < limit,
        )

    def quartic(self, *, upload_variance: float, basis: Basis = "provable") -> Polynomial:
        """Return R (Eqn 31) as a polynomial in α₀."""
        require_not_negative("upload_variance", upload_variance)
        require_one_of("basis", basis, BASES)
        N, d = self.num_clients, self.dimension
        posterior, shared = self.posterior_variance, self.shared_variance
        if basis == "published":
            constant, D, W = 2 * d * (posterior + shared), 2.0 * d, posterior + shared
        else:
            left = (1 - 1 / N) * posterior
            constant, D, W = 2 * d * left * (posterior + 2 * shared), 4 * d * left, left + shared
        q, (mean, variance) = upload_variance / N, self.moments
        x, s = Polynomial([0, 1]), Polynomial([self.shrinkage / N, -1 / N])
        return constant + D * q * x**2 + 4 * mean * s**2 * (W + q * x**2) + variance * s**4
