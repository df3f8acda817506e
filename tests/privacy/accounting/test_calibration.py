"""Calibrated noise meets its target, and only just."""

import math
from functools import partial

import pytest

from flower_ext.privacy import (
    FixedSizeSampling,
    FullParticipation,
    PoissonSampling,
    TargetOutOfReach,
    calibrate_noise_multiplier,
    gaussian_loss,
)
from flower_ext.privacy.accounting import calibration
from flower_ext.privacy.accounting import pld as accounting
from flower_ext.privacy.accounting.accountant import privacy_loss_of
from flower_ext.privacy.accounting.events import Release
from tests.support.grids import grid
from tests.support.losses import privacy_loss
from tests.support.targets import random_targets, without_accountant


@pytest.fixture
def searching_by(monkeypatch):
    """Let searches ask an accountant by name, because PLD takes long for many settings."""

    def choose(accountant):
        loss_of = partial(privacy_loss_of, accountant=accountant)
        monkeypatch.setattr(calibration, "privacy_loss_of", loss_of)

    return choose


@pytest.mark.parametrize("settings", grid([4, 30], lambda settings: settings == 4))
def test_no_calibrated_noise_exceeds_its_target_and_a_little_less_noise_would(
    settings, searching_by
):
    for setting in random_targets(settings, seed=0):
        target = setting["epsilon"]
        searching_by(setting["accountant"])
        sigma = calibrate_noise_multiplier(**without_accountant(setting))
        terms = {name: value for name, value in setting.items() if name != "epsilon"}
        terms["relation"] = setting["sampling"].default_relation
        assert privacy_loss(noise_multiplier=sigma, **terms).epsilon <= target, setting
        if sigma > 0.01:
            less = privacy_loss(noise_multiplier=0.99 * sigma, **terms).epsilon
            assert less > target, setting


def test_an_unreachable_target_is_an_error_that_says_what_to_change():
    with pytest.raises(TargetOutOfReach, match="raise epsilon or delta"):
        calibrate_noise_multiplier(
            epsilon=1e-9, delta=1e-9, sampling=FullParticipation(10), rounds=10_000
        )


def test_a_target_that_other_releases_exceed_by_themselves_is_blamed_on_them():
    terms = {"delta": 1e-5, "sampling": FullParticipation(10), "rounds": 1}
    one = Release(
        sampling=terms["sampling"],
        noise_multiplier=2.0,
        relation=terms["sampling"].default_relation,
    )
    spent = privacy_loss_of({one: 3}, delta=1e-5).epsilon
    with pytest.raises(TargetOutOfReach, match=f"other releases, .* alone spend ε = {spent:.4g}"):
        calibrate_noise_multiplier(epsilon=0.99 * spent, other_releases={one: 3}, **terms)
    assert calibrate_noise_multiplier(epsilon=1.1 * spent, other_releases={one: 3}, **terms) > 2.0


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf])
def test_unfit_targets_are_refused(epsilon):
    with pytest.raises(ValueError, match="epsilon"):
        calibrate_noise_multiplier(
            epsilon=epsilon, delta=1e-3, sampling=FullParticipation(10), rounds=1
        )


SELDOM = PoissonSampling(1_000, 0.01)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("sampling", [SELDOM, FixedSizeSampling(1_000, 10)])
def test_a_delta_above_the_chance_of_being_drawn_needs_no_noise(
    sampling, accountant, monkeypatch, searching_by
):
    monkeypatch.setattr(accounting, "pld_epsilon", None)  # the answer needs no grid
    searching_by(accountant)
    chance = 1 - 0.99**20
    above = {"delta": 1.000001 * chance, "epsilon": 0.001, "sampling": sampling}
    assert calibrate_noise_multiplier(rounds=20, **above) <= 2e-3


def test_without_noise_epsilon_is_zero_only_for_deltas_above_the_draw_probability():
    # With next to no noise, a release is (0, δ) for δ = 1 - (1 - q)^T, and for no smaller δ.
    chance = 1 - 0.99**20
    terms = {"sampling": SELDOM, "rounds": 20, "relation": SELDOM.default_relation}
    assert privacy_loss(noise_multiplier=1e-2, delta=1.0001 * chance, **terms).epsilon == 0
    assert privacy_loss(noise_multiplier=1e-2, delta=0.99 * chance, **terms).epsilon > 1_000


def test_millions_of_rounds_take_few_grids_and_keep_the_target(monkeypatch):
    grids, exact = [], accounting.pld_epsilon
    monkeypatch.setattr(
        accounting, "pld_epsilon", lambda *a, **k: grids.append(k["interval"]) or exact(*a, **k)
    )
    sampling, rounds = PoissonSampling(10**6, 1e-3), 2 * 10**6
    sigma = calibrate_noise_multiplier(
        epsilon=2.0, delta=1e-5, sampling=sampling, rounds=rounds, tolerance=0.02
    )
    assert len(grids) < 20
    terms = {"delta": 1e-5, "sampling": sampling, "rounds": rounds}
    terms["relation"] = sampling.default_relation
    spent = privacy_loss(noise_multiplier=sigma, **terms)
    assert 1.94 < spent.epsilon <= 2.0
    assert spent.accountant == "PLD"
    # The central limit: one Gaussian with a shift of q √(T (exp σ⁻² - 1)).
    shift = 1e-3 * math.sqrt(rounds * math.expm1(sigma**-2))
    limit = gaussian_loss(1 / shift, releases=1, delta=1e-5).epsilon
    assert spent.epsilon == pytest.approx(limit, rel=0.01)
