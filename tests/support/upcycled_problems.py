"""Local problems for tests of Upcycled-FL's theorems."""

import math

from scipy import stats

from flower_ext.privacy import (
    LocalObjective,
    ObjectivePerturbation,
    OutputPerturbation,
)
from flower_ext.privacy.theorems import upcycled_theorem
from tests.support.run_summary import run_summary

# An L2-regularised logistic regression of two classes, solved exactly.
KNOWN = LocalObjective(
    convex=True,
    generalised_linear=True,
    gradient_bound=1.0,
    curvature_bound=0.25,
    feature_norm_bound=1.0,
    proximal_weight=0.1,
    distance_to_minimiser=0.0,
    memoryless=True,
)
OUTPUT = OutputPerturbation(clipping_norm=1.5, noise_stddev=0.2)
OBJECTIVE = ObjectivePerturbation(rate=3.0)


def delta_of_gaussians(distance, stddev, releases, epsilon):
    """Return the least δ of ``releases`` Gaussians ``distance`` apart (Balle and Wang 2018)."""
    mu = distance * math.sqrt(releases) / stddev
    right = stats.norm.logcdf(mu / 2 - epsilon / mu)
    return math.exp(right) - math.exp(epsilon + stats.norm.logcdf(-mu / 2 - epsilon / mu))


def epsilons_by_client(perturbation, objective, *, num_examples, participations, delta):
    run = run_summary(participations, num_examples=num_examples)
    return upcycled_theorem.epsilons_by_client(perturbation, objective, run, delta=delta)
