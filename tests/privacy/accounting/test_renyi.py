"""Rényi divergences are exact up to rounding, and rounding never makes them too small."""

import itertools
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from scipy import integrate, stats

from flower_ext.privacy.accounting.renyi import (
    _remainder_by_grid,
    _remainder_by_sum,
    sampled_gaussian_renyi,
)

NOISES, RATES = (0.2, 0.3, 1.0, 20.0, 1e4, 1e7), (1e-6, 1e-2, 0.3, 0.999)


def exactly(noise_multiplier, rate, order):
    """Return Equation 9 with 120 digits, so that the 1 cancels none of the remainder's digits."""
    with localcontext() as context:
        context.prec = 120
        sigma, q = Decimal(noise_multiplier), Decimal(rate)
        moment = sum(
            math.comb(order, i)
            * (1 - q) ** (order - i)
            * q**i
            * ((i * i - i) / (2 * sigma * sigma)).exp()
            for i in range(order + 1)
        )
        return float(moment.ln() / (order - 1))


def test_a_sum_that_everyone_is_in_has_the_divergence_of_two_gaussians():
    orders = (1.5, 2.0, 64.0)
    for sigma in NOISES:
        curve = sampled_gaussian_renyi(sigma, 1.0, orders)
        np.testing.assert_allclose(curve, [a / (2 * sigma**2) for a in orders], rtol=1e-12)


def test_what_is_computed_once_for_all_cannot_be_written_to():
    with pytest.raises(ValueError, match="read-only"):
        sampled_gaussian_renyi(1.0, 0.5, (2.0,))[0] = 0.0


def test_no_rounding_takes_a_divergence_below_its_exact_value_or_far_above():
    orders = (2, 3, 9, 64)
    for sigma, rate in itertools.product(NOISES, RATES):
        exact = [exactly(sigma, rate, order) for order in orders]
        ratio = sampled_gaussian_renyi(sigma, rate, orders) / exact
        assert (ratio >= 1).all(), (sigma, rate, ratio)
        assert (ratio < 1 + 1e-8).all(), (sigma, rate, ratio)


def test_the_grid_of_fractional_orders_matches_the_sum_at_integer_orders():
    for sigma, rate, order in itertools.product(NOISES, RATES, (2, 3, 9, 64)):
        by_grid = _remainder_by_grid(sigma, rate, float(order))
        assert by_grid == pytest.approx(_remainder_by_sum(sigma, rate, order), abs=5e-10)


@pytest.mark.parametrize("order", [1.1, 1.5, 2.5, 10.9])
@pytest.mark.parametrize(("sigma", "rate"), [(0.5, 0.01), (1.0, 0.7), (3.0, 0.2)])
def test_fractional_orders_are_the_integral_that_defines_them(sigma, rate, order):
    def density(z):
        ratio = 1 - rate + rate * math.exp((2 * z - 1) / (2 * sigma**2))
        return stats.norm.pdf(z, scale=sigma) * ratio**order

    bounds = (-12 * sigma, max(order, 2) + 12 * sigma)
    moment, _ = integrate.quad(density, *bounds, epsabs=0, epsrel=1e-12, limit=1000)
    (divergence,) = sampled_gaussian_renyi(sigma, rate, (order,))
    assert divergence == pytest.approx(math.log(moment) / (order - 1), rel=1e-7, abs=1e-11)


def test_divergences_never_fall_with_their_order_fractional_or_not():
    orders = (*(1 + tenth / 10 for tenth in range(1, 100)), 11.0, 12.0, 64.0)
    for sigma, rate in itertools.product((0.05, *NOISES), RATES):
        curve = sampled_gaussian_renyi(sigma, rate, orders)
        assert (curve > 0).all()
        assert (np.diff(curve) >= -1e-9 * curve[1:]).all(), (sigma, rate)


def test_without_a_fine_enough_grid_integer_orders_bound_fractional_orders():
    sigma, rate = 0.1, 0.1
    for order in (1.3, 2.5, 7.9):
        (bound,) = sampled_gaussian_renyi(sigma, rate, (order,))
        below, above = sampled_gaussian_renyi(
            sigma, rate, (max(2.0, math.floor(order)), math.ceil(order))
        )
        assert min(below, above) <= bound <= above
        # The grid is no bound here, but precise enough to tell on which side a bound must be.
        near = np.logaddexp(0.0, _remainder_by_grid(sigma, rate, order))
        assert bound >= near / (order - 1) * (1 - 1e-6)
