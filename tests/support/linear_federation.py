"""Federations drawn from the Bayesian linear model of DP-Ditto's Section V: Eqns 22–29.

====================  =====================================================
paper                 here
====================  =====================================================
u_n*, with w* = 0     ``true_models``
X_n, Y_n              ``features``, ``targets``
û_n                   ``local_models``
v_n*(λ)               ``personal_models``
====================  =====================================================

Every loss F_n(u) = ‖X_n u − Y_n‖²/b has the curvature 2ρ/b in all directions, and its gradients are
cheap and exact. Theory and pilot runs can therefore be checked on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from flower_ext.errors import InvalidValue
from flower_ext.privacy.theorems.dp_ditto_theorem import LARGEST_WEIGHT, check_global_weight

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LinearFederation:
    """One drawn federation; the first axis of every array runs over clients."""

    true_models: Array
    features: Array
    targets: Array
    feature_energy: float

    @classmethod
    def draw(
        cls,
        rng: np.random.Generator,
        *,
        num_clients: int,
        num_examples: int,
        dimension: int,
        feature_energy: float,
        label_variance: float,
        model_variance: float,
    ) -> Self:
        """Draw a federation whose features are orthogonal: X_nᵀX_n = ρI.

        Raises
        ------
        ValueError
            There are fewer examples than dimensions, so no such features exist.
        """
        if num_examples < dimension:
            raise InvalidValue(f"num_examples={num_examples!r}: expected at least {dimension}")
        true_models = rng.normal(scale=math.sqrt(model_variance), size=(num_clients, dimension))
        orthogonal, _ = np.linalg.qr(rng.normal(size=(num_clients, num_examples, dimension)))
        features = math.sqrt(feature_energy) * orthogonal
        noise = rng.normal(scale=math.sqrt(label_variance), size=(num_clients, num_examples))
        return cls(
            true_models=true_models,
            features=features,
            targets=np.einsum("nbd,nd->nb", features, true_models) + noise,
            feature_energy=feature_energy,
        )

    @property
    def curvature(self) -> float:
        """μ = L = 2ρ/b, the same for every client's loss."""
        return 2 * self.feature_energy / int(self.targets.shape[1])

    @property
    def local_models(self) -> Array:
        """û_n of Eqn 25: each client's least-squares solution."""
        products = np.einsum("nbd,nb->nd", self.features, self.targets)
        return np.asarray(products / self.feature_energy)

    def losses(self, models: Array) -> Array:
        """Return F_n, of one model for all clients or of one row per client."""
        rows = np.broadcast_to(models, self.true_models.shape)
        residuals = np.einsum("nbd,nd->nb", self.features, rows) - self.targets
        return np.asarray(np.square(residuals).mean(axis=1))

    def gradients(self, models: Array) -> Array:
        """Return ∇F_n, of one model for all clients or of one row per client."""
        return self.curvature * (
            np.broadcast_to(models, self.true_models.shape) - self.local_models
        )

    def personal_models(self, global_weight: float, noise: Array) -> Array:
        """Return v_n*(λ) of Eqn 29 for uploads û_n + noise_n; more leading axes are draws."""
        check_global_weight(global_weight)
        local, shared = self.local_models, (self.local_models + noise).mean(axis=-2, keepdims=True)
        pull = (LARGEST_WEIGHT - global_weight) / 2 * self.curvature
        return np.asarray((pull * local + global_weight * shared) / (pull + global_weight))
