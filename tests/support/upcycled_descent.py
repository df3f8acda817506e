"""Problems with known descent."""

import math

import numpy as np

from benchmarks.bounds.upcycled_descent import (
    ConvergenceConstants,
    convergence_constants,
)

USUAL = {
    "smoothness": 0.1,
    "dissimilarity": 1.1,
    "proximal_weight": 0.8,
    "strong_convexity": 0.85,
    "cohort_size": 40,
    "coefficient": 0.5,
}


def constants(**changes) -> ConvergenceConstants:
    return convergence_constants(**{**USUAL, **changes})


class Quadratics:
    """F_i(w) = ½ Σ_j a_ij w_j² on n clients: one minimiser, exact L, B and proximal steps."""

    def __init__(self, curvatures, mu):
        self.a, self.mu = np.asarray(curvatures), mu
        self.mean = self.a.mean(axis=0)
        # The ratio of the two sums over j is at most the largest ratio of their terms.
        ratios = (self.a**2).mean(axis=0) / self.mean**2
        self.facts = {
            "smoothness": self.a.max(),
            "dissimilarity": math.sqrt(ratios.max()),
            "proximal_weight": mu,
            "strong_convexity": self.a.min() + mu,
        }

    def value(self, w):
        return 0.5 * float((self.mean * w**2).sum())

    def gradient_norm(self, w):
        return float(np.linalg.norm(self.mean * w))

    def proximal_steps(self, w):
        """Return the exact minimiser of F_i + (μ/2) ‖· − w‖² on each client."""
        return self.mu / (self.a + self.mu) * w

    def expected_value(self, w, K):
        """Return E f of the mean over K clients drawn uniformly and independently."""
        models = self.proximal_steps(w)
        spread = 0.5 * float((self.mean * models.var(axis=0)).sum()) / K
        return self.value(models.mean(axis=0)) + spread


def random_quadratics(rng, *, mu, scale, n=10, dimensions=3):
    spread = rng.choice([0.001, 0.1, 0.4])
    factors = np.exp(spread * rng.uniform(-1, 1, (n, dimensions)))
    return Quadratics(scale * factors, mu)
