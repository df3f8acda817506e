"""Schedules of the even rounds' coefficient c_m."""

import math

import pytest

from flower_ext.algorithms.upcycled import Decaying, proximal_ratio

ROUNDS = range(1, 101)


@pytest.mark.parametrize("mu", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("penalty", [0.0, 0.5, 100.0])
def test_the_proximal_ratio_solves_the_first_order_condition_of_the_even_round(mu, penalty):
    # Eq. 5 in one dimension, with w_i = w̄ = after: its derivative is zero at the extrapolation.
    before, after = 2.0, -1.5
    c = proximal_ratio(proximal_weight=mu, penalty=penalty)
    w = after + c * (after - before)
    derivative = mu * (before - after) + penalty * (w - after) + mu * (w - after)
    assert derivative == pytest.approx(0, abs=1e-12 * (mu + penalty))
    assert 0 < c <= 1


def test_without_a_penalty_the_proximal_ratio_repeats_the_whole_step():
    assert proximal_ratio(proximal_weight=0.3, penalty=0.0) == 1


def test_the_proximal_ratio_falls_with_the_penalty_and_grows_with_the_weight():
    def ratio(mu, penalty):
        return proximal_ratio(proximal_weight=mu, penalty=penalty)

    assert ratio(1, 3) < ratio(1, 2) < ratio(2, 2)
    assert ratio(5, 10) == pytest.approx(ratio(1, 2))  # only λ/μ matters


@pytest.mark.parametrize(("c", "mu"), [(0.2, 0.5), (1.0, 2.0)])
def test_decaying_is_the_proximal_ratio_of_penalties_growing_like_root_m(c, mu):
    for m in ROUNDS:
        penalty = mu * (math.sqrt(m) / c - 1)
        expected = proximal_ratio(proximal_weight=mu, penalty=penalty)
        assert Decaying(c)(m) == pytest.approx(expected, rel=1e-12)


def test_decaying_starts_at_its_first_value_and_halves_in_fourfold_rounds():
    schedule = Decaying(0.8)
    values = [schedule(m) for m in ROUNDS]
    assert values[0] == 0.8
    assert values == sorted(values, reverse=True)
    assert len(set(values)) == len(values)
    assert schedule(4 * 7) == pytest.approx(schedule(7) / 2)


def test_the_mean_decaying_coefficient_has_the_order_of_corollary_5_8():
    # Σ c/√m ≤ 2c√M: with bounded steps the bound of Theorem 5.6 is O(1/√M).
    for M in (1, 10, 1000):
        mean = sum(Decaying(0.9)(m) for m in range(1, M + 1)) / M
        assert 0.9 / math.sqrt(M) <= mean <= 2 * 0.9 / math.sqrt(M)


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("schedule", "field"),
    [
        (Decaying, "first"),
        (lambda value: proximal_ratio(proximal_weight=1.0, penalty=value), "penalty"),
        (lambda value: proximal_ratio(proximal_weight=value, penalty=1.0), "proximal_weight"),
    ],
)
def test_negative_and_infinite_parameters_are_refused_by_name_and_value(schedule, field, bad):
    with pytest.raises(ValueError, match=f"{field}={bad!r}: expected a finite number"):
        schedule(bad)


def test_a_proximal_ratio_without_a_proximal_weight_is_refused():
    with pytest.raises(ValueError, match="proximal_weight=0: expected a finite number > 0"):
        proximal_ratio(proximal_weight=0, penalty=1.0)
