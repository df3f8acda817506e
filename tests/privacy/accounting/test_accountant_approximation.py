"""Sums that are not quite sampled Gaussians cost more, and never less than what they show."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import optimize, stats

from flower_ext.privacy import FullParticipation, NeighboringRelation, PoissonSampling
from flower_ext.privacy.accounting.accountant import privacy_loss_of, with_approximation_error
from flower_ext.privacy.accounting.events import Release
from flower_ext.privacy.accounting.gaussian import gaussian_loss
from tests.support.grids import grid

ONE = NeighboringRelation.ADD_OR_REMOVE_ONE
DELTA = 1e-5


def release(rate=1.0, **facts):
    sampling = FullParticipation(100) if rate == 1 else PoissonSampling(100, rate)
    return Release(**{"sampling": sampling, "noise_multiplier": 1.0, "relation": ONE, **facts})


def epsilon(*args, rounds=1, **facts):
    return privacy_loss_of({release(*args, **facts): rounds}, delta=DELTA).epsilon


def delta_between(one, other, epsilon):
    """The hockey-stick divergence of two discrete laws."""
    return float(np.maximum(one - math.exp(epsilon) * other, 0).sum())


def laws(rate, shift):
    """A sum with a unit that is drawn or not and leaves a trace, and one without the unit.

    Both sums are off by the approximation_error, in opposite directions.
    """
    edges = np.arange(-12, 14, 0.005)

    def masses(mean):
        return np.diff(stats.norm.cdf(edges - mean))

    with_unit = (1 - rate) * masses(2 * shift) + rate * masses(1 + 2 * shift)
    return with_unit, masses(-shift)


@pytest.mark.parametrize("approximation_error", [1e-9, 1e-5, 1e-3])
@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_what_the_worst_residue_shows_is_below_the_bound(rate, approximation_error):
    bound = epsilon(rate, approximation_error=approximation_error)
    one, other = laws(rate, approximation_error)
    for pair in ((one, other), (other, one)):
        assert delta_between(*pair, bound) <= DELTA
    least = optimize.brentq(lambda e: delta_between(one, other, e) - DELTA, 0, 20)
    assert least <= bound <= least + 300 * approximation_error + 0.01


def test_without_the_residue_more_would_be_promised_than_holds():
    one, other = laws(0.1, 0.005)
    assert delta_between(one, other, epsilon(0.1)) > 1.01 * DELTA
    assert delta_between(one, other, epsilon(0.1, approximation_error=0.005)) <= DELTA


def test_the_approximation_error_of_many_rounds_adds_up_as_squares():
    rounds = epsilon(approximation_error=1e-5, noise_multiplier=5.0, rounds=100)
    one_sum = {release(approximation_error=1e-4): 1}
    whole = with_approximation_error(
        lambda d: gaussian_loss(5.0, releases=100, delta=d), one_sum, DELTA
    )
    assert rounds == pytest.approx(whole.epsilon, rel=1e-12)
    assert rounds > gaussian_loss(5.0, releases=100, delta=DELTA).epsilon


@pytest.mark.parametrize("noise_multiplier", grid([0.05, 0.4, 5.0], lambda noise: noise > 0.1))
def test_a_negligible_approximation_error_costs_next_to_nothing_at_any_noise(noise_multiplier):
    exact = epsilon(0.2, noise_multiplier=noise_multiplier)
    assert (
        exact
        < epsilon(0.2, noise_multiplier=noise_multiplier, approximation_error=1e-9)
        < 1.001 * exact
    )


def test_a_large_residue_promises_nothing():
    assert math.isinf(epsilon(approximation_error=0.1))
    assert math.isinf(epsilon(approximation_error=1e-3, rounds=10_000))


def test_no_residue_changes_no_bit_of_a_loss_and_survives_a_ledger():
    plain = privacy_loss_of({release(0.2): 100}, delta=DELTA)
    assert with_approximation_error(lambda d: plain, {release(0.2): 100}, DELTA) is plain
    full = release(0.2, approximation_error=1e-9)
    assert Release.from_dict(full.to_dict()) == full
    bare = replace(full, approximation_error=0.0)
    assert Release.from_dict(bare.to_dict()) == bare


def test_an_error_that_no_delta_pays_for_has_an_infinite_epsilon():
    assert epsilon(approximation_error=30.0) == math.inf
