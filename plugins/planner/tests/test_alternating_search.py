"""Searching λ and T in turn ends, and never chooses a diverged run."""

import math

import pytest

from flower_ext_planner.search import Outcome, alternating_search

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
    weight = plan.global_weight
    assert plan.rounds == min(ROUNDS, key=lambda T: bowl(T, weight).loss)
    assert weight == min(WEIGHTS, key=lambda w: bowl(plan.rounds, w).unfairness)


def test_each_pair_is_run_once():
    pairs = []

    def run(T, weight):
        pairs.append((T, weight))
        return bowl(T, weight)

    plan = alternating_search(run, rounds=ROUNDS, global_weights=WEIGHTS)
    assert len(pairs) == len(set(pairs)) == len(plan.outcomes)


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
    ("candidates", "message"),
    [
        ({"rounds": (), "global_weights": (1.0,)}, r"rounds=\[\]: expected"),
        ({"rounds": (0,), "global_weights": (1.0,)}, r"rounds=\[0\]: expected"),
        ({"rounds": (1,), "global_weights": ()}, "global_weights=.*expected"),
        ({"rounds": (1,), "global_weights": (2.1,)}, "global_weight=2.1: expected"),
        ({"rounds": (1,), "global_weights": (1.0,), "start": -1.0}, "global_weight=-1.0"),
    ],
)
def test_searches_without_sense_are_refused(candidates, message):
    with pytest.raises(ValueError, match=message):
        alternating_search(bowl, **candidates)
