"""The estimates of smoothness, dissimilarity and curvature from clients' gradients."""

import math

import numpy as np
import pytest

from benchmarks.bounds.upcycled_descent import (
    convergence_constants,
    estimate_descent,
)
from tests.support.upcycled_descent import constants, random_quadratics


@pytest.mark.parametrize("seed", range(20))
def test_estimates_approach_the_constants_of_quadratics_from_below(seed):
    rng = np.random.default_rng(seed)
    problem = random_quadratics(rng, mu=1.0, scale=0.5)
    exact = problem.facts
    models = [np.zeros(3), *np.eye(3), *rng.normal(size=(20, 3))]
    for chosen, sharp in ((models[1:], True), (models[5:], False)):
        estimate = estimate_descent(chosen, [problem.a * w for w in chosen])
        assert estimate.smoothness <= exact["smoothness"] * (1 + 1e-9)
        assert estimate.dissimilarity <= exact["dissimilarity"] * (1 + 1e-9)
        assert estimate.curvature + problem.mu >= exact["strong_convexity"] * (1 - 1e-9)
        if sharp:  # the axes are among the models, at which B is reached
            assert estimate.dissimilarity == pytest.approx(exact["dissimilarity"])
    axes = estimate_descent(models[:1] + models[1:4], [problem.a * w + 1 for w in models[:4]])
    assert axes.smoothness == pytest.approx(exact["smoothness"])
    assert axes.curvature + problem.mu == pytest.approx(exact["strong_convexity"])


def test_estimates_weigh_clients_by_their_shares_of_the_records():
    """Gradients 1 and 3 with shares 3/4 and 1/4: B² = (3/4 + 9/4) / (3/2)²."""
    gradients = [[[1.0], [3.0]], [[1.0], [3.0]]]
    estimate = estimate_descent([[0.0], [1.0]], gradients, [30, 10])
    assert estimate.dissimilarity == pytest.approx(math.sqrt(3 / 1.5**2))
    assert estimate_descent([[0.0], [1.0]], gradients).dissimilarity == pytest.approx(
        math.sqrt(5 / 4)
    )


def test_estimates_from_clients_data_tell_whether_theorem_5_6_can_apply():
    """Logistic regression: clients of one distribution, and clients of opposite labels."""
    rng = np.random.default_rng(1)
    features = rng.normal(size=(8, 200, 4)) / 4
    labels = np.sign(features @ np.array([1.0, -2.0, 0.5, 1.0]) + 0.2 * rng.normal(size=(8, 200)))
    models = 0.1 * rng.normal(size=(5, 4))

    def c1(labels):
        margins = labels * np.einsum("nrd,kd->knr", features, models)
        gradients = -np.einsum("knr,nr,nrd->knd", 1 / (1 + np.exp(margins)), labels, features) / 200
        estimate = estimate_descent(models, gradients)
        assert 0 < estimate.smoothness < 0.25 * (features**2).sum(axis=2).max()
        return convergence_constants(
            smoothness=estimate.smoothness,
            dissimilarity=estimate.dissimilarity,
            proximal_weight=1.0,
            strong_convexity=1.0 + estimate.curvature,
            cohort_size=100,
            coefficient=0.5,
        ).c1

    assert c1(labels) > 0
    opposed = labels * np.where(np.arange(8) < 4, -1, 1)[:, None]
    assert c1(opposed) < 0


@pytest.mark.parametrize(
    ("models", "gradients", "weights", "message"),
    [
        ([[0.0]], [[[1.0]]], None, "at least two models"),
        ([[0.0], [1.0]], [[[1.0]]], None, "expected .models, dimension"),
        ([[0.0], [0.0]], [[[1.0]], [[1.0]]], None, "no two models alike"),
        ([[0.0], [1.0]], [[[1.0], [-1.0]], [[1.0], [1.0]]], None, "mean gradient other than 0"),
        ([[0.0], [1.0]], [[[1.0]], [[2.0]]], [1.0, 2.0], "weights: expected"),
        ([[0.0], [1.0]], [[[1.0]], [[2.0]]], [-1.0], "weights: expected"),
        ([[0.0], [math.nan]], [[[1.0]], [[2.0]]], None, "expected finite"),
    ],
)
def test_unfit_gradients_are_refused(models, gradients, weights, message):
    with pytest.raises(ValueError, match=message):
        estimate_descent(models, gradients, weights)


@pytest.mark.parametrize("field", ["smoothness", "proximal_weight", "strong_convexity"])
def test_unfit_constants_are_refused_by_name(field):
    with pytest.raises(ValueError, match=f"{field}="):
        constants(**{field: 0.0})
