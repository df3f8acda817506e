"""Estimated constants of DP-Ditto's losses err to the safe side."""

import math
import tomllib
from dataclasses import asdict

import numpy as np
import pytest

from flower_ext_planner.convergence import DittoProblem
from tests.support.apps import DP_DITTO
from tests.support.linear_federation import LinearFederation

constants = DP_DITTO.module("loss_constants")
LossConstants, estimate_constants = constants.LossConstants, constants.estimate_constants


def quadratic_pilot(rounds=60, eta=0.2, seed=0):
    """Run gradient descent on clients with curvatures 0.5 to 4 and different optima."""
    rng = np.random.default_rng(seed)
    a, u = rng.uniform(0.5, 4.0, size=(5, 3)), rng.normal(size=(5, 3))
    w, models, gradients, losses = np.full(3, 3.0), [], [], []
    for _ in range(rounds):
        g = a * (w - u)
        models.append(w)
        gradients.append(g)
        losses.append(float((0.5 * a * (w - u) ** 2).sum(axis=1).mean()))
        w = w - eta * g.mean(axis=0)
    pilot = {"models": models, "gradients": gradients, "losses": losses, "local_optima": u}
    return pilot, a, u


def test_the_estimates_err_to_the_safe_side_and_by_little():
    pilot, a, u = quadratic_pilot()
    estimate = estimate_constants(**pilot)
    best = (a * u).mean(axis=0) / a.mean(axis=0)
    assert a.min() <= estimate.strong_convexity * (1 + 1e-9)
    assert estimate.smoothness <= a.max() * (1 + 1e-9)
    assert estimate.strong_convexity < 2 * a.min()
    assert estimate.smoothness > 0.5 * a.max()
    assert estimate.model_spread == pytest.approx(np.linalg.norm(u - best, axis=1).max(), rel=1e-3)
    assert estimate.gradient_bound == pytest.approx(
        np.linalg.norm(a * (3.0 - u), axis=1).max(), rel=1e-12
    )
    worst = max(np.square(3.0 - u).sum(axis=1).max(), np.square(3.0 - best).sum())
    assert estimate.initial_distance == pytest.approx(worst, rel=1e-6)
    assert estimate.initial_gap == pytest.approx(pilot["losses"][0] - pilot["losses"][-1])


def test_in_a_linear_world_the_curvature_is_exact_and_makes_a_problem():
    world = LinearFederation.draw(
        np.random.default_rng(1),
        num_clients=4,
        num_examples=9,
        dimension=3,
        feature_energy=6.0,
        label_variance=0.1,
        model_variance=0.2,
    )
    w, models = np.ones(3), []
    for _ in range(30):
        models.append(w)
        w = w - 0.3 * world.gradients(w).mean(axis=0)
    estimate = estimate_constants(
        models=models,
        gradients=[world.gradients(m) for m in models],
        losses=[world.losses(m).mean() for m in models],
        local_optima=world.local_models,
    )
    assert estimate.strong_convexity == pytest.approx(world.curvature, rel=1e-6)
    assert estimate.smoothness == pytest.approx(world.curvature, rel=1e-6)
    DittoProblem(
        **{**asdict(estimate), "smoothness": estimate.smoothness * (1 + 1e-9)},
        dimension=3,
        num_clients=4,
        learning_rate=0.3,
        personal_learning_rate=0.3,
    )
    # Personal optima of every λ are at most as far away as Ψ₂ says.
    for weight in (0.0, 0.4, 1.5, 2.0):
        best = world.personal_models(weight, np.zeros((4, 3)))
        assert np.square(best - 1.0).sum(axis=1).max() <= estimate.initial_distance * (1 + 1e-3)


def test_rounding_never_makes_the_smoothness_less_than_the_convexity():
    for seed in range(40):
        curvature, (start, step) = seed / 7 + 0.5, np.random.default_rng(seed).normal(size=2)
        models = np.array([[start], [start + step]])
        estimate = estimate_constants(
            models=models,
            gradients=curvature * models[:, None],
            losses=curvature / 2 * models[:, 0] ** 2,
            local_optima=[[0.0]],
        )
        assert estimate.smoothness >= estimate.strong_convexity


def test_the_gradients_of_the_linear_world_are_those_of_its_losses():
    world = LinearFederation.draw(
        np.random.default_rng(2),
        num_clients=3,
        num_examples=5,
        dimension=2,
        feature_energy=2.0,
        label_variance=0.3,
        model_variance=0.2,
    )
    v, h = np.array([0.3, -0.2]), 1e-6
    for axis in range(2):
        e = h * np.eye(2)[axis]
        slope = (world.losses(v + e) - world.losses(v - e)) / (2 * h)
        np.testing.assert_allclose(slope, world.gradients(v)[:, axis], atol=1e-8)
    np.testing.assert_allclose(world.gradients(world.local_models), 0, atol=1e-12)


def test_pilots_that_say_nothing_are_refused():
    pilot, *_ = quadratic_pilot(rounds=5)
    with pytest.raises(ValueError, match="expected rounds × weights"):
        estimate_constants(**{**pilot, "losses": pilot["losses"][:-1]})
    with pytest.raises(ValueError, match="expected finite numbers"):
        estimate_constants(**{**pilot, "losses": [math.nan] * 5})
    still = {**pilot, "models": np.ones((5, 3))}
    with pytest.raises(ValueError, match="in which the model moves"):
        estimate_constants(**still)
    uphill = {**pilot, "gradients": -np.asarray(pilot["gradients"])}
    with pytest.raises(ValueError, match="not strongly convex"):
        estimate_constants(**uphill)


def test_estimates_are_written_as_lines_of_a_settings_file():
    pilot, *_ = quadratic_pilot(rounds=5)
    estimate = estimate_constants(**pilot)
    lines = tomllib.loads(estimate.lines(dimension=3))
    assert lines.pop("dimension") == 3
    assert {name.replace("-", "_"): number for name, number in lines.items()} == asdict(estimate)
