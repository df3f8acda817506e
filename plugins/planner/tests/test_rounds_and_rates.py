"""Calibrated rounds and rates meet their target, and only just."""

from functools import partial

import pytest

from flower_ext.privacy import (
    FixedSizeSampling,
    FullParticipation,
    PoissonSampling,
    TargetOutOfReach,
    privacy_loss_of,
)
from flower_ext_planner import rounds_and_rates
from flower_ext_planner.rounds_and_rates import calibrate_rounds, calibrate_sampling_rate
from tests.support.grids import grid
from tests.support.losses import privacy_loss
from tests.support.targets import random_targets, without_accountant


@pytest.fixture
def searching_by(monkeypatch):
    """Let searches ask an accountant by name, because PLD takes long for many settings."""

    def choose(accountant):
        loss_of = partial(privacy_loss_of, accountant=accountant)
        monkeypatch.setattr(rounds_and_rates, "privacy_loss_of", loss_of)

    return choose


@pytest.mark.parametrize("settings", grid([12, 40], lambda settings: settings == 12))
def test_no_calibrated_number_of_rounds_exceeds_its_target_and_one_more_would(
    settings, searching_by
):
    for setting in random_targets(settings, seed=1):
        if isinstance(setting["sampling"], PoissonSampling):
            setting["accountant"] = "rdp"  # PLD takes a minute over the rounds that are tried
        terms = {name: value for name, value in setting.items() if name != "rounds"}
        searching_by(setting["accountant"])
        rounds = calibrate_rounds(noise_multiplier=5.0, **without_accountant(terms))
        target = terms.pop("epsilon")
        terms |= {"relation": setting["sampling"].default_relation, "noise_multiplier": 5.0}
        assert privacy_loss(rounds=rounds, **terms).epsilon <= target, setting
        more = rounds + (1 if rounds < 2**16 else rounds // 1000)  # inexact beyond 100,000
        assert privacy_loss(rounds=more, **terms).epsilon > target, setting


@pytest.mark.parametrize("settings", grid([4, 15], lambda settings: settings == 4))
def test_no_calibrated_sampling_rate_exceeds_its_target_and_a_little_more_would(
    settings, searching_by
):
    for setting in random_targets(settings, seed=2):
        population = setting.pop("sampling").population
        target = setting["epsilon"]
        try:
            searching_by(setting["accountant"])
            known = without_accountant(setting)
            rate = calibrate_sampling_rate(population=population, noise_multiplier=2.0, **known)
        except TargetOutOfReach:
            continue
        terms = {name: value for name, value in setting.items() if name != "epsilon"}
        sampling = PoissonSampling(population, rate)
        terms |= {
            "sampling": sampling,
            "relation": sampling.default_relation,
            "noise_multiplier": 2.0,
        }
        assert privacy_loss(**terms).epsilon <= target, setting
        if rate < 0.99:
            terms["sampling"] = PoissonSampling(population, 1.01 * rate)
            assert privacy_loss(**terms).epsilon > target, setting


def test_not_even_one_round_may_fit():
    sampling = FullParticipation(10)
    assert calibrate_rounds(epsilon=0.1, delta=1e-5, sampling=sampling, noise_multiplier=0.5) == 0


@pytest.mark.parametrize("sampling", [PoissonSampling(1_000, 0.01), FixedSizeSampling(1_000, 10)])
def test_a_delta_above_the_chance_of_being_drawn_limits_only_the_rounds(sampling, searching_by):
    searching_by("rdp")
    delta = 1.000001 * (1 - 0.99**20)
    target = {"delta": delta, "epsilon": 0.001, "sampling": sampling}
    assert 20 <= calibrate_rounds(noise_multiplier=1e-3, **target) < 22
