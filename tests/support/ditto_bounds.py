"""Bounds of DP-Ditto's Theorem 1: usual, random, and with equal rates."""

import math

from flower_ext_planner.convergence import ConvergenceBound, DittoProblem, convergence_bound

BASES = ("published", "provable")
USUAL = {
    "strong_convexity": 1.0,
    "smoothness": 2.0,
    "initial_gap": 1.0,
    "initial_distance": 4.0,
    "dimension": 10,
    "num_clients": 20,
    "learning_rate": 0.05,
    "personal_learning_rate": 0.05,
    "gradient_bound": 1.0,
    "model_spread": 0.5,
}


def problem(**changes) -> DittoProblem:
    return DittoProblem(**{**USUAL, **changes})


def bound(*, weight=0.5, variance=1e-5, basis="provable", **changes) -> ConvergenceBound:
    return convergence_bound(
        problem(**changes), global_weight=weight, variance_per_round=variance, basis=basis
    )


def random_bound(rng, basis, **fixed):
    mu = math.exp(rng.uniform(-3, 1))
    L = mu * math.exp(rng.uniform(0, 3))
    constants = {
        "strong_convexity": mu,
        "smoothness": L,
        "initial_gap": rng.uniform(0, 5),
        "initial_distance": rng.uniform(0.1, 5),
        "dimension": int(rng.integers(1, 50)),
        "num_clients": int(rng.integers(1, 30)),
        "learning_rate": rng.uniform(0.01, 1.9) / L,
        "personal_learning_rate": rng.uniform(0.01, 0.9) / (L + 2),
        "gradient_bound": rng.uniform(0, 4),
        "model_spread": rng.uniform(0, 2),
    }
    return convergence_bound(
        DittoProblem(**{**constants, **fixed}),
        global_weight=rng.uniform(0, 2),
        variance_per_round=math.exp(rng.uniform(-8, 0)),
        basis=basis,
    )


def equal_rates(**changes) -> ConvergenceBound:
    coefficients = {
        "personal_rate": 0.9,
        "global_rate": 0.9,
        "residual": 0.02,
        "coupling": 0.3,
        "gap_per_planned_round": 0.001,
        "initial_gap": 2.0,
        "initial_distance": 5.0,
    }
    return ConvergenceBound(**{**coefficients, **changes})
