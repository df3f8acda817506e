"""Searches over λ and T return the minimum of the bound."""

import math

import numpy as np
import pytest

from flower_ext_planner.convergence import DittoProblem, convergence_bound
from flower_ext_planner.fairness import LinearFairness
from flower_ext_planner.search import best_schedule
from tests.support.grids import grid

PROBLEM = DittoProblem(
    strong_convexity=1.0,
    smoothness=2.0,
    initial_gap=1.0,
    initial_distance=4.0,
    dimension=10,
    num_clients=20,
    learning_rate=0.05,
    personal_learning_rate=0.05,
    gradient_bound=1.0,
    model_spread=0.5,
)
FAIRNESS = LinearFairness(
    num_clients=20,
    num_examples=100,
    dimension=10,
    feature_energy=100.0,
    label_variance=10.0,
    model_variance=0.1,
)


@pytest.mark.parametrize("basis", ["published", "provable"])
@pytest.mark.parametrize("variance", grid([1e-6, 1e-4, 1e-2], (1e-4).__eq__))
def test_the_joint_search_is_brute_force_over_a_grid_of_weights(variance, basis):
    plan = best_schedule(
        PROBLEM, FAIRNESS, variance_per_round=variance, max_rounds=150, basis=basis
    )
    weights, best = np.linspace(0, 2, 2001), (math.inf, 0, 0.0)
    for T in range(1, 151):
        spread = FAIRNESS.unfairness(weights, upload_variance=variance * T, basis=basis)
        weight = float(weights[np.argmin(spread)])
        value = float(
            convergence_bound(
                PROBLEM, global_weight=weight, variance_per_round=variance, basis=basis
            ).after(T)
        )
        best = min(best, (value, T, weight))
    if plan.rounds:
        assert plan.value == pytest.approx(best[0], rel=0.01)
        spread = FAIRNESS.unfairness(weights, upload_variance=variance * plan.rounds, basis=basis)
        assert plan.global_weight == pytest.approx(weights[np.argmin(spread)], abs=0.00051)
    else:
        assert best[0] >= PROBLEM.initial_distance * 0.99


def test_best_rounds_is_the_minimum_of_the_bound_it_returns():
    plan = best_schedule(PROBLEM, 0.8, variance_per_round=1e-4, max_rounds=400)
    assert 0 < plan.rounds < 400
    assert plan.value == plan.bound.after(np.arange(1, 401)).min()
    assert plan.global_weight == 0.8


def test_where_no_number_of_rounds_helps_the_answer_is_none():
    settings = {"variance_per_round": 1e6, "max_rounds": 30}
    far = DittoProblem(**{**vars(PROBLEM), "initial_gap": 1e3})
    assert best_schedule(far, 1.0, **settings).rounds == 0
    # The first round still receives a model without noise.
    assert best_schedule(PROBLEM, 1.0, **settings).rounds == 1
    started_at_the_optimum = DittoProblem(**{**vars(PROBLEM), "initial_distance": 0.0})
    assert best_schedule(started_at_the_optimum, FAIRNESS, **settings).rounds == 0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("rate", "max_rounds", "basis"),
    grid([(1.0, 3_000, "published"), (30.0, 20, "provable")], lambda case: case[1] == 20),
)
def test_the_joint_search_takes_no_rounds_where_the_bound_says_nothing(rate, max_rounds, basis):
    changes = {"personal_learning_rate": rate, "strong_convexity": 0.5, "smoothness": 1.0}
    far = DittoProblem(**{**vars(PROBLEM), **changes})
    loud = LinearFairness(**{**vars(FAIRNESS), "label_variance": 1.0})
    plan = best_schedule(far, loud, variance_per_round=1e-5, max_rounds=max_rounds, basis=basis)
    assert math.inf in plan.bound.after(np.arange(1, max_rounds + 1))
    assert plan.rounds == 0


def test_problems_that_do_not_belong_together_and_no_rounds_are_refused():
    other = LinearFairness(**{**vars(FAIRNESS), "dimension": 11})
    with pytest.raises(ValueError, match="dimension=11 of the fairness problem: expected 10"):
        best_schedule(PROBLEM, other, variance_per_round=1.0, max_rounds=5)
    with pytest.raises(ValueError, match="max_rounds=0"):
        best_schedule(PROBLEM, FAIRNESS, variance_per_round=1.0, max_rounds=0)
    with pytest.raises(ValueError, match="global_weight=3"):
        best_schedule(PROBLEM, 3, variance_per_round=1.0, max_rounds=5)
