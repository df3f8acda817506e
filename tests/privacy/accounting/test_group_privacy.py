"""The loss of a group of records is a valid bound, and a tight one."""

import math

import numpy as np
import pytest
from scipy import stats

from flower_ext.privacy import (
    DpSgd,
    FullParticipation,
    NeighboringRelation,
    PoissonSampling,
)
from flower_ext.privacy.accounting.group_privacy import _binomial, group_loss
from flower_ext.privacy.theorems.uldp_group_theorem import uldp_group_guarantees
from tests.support.grids import grid
from tests.support.group_losses import DELTA, FIGURE_2, SMALL, tight
from tests.support.losses import privacy_loss

QUIET = DpSgd(noise_multiplier=20.0, sampling_rate=0.01, steps=100_000)


@pytest.mark.parametrize("silo", [SMALL, FIGURE_2, QUIET], ids=["small", "figure 2", "quiet"])
def test_one_record_is_the_group_of_one(silo):
    loss = privacy_loss(
        sampling=PoissonSampling(1_000, silo.sampling_rate),
        noise_multiplier=silo.noise_multiplier,
        rounds=silo.steps,
        delta=DELTA,
        relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
    )
    assert tight(silo, 1) == pytest.approx(loss.epsilon, rel=2e-2)


def test_figure_2_at_one_record_is_above_what_is_tight():
    assert tight(FIGURE_2, 1) < 2.85


def test_without_sampling_a_group_of_k_has_k_times_the_sensitivity():
    everyone = DpSgd(noise_multiplier=6.0, sampling_rate=1.0, steps=10)
    loss = privacy_loss(
        sampling=FullParticipation(1),
        noise_multiplier=2.0,
        rounds=10,
        delta=DELTA,
        relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
    )
    assert tight(everyone, 3) == pytest.approx(loss.epsilon)


def divergence(silo, group_size, epsilon):
    """Return δ(ε) of one step by numerical integration, the larger of adding and removing."""
    x = np.linspace(-15, 15 + group_size / silo.noise_multiplier, 400_001)
    taken = [math.comb(group_size, n) for n in range(group_size + 1)]
    q = silo.sampling_rate
    without = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    with_group = sum(
        taken[n]
        * q**n
        * (1 - q) ** (group_size - n)
        * np.exp(-((x - n / silo.noise_multiplier) ** 2) / 2)
        for n in range(group_size + 1)
    ) / math.sqrt(2 * math.pi)
    step = x[1] - x[0]
    one = np.maximum(with_group - math.exp(epsilon) * without, 0).sum() * step
    other = np.maximum(without - math.exp(epsilon) * with_group, 0).sum() * step
    return max(one, other)


@pytest.mark.parametrize("group_size", grid([1, 3, 7], lambda size: size == 3))
def test_one_step_is_tight_it_holds_and_a_tenth_less_would_not(group_size):
    one_step = DpSgd(noise_multiplier=1.0, sampling_rate=0.2, steps=1)
    epsilon = tight(one_step, group_size, delta=1e-3)
    assert divergence(one_step, group_size, epsilon) <= 1e-3 * (1 + 1e-6)
    assert divergence(one_step, group_size, 0.9 * epsilon) > 1e-3


@pytest.mark.parametrize("split", [(2, 2), (3, 1)])
def test_records_spread_over_two_silos_lose_no_more_than_in_one(split):
    sigma, rate = 1.0, 0.3
    x = np.linspace(-9, 13, 1_101)
    normal = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)

    def taken(count):
        return sum(
            math.comb(count, n)
            * rate**n
            * (1 - rate) ** (count - n)
            * np.exp(-((x - n / sigma) ** 2) / 2)
            for n in range(count + 1)
        ) / math.sqrt(2 * math.pi)

    apart, nobody = np.outer(taken(split[0]), taken(split[1])), np.outer(normal, normal)
    area = (x[1] - x[0]) ** 2
    together = DpSgd(noise_multiplier=sigma, sampling_rate=rate, steps=1)
    for epsilon in (0.5, 1.5, 3.0):
        added = np.maximum(apart - math.exp(epsilon) * nobody, 0).sum() * area
        removed = np.maximum(nobody - math.exp(epsilon) * apart, 0).sum() * area
        assert max(added, removed) <= divergence(together, sum(split), epsilon)


def test_nothing_trained_loses_nothing():
    assert tight(DpSgd(noise_multiplier=1.0, sampling_rate=0.1, steps=0), 9) == 0.0


@pytest.mark.parametrize(("rate", "group_size"), [(0.01, 1), (0.01, 2), (1e-4, 5)])
def test_where_delta_covers_all_that_is_lost_epsilon_is_zero(rate, group_size):
    silo = DpSgd(noise_multiplier=5.0, sampling_rate=rate, steps=10)
    assert tight(silo, group_size, delta=1e-2) == 0.0


@pytest.mark.parametrize(("count", "rate"), [(1, 0.5), (64, 0.01), (127, 0.5), (2_000, 0.99)])
def test_the_number_of_taken_records_is_binomial(count, rate):
    values, probabilities = _binomial(count, rate)
    assert sum(probabilities) == pytest.approx(1, abs=1e-12)
    mean = np.dot(values, probabilities)
    assert mean == pytest.approx(count * rate, rel=1e-9)
    assert np.dot(np.square(np.array(values) - mean), probabilities) == pytest.approx(
        count * rate * (1 - rate), rel=1e-6
    )


@pytest.mark.parametrize(("count", "rate"), [(300, 0.5), (3_000, 0.02), (20_000, 0.1)])
def test_many_numbers_of_taken_records_are_rounded_up_never_down(count, rate):
    values, probabilities = _binomial(count, rate)
    assert values == sorted(set(values))
    # No number of records is exceeded less often than under the binomial distribution.
    at_most = np.cumsum(probabilities)
    assert (at_most <= stats.binom.cdf(values, count, rate) + 1e-12).all()
    assert np.dot(values, probabilities) == pytest.approx(count * rate, rel=1e-9)


@pytest.mark.parametrize(("count", "rate"), [(40, 0.01), (3, 1e-20), (400, 0.9), (2_000, 0.3)])
def test_what_is_negligible_is_counted_as_all_records_not_left_out(count, rate):
    """Each number of records is exceeded at least as often as under the binomial distribution."""
    values, probabilities = map(np.array, _binomial(count, rate))
    assert values[-1] == count
    assert probabilities[-1] > 0 or stats.binom.pmf(count, count, rate) == 0
    for least in range(count + 1):
        expected = stats.binom.sf(least - 1, count, rate)
        assert probabilities[values >= least].sum() >= expected * (1 - 1e-9)


def test_thousands_of_records_cost_between_a_mean_step_and_every_step():
    silo, group_size = DpSgd(noise_multiplier=5.0, sampling_rate=0.005, steps=1_000), 5_000
    # Steps that take exactly the mean number, 25; by Jensen's inequality the mixture leaks more.
    shift = group_size * silo.sampling_rate / silo.noise_multiplier * math.sqrt(silo.steps)
    epsilon = tight(silo, group_size)
    assert shift**2 / 2 < epsilon < 2 * shift**2
    assert epsilon < uldp_group_guarantees(silo, group_size=group_size, delta=DELTA)[0].epsilon


def test_where_one_step_gives_everything_away_sampling_is_not_counted():
    silo = DpSgd(noise_multiplier=0.01, sampling_rate=0.5, steps=10)
    plain = DpSgd(noise_multiplier=0.01, sampling_rate=1.0, steps=10)
    assert tight(silo, 1_000) == tight(plain, 1_000) < math.inf


def test_hundreds_of_records_are_accounted_too():
    assert 1e5 < tight(FIGURE_2, 1_000) < math.inf


def test_unfit_arguments_are_refused_by_name():
    with pytest.raises(ValueError, match="group_size=0: expected an integer >= 1"):
        group_loss(SMALL, group_size=0, delta=DELTA)
    with pytest.raises(ValueError, match="delta=1"):
        group_loss(SMALL, group_size=2, delta=1.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("noise_multiplier", 0.0), ("sampling_rate", 0.0), ("sampling_rate", 1.1), ("steps", -1)],
)
def test_unfit_training_is_refused_by_name(field, value):
    facts = {"noise_multiplier": 1.0, "sampling_rate": 0.1, "steps": 10}
    with pytest.raises(ValueError, match=f"{field}="):
        DpSgd(**{**facts, field: value})
