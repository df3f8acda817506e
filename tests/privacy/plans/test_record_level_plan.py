"""The plan for uploads of whole local models: its noise, its facts and its guarantees."""

import dataclasses
import math

import numpy as np
import pytest

from flower_ext.privacy import (
    ClippedSteps,
    FixedSizeSampling,
    FullParticipation,
    RecordLevelPlan,
    SeededNoise,
    gaussian_loss,
)
from flower_ext.privacy.theorems.assumptions import OWN_GRADIENTS
from tests.support.run_summary import run_summary
from tests.support.sums import aggregate

TARGET = {
    "epsilon": 10.0,
    "delta": 0.01,
    "sampling": FullParticipation(20),
    "num_examples": 3000,
    "rounds": 80,
    "clipping_norm": 20.0,
}
ONE_STEP = ClippedSteps(learning_rate=0.005, gradient_clipping_norm=1.0, num_examples=3000)
STEPS = dataclasses.replace(ONE_STEP, local_steps=7, batch_size=500)


def plan(**changes):
    facts = {
        "sampling": FullParticipation(20),
        "clipping_norm": 20.0,
        "noise_stddev": 0.1,
        "num_examples": 3000,
        "rounds": 80,
        "delta": 0.01,
    }
    return RecordLevelPlan(**{**facts, **changes})


def epsilons(the_plan, rounds=80):
    guarantees = the_plan.guarantees(run_summary(rounds=rounds))
    return {guarantee.basis: guarantee.epsilon for guarantee in guarantees}


def test_the_published_target_is_met_with_its_worst_case_beside_it():
    calibrated = RecordLevelPlan.for_target(**TARGET, basis="published")
    assert calibrated.noise_stddev == pytest.approx(0.00809, rel=1e-3)
    assert epsilons(calibrated)["published"] == pytest.approx(10.0)
    assert epsilons(calibrated)["provable"] > 1e8


@pytest.mark.parametrize("steps", [None, ONE_STEP, STEPS])
def test_the_provable_target_is_met_and_not_with_less_noise(steps):
    calibrated = RecordLevelPlan.for_target(**TARGET, steps=steps)
    assert epsilons(calibrated)["provable"] == pytest.approx(10.0, rel=1e-4)
    less = dataclasses.replace(calibrated, noise_stddev=calibrated.noise_stddev / 1.5)
    more = dataclasses.replace(calibrated, noise_stddev=calibrated.noise_stddev * 1.5)
    assert epsilons(less)["provable"] > 10.5
    assert epsilons(more)["provable"] < 9.5


@pytest.mark.parametrize("steps", [None, ONE_STEP, STEPS])
def test_published_and_provable_are_those_of_the_calibrations(steps):
    the_plan = plan(steps=steps)
    for_one = RecordLevelPlan.for_target(
        **{**TARGET, "epsilon": 1.0, "rounds": 30}, basis="published"
    )
    published = for_one.noise_stddev / the_plan.upload_stddev
    if steps is None:
        loss = gaussian_loss(0.1 / 40.0, releases=30, delta=0.01)
    else:
        releases = 30 * steps.uses_per_round
        loss = gaussian_loss(0.1 / steps.sensitivity, releases=releases, delta=0.01)
    assert epsilons(the_plan, 30) == {"published": published, "provable": loss.epsilon}
    spent = the_plan.spent(run_summary(rounds=30))
    assert spent == {"epsilon_published": published, "epsilon_provable": loss.epsilon}


@pytest.mark.parametrize("steps", [None, STEPS])
def test_clipped_steps_assume_that_each_gradient_is_of_one_record(steps):
    _, provable = plan(steps=steps).guarantees(run_summary(rounds=30))
    assert (OWN_GRADIENTS in provable.assumptions) == (steps is not None)


@pytest.mark.parametrize("steps", [None, ONE_STEP, STEPS])
def test_the_published_number_states_a_records_effect_on_an_upload(steps):
    published, _ = plan(steps=steps).guarantees(run_summary(rounds=30))
    holds = 40.0 if steps is None else min(40.0, steps.upload_sensitivity)
    assert any(f"what holds is {holds:.4g})" in c.text for c in published.conditions)


def test_a_published_epsilon_needs_equal_upload_noise_with_and_without_steps():
    model = RecordLevelPlan.for_target(**TARGET, basis="published")
    steps = RecordLevelPlan.for_target(**TARGET, basis="published", steps=STEPS)
    assert steps.noise_stddev == pytest.approx(model.noise_stddev / math.sqrt(7))
    assert steps.upload_stddev == pytest.approx(model.upload_stddev)
    assert epsilons(steps)["provable"] < epsilons(model)["provable"]


def test_the_server_takes_the_plain_mean_of_what_arrives():
    uploads = [{"w": np.full(3, value)} for value in (1.0, 2.0, 6.0)]
    mean = aggregate(plan(), uploads, cohort_size=20, noise=SeededNoise(0), like=uploads[0])
    np.testing.assert_allclose(mean.value["w"], 3.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": FixedSizeSampling(20, 5)}, "expected FullParticipation"),
        ({"clipping_norm": 0.0}, r"clipping_norm=0\.0: expected a number from 1e-30 to 1e30"),
        ({"clipping_norm": math.inf}, "clipping_norm=inf"),
        ({"noise_stddev": math.inf}, "noise_stddev=inf"),
        ({"noise_stddev": 0.0}, r"noise_stddev=0\.0: expected a number from 1e-30 to 1e30"),
        ({"num_examples": 0}, "num_examples=0: expected an integer >= 1"),
        ({"rounds": 0}, "rounds=0: expected an integer >= 1"),
        ({"delta": 1.0}, r"delta=1\.0: expected a number in \(0, 1\)"),
        ({"num_examples": 2999, "steps": STEPS}, "num_examples=2999: expected 3000, as in Clipped"),
    ],
)
def test_bad_plans_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(**changes)


@pytest.mark.parametrize("basis", ["published", "provable"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 0.0}, r"epsilon=0\.0: expected a finite number > 0"),
        ({"epsilon": -1.0}, r"epsilon=-1\.0"),
        ({"rounds": 0}, "rounds=0: expected an integer >= 1"),
        ({"delta": 0.0}, r"delta=0\.0"),
    ],
)
def test_bad_targets_are_refused_by_name(basis, changes, message):
    with pytest.raises(ValueError, match=message):
        RecordLevelPlan.for_target(**{**TARGET, **changes}, basis=basis)


def test_the_log_says_where_the_noise_is():
    assert "in each local step" not in plan().describe()
    assert "noise stddev 0.1 in each local step" in plan(steps=STEPS).describe()
