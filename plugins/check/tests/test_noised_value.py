"""The noise of a mechanism's noised value has the ε that the mechanism's guarantee states."""

from dataclasses import dataclass

import pytest

from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import FederatedStrategy
from flower_ext.privacy import (
    AdaptiveClipping,
    CorrelatedNoise,
    FixedSizeSampling,
    FullParticipation,
    NonPrivatePlan,
    ObjectivePerturbation,
    OutputPerturbation,
    PerturbationPlan,
    RecordLevelPlan,
    SecureSum,
    SpacedSampling,
    gaussian_loss,
)
from flower_ext_check.mechanisms import mechanism_of
from flower_ext_check.noised_value import noised_value
from tests.support.plans import mechanism, steps
from tests.support.run_summary import run_summary

SUMMARY = run_summary({0: 1}, rounds=1, num_examples={0: 50})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"noise_placement": "server", "clipping_norm": AdaptiveClipping()},
        {"sampling": FixedSizeSampling(100, 20), "noise_placement": SecureSum()},
        {
            "sampling": SpacedSampling(100, 10, 10, 6),
            "noise_placement": "server",
            "correlation": CorrelatedNoise(),
        },
    ],
)
def test_the_noise_of_a_sum_is_that_of_its_release(changes):
    noised = mechanism(**changes)
    value = noised_value(noised, SUMMARY, 10)
    assert value.stddev / value.sensitivity == pytest.approx(noised.release.noise_multiplier)
    is_seen = changes.get("noise_placement", "client") == "client"
    assert (value.upload_stddev > 0) == is_seen


@pytest.mark.parametrize("local_steps", [None, 3])
def test_noise_of_models_and_steps_has_a_record_level_plans_epsilon(local_steps):
    plan = RecordLevelPlan(
        sampling=FullParticipation(4),
        clipping_norm=1.0,
        noise_stddev=2.0,
        num_examples=50,
        rounds=1,
        delta=1e-5,
        steps=local_steps and steps(local_steps=local_steps),
    )
    value = noised_value(plan, SUMMARY, 4)
    (stated,) = (claim for claim in plan.guarantees(SUMMARY) if claim.basis == "provable")
    multiplier = value.stddev / value.sensitivity
    loss = gaussian_loss(multiplier, releases=value.per_round, delta=1e-5)
    assert loss.epsilon == pytest.approx(stated.epsilon)
    assert value.upload_stddev == pytest.approx(2.0 * (local_steps or 1) ** 0.5)


def test_the_noise_of_perturbed_models_has_the_epsilon_of_the_plan():
    perturbation = OutputPerturbation(clipping_norm=1.0, noise_stddev=2.0)
    plan = PerturbationPlan(sampling=FullParticipation(1), perturbation=perturbation, delta=1e-5)
    value = noised_value(plan, SUMMARY, 1)
    (stated,) = (claim for claim in plan.guarantees(SUMMARY) if claim.basis == "provable")
    loss = gaussian_loss(value.stddev / value.sensitivity, releases=1, delta=1e-5)
    assert loss.epsilon == pytest.approx(stated.epsilon)


def test_without_gaussian_noise_in_a_message_no_value_is_stated():
    everyone = FullParticipation(1)
    perturbed = PerturbationPlan(
        sampling=everyone, perturbation=ObjectivePerturbation(rate=1.0), delta=1e-5
    )
    assert noised_value(perturbed, SUMMARY, 1) is None
    assert noised_value(NonPrivatePlan(sampling=everyone), SUMMARY, 1) is None


@dataclass(frozen=True, kw_only=True)
class OtherNoise(NonPrivatePlan):
    """A plan of a user, with noise that the check does not know."""

    delta = 1e-5


def test_the_noise_of_an_unknown_mechanism_is_not_called_hidden_in_training():
    strategy = FederatedStrategy(DPFedAvg(), OtherNoise(sampling=FullParticipation(3)))
    unmeasured = mechanism_of(strategy, rounds=1).unmeasured
    assert "to which value OtherNoise adds noise" in unmeasured
