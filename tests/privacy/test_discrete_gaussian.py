"""Discrete Gaussian noise: its distribution, sums of shares, and what they are worth."""

import math
from itertools import pairwise

import mpmath
import numpy as np
import pytest
from scipy import stats

from flower_ext.privacy import SecureNoise, SeededNoise
from flower_ext.privacy.discrete_gaussian import (
    LEAST_STDDEV,
    MOST_STDDEV,
    _table,
    draw,
    share_stddev,
    sum_distance,
)

LUCK = 1e-10
"""Probability with which a test of chance may fail."""


def pmf(stddev, reach):
    """Probabilities of -reach, …, reach in 60 digits."""
    with mpmath.workdps(60):
        weights = [
            mpmath.exp(-(mpmath.mpf(k) ** 2) / (2 * mpmath.mpf(stddev) ** 2))
            for k in range(reach + 1)
        ]
        whole = weights[0] + 2 * mpmath.fsum(weights[1:])
        half = [weight / whole for weight in weights]
        return [*half[:0:-1], *half]


@pytest.mark.parametrize("stddev", [16.0, 20.7, 100.0])
def test_the_table_is_the_distribution_function_to_128_bits(stddev):
    high, low = _table(stddev)
    found = [(int(a) << 64) + int(b) for a, b in zip(high, low, strict=True)]
    reach = len(found)
    exact = pmf(stddev, reach)
    with mpmath.workdps(60):
        summed = exact[reach]
        for m, entry in enumerate(found):
            if m:
                summed += 2 * exact[reach + m]
            assert abs(mpmath.mpf(entry) - summed * 2**128) < 1.001
        # What lies beyond the table is too rare to matter.
        assert 1 - summed < mpmath.mpf(2) ** -128
    assert found == sorted(found)


@pytest.mark.parametrize("stddev", [16.0, 37.3, 6_554.0])
def test_draws_are_discrete_gaussian(stddev):
    count = 400_000
    drawn = draw(stddev, count, np.random.default_rng(3))
    assert drawn.dtype == np.int64
    # Cells of equal width, in a chi-squared test against the exact probabilities.
    width = max(1, round(stddev / 8))
    reach = 4 * round(stddev / width) * width + width // 2
    edges = np.arange(-reach, reach + 1, width)
    normal = stats.norm(scale=stddev)
    if stddev < 100:
        exact = np.array([float(p) for p in pmf(stddev, reach + width)])
        places = np.arange(-reach - width, reach + width + 1)
        expected = np.array([exact[(places >= a) & (places < b)].sum() for a, b in pairwise(edges)])
    else:
        expected = np.diff(normal.cdf(edges - 0.5))
    expected = np.append(expected, 1 - expected.sum()) * count
    found = np.histogram(drawn, bins=edges)[0].astype(float)
    last = np.count_nonzero(drawn == edges[-1])  # NumPy's last cell is closed
    found[-1] -= last
    found = np.append(found, count - found.sum())
    assert stats.chisquare(found, expected).pvalue > LUCK


def test_a_draw_is_decided_by_128_bits_where_64_do_not():
    """A generator whose first 64 bits are those of a table entry."""
    high, low = _table(16.0)
    place = 20

    class Fixed:
        def __init__(self, second):
            self.second = second

        def integers(self, least, most, size=None, **_):
            return np.array([high[place]]) if size else self.second

        def bytes(self, count):
            return bytes(count)

    below, above = int(low[place]) - 1, int(low[place])
    assert draw(16.0, 1, Fixed(np.uint64(below)))[0] == place
    assert draw(16.0, 1, Fixed(np.uint64(above)))[0] == place + 1


def convolved(shares, probabilities):
    """Distribution of the sum of so many draws, in 60 digits."""
    with mpmath.workdps(60):
        found = probabilities
        for _ in range(shares - 1):
            found = [
                mpmath.fsum(
                    found[j] * probabilities[i - j]
                    for j in range(max(0, i - len(probabilities) + 1), min(len(found), i + 1))
                )
                for i in range(len(found) + len(probabilities) - 1)
            ]
        return found


@pytest.mark.parametrize("stddev", [1.0, 1.2])
@pytest.mark.parametrize("shares", [2, 3])
def test_a_sum_of_shares_is_discrete_gaussian_up_to_the_bound_of_steps_1_to_3(stddev, shares):
    """At stddevs so small that the bound is one to be seen."""
    reach = 14
    found = convolved(shares, pmf(stddev, reach))
    whole = pmf(math.sqrt(shares) * stddev, shares * reach)
    with mpmath.workdps(60):
        theta = [
            2.01 * mpmath.exp(-2 * mpmath.pi**2 * stddev**2 * k / (k + 1)) for k in range(1, shares)
        ]
        bound = sum(mpmath.log((1 + t) / (1 - t)) for t in theta)
        middle = range(len(found) // 2 - 4, len(found) // 2 + 5)
        worst = max(abs(mpmath.log(found[i] / whole[i])) for i in middle)
    assert worst <= bound
    assert worst > bound / 1e4  # it is this that the bound bounds


def test_a_discrete_gaussian_is_a_rounding_of_a_continuous_one_up_to_the_bound_of_step_4():
    """Smoothing by 0.6 in place of 4, where the difference is one to be seen."""
    smoothed, stddev = mpmath.mpf("0.6"), mpmath.mpf(2)
    with mpmath.workdps(30):
        rest = mpmath.sqrt(stddev**2 - smoothed**2)

        def rounded(k):
            def density(y):
                around = mpmath.fsum(
                    mpmath.exp(-((x - y) ** 2) / (2 * smoothed**2)) for x in range(-14, 15)
                )
                here = mpmath.exp(-((k - y) ** 2) / (2 * smoothed**2)) / around
                return here * mpmath.npdf(y, 0, rest)

            return mpmath.quad(density, mpmath.linspace(-10, 10, 21))

        theta = 2.01 * mpmath.exp(-2 * mpmath.pi**2 * smoothed**2)
        exact = pmf(2.0, 30)
        for k in range(4):
            assert abs(mpmath.log(rounded(k) / exact[30 + k])) <= 2.1 * theta


def test_shares_are_worth_what_they_were_made_for_and_the_distance_is_nothing():
    for total, shares in ((2**16, 100), (2**17 - 1, 1), (2.0**16, 10**6)):  # and fewer of them
        stddev = share_stddev(total, shares)
        assert shares * (stddev**2 - 16) == pytest.approx(total**2, rel=1e-12)
        assert sum_distance(stddev, shares) < 1e-135
        for honest in (1, (shares + 1) // 2):
            worth = honest * stddev**2 - 16
            assert worth >= total**2 * honest / shares * (1 - 1e-12)
    with pytest.raises(ValueError, match="expected 16 to 262144"):
        share_stddev(2**19, 1)
    for outside in (LEAST_STDDEV / 1.01, MOST_STDDEV * 1.01, math.nan):
        with pytest.raises(ValueError, match="discrete noise"):
            draw(outside, 1, np.random.default_rng(0))


def test_noise_is_added_to_whole_numbers_by_both_sources():
    cells = {"a": np.full((200, 300), 7), "b": np.array(-3)}
    seeded = SeededNoise(5).add_discrete_gaussian(cells, 50.0)
    again = SeededNoise(5).add_discrete_gaussian(cells, 50.0)
    secure = SecureNoise().add_discrete_gaussian(cells, 50.0)
    for name, array in cells.items():
        assert seeded[name].shape == secure[name].shape == array.shape
        assert seeded[name].dtype == secure[name].dtype == np.int64
        np.testing.assert_array_equal(seeded[name], again[name])
    for found in (seeded, secure):
        noise = found["a"] - 7
        assert abs(noise.mean()) < 7 * 50 / math.sqrt(noise.size)
        assert noise.std() == pytest.approx(50, rel=7 / math.sqrt(2 * noise.size))
    assert (secure["a"] != SecureNoise().add_discrete_gaussian(cells, 50.0)["a"]).mean() > 0.9
