import math

import numpy as np
import pytest

from flower_ext.planning import (
    DittoProblem,
    LinearFairness,
    Outcome,
    alternating_search,
    best_schedule,
    convergence_bound,
)
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
    facts = {"variance_per_round": 1e6, "max_rounds": 30}
    far = DittoProblem(**{**vars(PROBLEM), "initial_gap": 1e3})
    assert best_schedule(far, 1.0, **facts).rounds == 0
    # The first round still receives a model without noise.
    assert best_schedule(PROBLEM, 1.0, **facts).rounds == 1
    started_at_the_optimum = DittoProblem(**{**vars(PROBLEM), "initial_distance": 0.0})
    assert best_schedule(started_at_the_optimum, FAIRNESS, **facts).rounds == 0


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


# Alternating --------------------------------------------------------------------------------------

ROUNDS, WEIGHTS = (5, 10, 20, 40), (0.1, 0.5, 1.0, 2.0)


def bowl(T, weight):
    """Return a loss with its minimum at T = 20/λ^½, and a spread with its minimum at λ = 10/T."""
    return Outcome(
        loss=(math.log(T) - math.log(20 / math.sqrt(weight))) ** 2,
        unfairness=(weight - 10 / T) ** 2,
    )


@pytest.mark.parametrize("start", WEIGHTS)
def test_alternating_ends_where_neither_search_wants_to_move(start):
    plan = alternating_search(bowl, rounds=ROUNDS, global_weights=WEIGHTS, start=start)
    assert plan.settled
    here = plan.global_weight
    assert plan.rounds == min(ROUNDS, key=lambda T: bowl(T, here).loss)
    assert here == min(WEIGHTS, key=lambda w: bowl(plan.rounds, w).unfairness)


def test_each_pair_is_run_once():
    asked = []

    def run(T, weight):
        asked.append((T, weight))
        return bowl(T, weight)

    plan = alternating_search(run, rounds=ROUNDS, global_weights=WEIGHTS)
    assert len(asked) == len(set(asked)) == len(plan.outcomes)


def test_a_circle_ends_with_its_smallest_loss_and_says_so():
    def chase(T, weight):
        wanted = {0.1: 10, 1.0: 20}[weight]
        return Outcome(
            loss=abs(T - wanted) + T / 1000,
            unfairness=abs(weight - {10: 1.0, 20: 0.1}[T]),
        )

    plan = alternating_search(chase, rounds=(10, 20), global_weights=(0.1, 1.0))
    assert not plan.settled
    assert (plan.rounds, plan.global_weight) in ((10, 1.0), (20, 0.1))
    losses = [chase(T, w).loss for T, w in ((10, 1.0), (20, 0.1))]
    assert plan.outcomes[plan.rounds, plan.global_weight].loss == min(losses)


def test_runs_that_diverge_are_never_chosen_over_others():
    def run(T, weight):
        return bowl(T, weight) if T < 40 else Outcome(loss=math.nan, unfairness=math.nan)

    assert alternating_search(run, rounds=(40, 5, 10), global_weights=WEIGHTS).rounds < 40


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"rounds": (), "global_weights": (1.0,)}, r"rounds=\[\]: expected"),
        ({"rounds": (0,), "global_weights": (1.0,)}, r"rounds=\[0\]: expected"),
        ({"rounds": (1,), "global_weights": ()}, "global_weights=.*expected"),
        ({"rounds": (1,), "global_weights": (2.1,)}, "global_weight=2.1: expected"),
        ({"rounds": (1,), "global_weights": (1.0,), "start": -1.0}, "global_weight=-1.0"),
    ],
)
def test_searches_without_sense_are_refused(facts, said):
    with pytest.raises(ValueError, match=said):
        alternating_search(bowl, **facts)
