import dataclasses
import math

import numpy as np
import pytest
import torch

from flower_ext.privacy import (
    FixedSizeSampling,
    LocalObjective,
    ObjectivePerturbation,
    OutputPerturbation,
    PerturbationPlan,
    SecureNoise,
)
from flower_ext.privacy.mechanisms.round_mechanism import RoundDiscarded
from flower_ext.privacy.theorems.upcycled_theorem import (
    epsilons_by_client,
    perturbation_guarantees,
    upcycled_theorem_6_2,
)
from flower_ext.training import LocalTraining
from tests.support.run_summary import run_summary
from tests.support.sums import aggregate

OUTPUT = OutputPerturbation(clipping_norm=2.0, noise_stddev=0.5)
OBJECTIVE = ObjectivePerturbation(rate=4.0)
KNOWN = LocalObjective(
    convex=True,
    generalised_linear=True,
    gradient_bound=1.0,
    curvature_bound=0.25,
    feature_norm_bound=1.0,
    memoryless=True,
)
RUN = {"num_examples": {0: 40, 1: 90, 2: 60}, "participations": {0: 2, 1: 7, 2: 1}}
EXACT = LocalTraining(tolerance=1e-12, proximal_weight=0.1)
SOLVED = dataclasses.replace(
    KNOWN, proximal_weight=0.1, distance_to_minimiser=1e-12 / 0.1, rounding=2.0**-24
)


def a_run(*, num_examples=RUN["num_examples"], participations=RUN["participations"], **facts):
    solved = {"training": {"local": EXACT}, "proximal_weight": 0.1}
    return run_summary(participations, num_examples=num_examples, **{**solved, **facts})


def plan(**changes) -> PerturbationPlan:
    facts = {
        "sampling": FixedSizeSampling(10, 3),
        "perturbation": OUTPUT,
        "objective": KNOWN,
        "delta": 1e-3,
    }
    return PerturbationPlan(**{**facts, **changes})


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, math.nan])
def test_unfit_deltas_are_refused_by_name(delta):
    with pytest.raises(ValueError, match="delta="):
        plan(delta=delta)


def test_a_plan_without_facts_of_the_problem_takes_nothing_for_granted():
    bare = PerturbationPlan(sampling=FixedSizeSampling(10, 3), perturbation=OUTPUT, delta=0.1)
    assert bare.objective == LocalObjective()
    assert bare.objective.stability(1_000_000) == math.inf


def test_a_plan_cannot_be_changed_after_it_was_made():
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan().delta = 0.5


@pytest.mark.parametrize(
    ("perturbation", "words"),
    [(OUTPUT, ("clipping norm 2", "noise stddev 0.5")), (OBJECTIVE, ("objective", "rate 4"))],
)
def test_a_plan_describes_the_clients_asked_and_their_protection(perturbation, words):
    described = plan(perturbation=perturbation).describe()
    for word in ("3 from 10", *words):
        assert word in described


def test_spent_is_the_mean_and_the_largest_over_clients():
    spent = plan().spent(a_run())
    published = [
        upcycled_theorem_6_2(OUTPUT, num_examples=n, participations=m, delta=1e-3)
        for n, m in ((40, 2), (90, 7), (60, 1))
    ]
    assert spent["epsilon_published"] == pytest.approx(max(published))
    assert spent["epsilon_published_mean"] == pytest.approx(sum(published) / 3)
    provable = [
        both[1] for both in epsilons_by_client(OUTPUT, SOLVED, a_run(), delta=1e-3).values()
    ]
    assert spent["epsilon_provable"] == pytest.approx(max(provable))
    assert spent["epsilon_provable_mean"] == pytest.approx(sum(provable) / 3)
    assert len({round(value, 9) for value in spent.values()}) == 4


def test_guarantees_match_the_plan_and_agree_with_its_spend():
    for perturbation in (OUTPUT, OBJECTIVE):
        the_plan = plan(perturbation=perturbation)
        run = a_run(secure_noise=False, not_covered=["scores"])
        guarantees = the_plan.guarantees(run)
        assert guarantees == perturbation_guarantees(perturbation, SOLVED, run, delta=1e-3)
        spent = the_plan.spent(a_run())
        for guarantee in guarantees:
            assert spent[f"epsilon_{guarantee.basis}"] == guarantee.epsilon
            assert "Not covered: scores" in guarantee.statement()
        assert "SIMULATION" in guarantees[1].statement()
        assert "SIMULATION" not in the_plan.guarantees(a_run(secure_noise=True))[1].statement()


def test_what_is_not_promised_is_not_logged_as_a_number():
    by_sgd = {"local": dataclasses.replace(EXACT, tolerance=0.0)}
    spent = plan(perturbation=OBJECTIVE).spent(a_run(training=by_sgd))
    assert set(spent) == {"epsilon_published", "epsilon_published_mean"}
    unknown_size = {"num_examples": {0: 40}, "participations": {0: 1, 5: 1}}
    spent = plan().spent(a_run(**unknown_size))
    assert set(spent) == {"epsilon_provable", "epsilon_provable_mean"}


def test_nothing_is_spent_before_anybody_was_asked():
    for perturbation in (OUTPUT, OBJECTIVE):
        spent = plan(perturbation=perturbation).spent(a_run(num_examples={}, participations={}))
        assert set(spent.values()) == {0.0}


def test_uploads_are_averaged_unchanged_over_the_clients_that_answered():
    """No noise, clipping or expected size, because each upload is protected already."""
    uploads = [{"a": np.array([1e3, 0.0]), "b": np.array(3.0)}, {"a": np.ones(2), "b": np.array(1)}]
    like = {"a": np.zeros(2), "b": np.zeros(())}
    made = aggregate(plan(), uploads, cohort_size=3, noise=SecureNoise(), like=like)
    np.testing.assert_array_equal(made.value["a"], [500.5, 0.5])
    assert made.value["b"] == 2.0
    assert made.answered == 2
    assert made.topped_up_stddev == 0.0


@pytest.mark.parametrize("like", [np.zeros(3, np.float32), torch.zeros(3, dtype=torch.float64)])
def test_the_average_has_the_type_of_the_model(like):
    made = aggregate(
        plan(), [{"a": like + 2}], cohort_size=1, noise=SecureNoise(), like={"a": like}
    )
    assert type(made.value["a"]) is type(like)
    assert made.value["a"].dtype == like.dtype


def test_a_round_that_nobody_answers_is_discarded():
    with pytest.raises(RoundDiscarded, match="none of 3 clients"):
        aggregate(plan(), [], cohort_size=3, noise=SecureNoise(), like={"a": np.zeros(2)})


def test_uploads_of_another_shape_are_refused_not_broadcast():
    with pytest.raises(ValueError, match="'a' has shape"):
        aggregate(
            plan(), [{"a": np.ones(1)}], cohort_size=1, noise=SecureNoise(), like={"a": np.zeros(2)}
        )
