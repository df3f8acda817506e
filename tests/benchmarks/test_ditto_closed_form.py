"""Eqns 16 to 19 of DP-Ditto compared with the bound that they state."""

import math

import numpy as np
import pytest

from benchmarks.ditto.closed_form import coefficients, line_below, search_limit
from tests.support.ditto_bounds import BASES, bound, equal_rates, random_bound


def by_coefficients(b, T):
    c = coefficients(b)
    local, shared = b.personal_rate**T, b.global_rate**T
    return (c.h1 + c.h2 * T + c.h3 * T**2) * local + (c.h4 + c.h5 * T) * shared + c.h6 * T + c.h7


@pytest.mark.parametrize("basis", BASES)
def test_the_coefficients_of_equation_16_are_the_bound(basis):
    rng, T, seen = np.random.default_rng(0), np.arange(200), 0
    for _ in range(50):
        b = random_bound(rng, basis)
        if b.converges:
            seen += 1
            np.testing.assert_allclose(by_coefficients(b, T), b.after(T), rtol=1e-9)
            assert coefficients(b).h3 == 0
    assert seen > 10


def test_coefficients_for_equal_rates_match_the_bound_except_the_last_printed():
    b, T = equal_rates(), np.arange(300)
    np.testing.assert_allclose(by_coefficients(b, T), b.after(T), rtol=1e-10)
    c, a = coefficients(b), b.personal_rate
    printed = (
        (c.h1 + c.h2 * T + c.h3 * T**2) * a**T
        - b.residual / (1 - a)
        - b.coupling / (1 - a)  # ℋ₄ of Eqn 18b
    )
    assert printed[0] < b.initial_distance == pytest.approx(b.after(0))
    assert printed[-1] < 0  # for a squared distance
    assert b.after(299) == pytest.approx(c.h6 * 299 + c.h7, rel=1e-6)


@pytest.mark.parametrize("basis", BASES)
def test_the_line_is_below_the_bound_and_the_search_limit_suffices(basis):
    rng, T, inner = np.random.default_rng(3), np.arange(2001), 0
    for _ in range(150):
        b = random_bound(rng, basis)
        if not b.converges:
            continue
        intercept, slope = line_below(b)
        values = b.after(T)
        assert (intercept + slope * T <= values * (1 + 1e-9)).all()
        best = b.best_rounds(2000)
        assert best == int(np.argmin(values))
        assert best <= search_limit(b)
        beyond = T[search_limit(b) < T]
        assert (values[beyond] > values[0] * (1 - 1e-9)).all()
        inner += 0 < best < 2000
    assert inner > 10


def test_the_line_holds_for_equal_rates_where_the_printed_line_fails():
    for changes in ({}, {"initial_gap": 0.0}, {"residual": 2.0}, {"gap_per_planned_round": 1.0}):
        b, T = equal_rates(**changes), np.arange(5000)
        intercept, slope = line_below(b)
        assert slope > 0
        assert (intercept + slope * T <= b.after(T) + 1e-9).all()
        assert b.best_rounds(4999) == int(np.argmin(b.after(T)))
    c, rate = coefficients(equal_rates()), 0.9
    printed = c.h3 * T**2 * rate**T  # Eqn 19 less its constant: it returns to 0
    assert printed.max() == 0


def test_a_bound_that_converges_without_noise_has_no_search_limit():
    assert search_limit(bound(variance=0.0)) == math.inf
    for mu in np.arange(1, 200) / 7:
        b = bound(
            strong_convexity=mu, smoothness=mu, learning_rate=1 / mu, personal_learning_rate=0.01
        )
        assert math.isfinite(search_limit(b))


def test_rates_that_do_not_contract_have_no_closed_form():
    with pytest.raises(ValueError, match=r"expected numbers in \(0, 1\)"):
        coefficients(equal_rates(personal_rate=1.1))
