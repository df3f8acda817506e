"""Discrete Gaussian noise: its distribution, sums of shares, and their privacy."""

import math
from bisect import bisect_right
from fractions import Fraction
from itertools import pairwise

import mpmath
import numpy as np
import pytest
from scipy import stats

from flower_ext.privacy import SecureNoise, SeededNoise
from flower_ext.privacy.mechanisms import discrete_gaussian
from flower_ext.privacy.mechanisms.discrete_gaussian import (
    _SMOOTHED,
    _UNDECIDED,
    LEAST_STDDEV,
    MOST_STDDEV,
    _table,
    _tables,
    draw,
    share_stddev,
)

LUCK = 1e-10
"""Probability with which a statistical test may fail."""


def pmf(stddev, reach):
    """Return the probabilities of -reach, …, reach with 60 digits."""
    with mpmath.workdps(60):
        weights = [
            mpmath.exp(-(mpmath.mpf(k) ** 2) / (2 * mpmath.mpf(stddev) ** 2))
            for k in range(reach + 1)
        ]
        whole = weights[0] + 2 * mpmath.fsum(weights[1:])
        half = [weight / whole for weight in weights]
        return [*half[:0:-1], *half]


@pytest.mark.parametrize("variance", [16**2, Fraction(20.7) ** 2, Fraction(90_001, 9), 21_160])
def test_a_table_is_the_distribution_function_to_128_bits(variance):
    table = _table(Fraction(variance))
    entry_values = entries(table)
    assert len(entry_values) == 2 * table.reach
    with mpmath.workdps(60):
        exact = pmf(
            mpmath.sqrt(mpmath.mpf(Fraction(variance).numerator) / variance.denominator),
            table.reach,
        )
        summed = mpmath.mpf(0)
        for entry, probability in zip(entry_values, exact, strict=False):
            summed += probability
            assert -0.001 < summed * 2**128 - entry < 1.001
        # Values beyond the table are too rare to matter.
        assert 2 * exact[0] * table.reach < mpmath.mpf(2) ** -128
    assert entry_values == sorted(entry_values)
    assert entry_values[-1] == 2**128 - 1


def entries(table):
    """The distribution function as whole numbers of 2⁻¹²⁸."""
    return [(int(a) << 64) + int(b) for a, b in zip(table.high, table.low, strict=True)]


def test_sixteen_bits_decide_what_128_would_and_nothing_else():
    table = _table(Fraction(50) ** 2)
    entry_values = entries(table)
    for first in range(2**16):
        least = bisect_right(entry_values, first << 112)
        most = bisect_right(entry_values, ((first + 1) << 112) - 1)
        expected = least - table.reach if least == most else _UNDECIDED
        assert table.decided[first] == expected
    assert 0.002 < np.mean(table.decided == _UNDECIDED) < 0.01


def test_a_draw_from_a_table_counts_entries_up_to_128_random_bits():
    """At the edges of every entry, where 16 bits decide, 64 bits, or all of them."""
    table = _table(Fraction(16) ** 2)
    entry_values = entries(table)
    for place in [0, 1, 90, table.reach, 300, len(entry_values) - 1]:
        for number in (
            entry_values[place] - 1,
            entry_values[place],
            entry_values[place] + 1,
            entry_values[place] ^ 1 << 60,
        ):
            if not 0 <= number < 2**128:
                continue
            high, low = divmod(number, 2**64)
            words = iter(  # the first word's lowest bits are the first draw's first
                np.array([word], dtype="<u8") for word in (high >> 48, high % 2**48 << 16, low)
            )
            drawn = table.draw(1, lambda count, words=words: next(words)[:count])
            assert drawn[0] == bisect_right(entry_values, number) - table.reach


@pytest.mark.parametrize("stddev", [16.0, 17.3, 71.3, 6_554.0, 2.0**18])
def test_both_tables_together_have_the_variance_that_was_asked_for_exactly(stddev, monkeypatch):
    requests = []
    monkeypatch.setattr(discrete_gaussian, "_table", lambda variance: requests.append(variance))
    step, *_ = _tables.__wrapped__(stddev)
    coarse, fine = requests
    assert step**2 * coarse + fine == Fraction(stddev) ** 2
    smoothing = coarse * fine / Fraction(stddev) ** 2  # r² of step 8
    assert smoothing >= 8.4
    assert 2.1 * 2.01 * mpmath.exp(-2 * mpmath.pi**2 * float(smoothing)) < 1e-71


@pytest.mark.parametrize("fine", [10, 1])
def test_the_sum_of_both_tables_is_discrete_gaussian_within_step_2(fine):
    """By summing all its ways; with less smoothing the difference is one to be seen."""
    step, stddev = 4, 64
    with mpmath.workdps(120):
        b2 = mpmath.mpf(fine * step**2)
        a2 = (stddev**2 - b2) / step**2

        def weight(z):
            return mpmath.fsum(
                mpmath.exp(-(x * x) / (2 * a2) - (z - step * x) ** 2 / (2 * b2))
                for x in range(-100, 116)  # all others are below 1e-200
            )

        ratios = [
            weight(z) / mpmath.exp(-mpmath.mpf(z * z) / (2 * stddev**2)) for z in range(-3, 60, 3)
        ]
        theta = 2.01 * mpmath.exp(-2 * mpmath.pi**2 * a2 * b2 / stddev**2)
        worst = mpmath.log(max(ratios) / min(ratios))
    assert theta / 100 < worst <= 2.1 * theta
    assert (theta < 1e-79) == (fine == 10)


@pytest.mark.parametrize("stddev", [16.0, 64.0, 80.5])
def test_every_whole_number_has_its_probability(stddev):
    """Cells of one number: a fault in one table would show in a pattern with its step."""
    count = 400_000
    drawn = draw(stddev, count, np.random.default_rng(8))
    reach = round(3 * stddev)
    expected = np.array([float(p) for p in pmf(stddev, 14 * round(stddev))])
    middle = len(expected) // 2
    expected = expected[middle - reach : middle + reach + 1] * count
    counts = np.bincount(drawn[np.abs(drawn) <= reach] + reach, minlength=2 * reach + 1)
    rest = count - expected.sum()
    counts, expected = np.append(counts, count - counts.sum()), np.append(expected, rest)
    assert stats.chisquare(counts, expected).pvalue > LUCK


def test_draws_are_independent_of_each_other():
    drawn = draw(6_554.0, 300_001, np.random.default_rng(2)) / 6_554
    for lag in (1, 2, 3, 4, 7, 2**15):
        assert abs(np.mean(drawn[lag:] * drawn[:-lag])) < 7 / math.sqrt(len(drawn) - lag)
        squares = drawn**2 - 1
        assert abs(np.mean(squares[lag:] * squares[:-lag])) < 14 / math.sqrt(len(drawn) - lag)


@pytest.mark.parametrize("stddev", [16.0, 37.3, 6_554.0, 2.0**18])
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
    counts = np.histogram(drawn, bins=edges)[0].astype(float)
    last = np.count_nonzero(drawn == edges[-1])  # NumPy's last cell is closed
    counts[-1] -= last
    counts = np.append(counts, count - counts.sum())
    assert stats.chisquare(counts, expected).pvalue > LUCK


def convolved(shares, probabilities):
    """Return the distribution of the sum of so many draws, with 60 digits."""
    with mpmath.workdps(60):
        total = probabilities
        for _ in range(shares - 1):
            total = [
                mpmath.fsum(
                    total[j] * probabilities[i - j]
                    for j in range(max(0, i - len(probabilities) + 1), min(len(total), i + 1))
                )
                for i in range(len(total) + len(probabilities) - 1)
            ]
        return total


@pytest.mark.parametrize("stddev", [1.0, 1.2])
@pytest.mark.parametrize("shares", [2, 3])
def test_a_sum_of_shares_is_discrete_gaussian_within_steps_1_to_3(stddev, shares):
    """The standard deviations are so small that the bound is measurable."""
    reach = 14
    distribution = convolved(shares, pmf(stddev, reach))
    whole = pmf(math.sqrt(shares) * stddev, shares * reach)
    with mpmath.workdps(60):
        theta = [
            2.01 * mpmath.exp(-2 * mpmath.pi**2 * stddev**2 * k / (k + 1)) for k in range(1, shares)
        ]
        bound = sum(mpmath.log((1 + t) / (1 - t)) for t in theta)
        middle = range(len(distribution) // 2 - 4, len(distribution) // 2 + 5)
        worst = max(abs(mpmath.log(distribution[i] / whole[i])) for i in middle)
    assert worst <= bound
    assert worst > bound / 1e4  # the difference that the bound bounds


def test_a_discrete_gaussian_rounds_a_continuous_one_within_step_4():
    """Smoothing is 0.6 in place of 4, so that the difference is measurable."""
    smoothed, stddev = 0.6, 2.0
    rest = math.sqrt(stddev**2 - smoothed**2)
    # The trapezoidal rule is exact to rounding for functions as smooth as these.
    y, step = np.linspace(-16, 16, 3201, retstep=True)
    kernel = np.exp(-((np.arange(-20, 21)[:, None] - y) ** 2) / (2 * smoothed**2))
    rounded = (kernel / kernel.sum(axis=0) * stats.norm.pdf(y, 0, rest)).sum(axis=1) * step
    theta = 2.01 * math.exp(-2 * math.pi**2 * smoothed**2)
    exact = pmf(2.0, 30)
    for k in range(4):
        assert abs(math.log(rounded[20 + k] / float(exact[30 + k]))) <= 2.1 * theta


def distance(shares):
    """Return τ of steps 3 and 4 for one coordinate of a sum of the smallest shares."""
    squares = [mpmath.mpf(LEAST_STDDEV) ** 2 / 2] * (shares - 1)
    squares += [mpmath.mpf(_SMOOTHED), mpmath.mpf(LEAST_STDDEV) ** 2]
    thetas = [2.01 * mpmath.exp(-2 * mpmath.pi**2 * square) for square in squares]
    return mpmath.fsum(mpmath.log((1 + t) / (1 - t)) for t in thetas)


def test_the_distance_of_a_whole_run_is_below_what_its_assumptions_say():
    with mpmath.workdps(400):
        assert distance(shares=1_000) < mpmath.mpf(10) ** -135
        assert distance(shares=1_000) * 10**9 * 10**6 < mpmath.mpf(10) ** -120


def test_shares_are_worth_what_they_were_made_for():
    for total, shares in ((2**16, 100), (2**17 - 1, 1), (2.0**16, 10**6)):  # and fewer of them
        stddev = share_stddev(total, shares)
        assert shares * (stddev**2 - 16) == pytest.approx(total**2, rel=1e-12)
        for honest in (1, (shares + 1) // 2):
            worth = honest * stddev**2 - 16
            assert worth >= total**2 * honest / shares * (1 - 1e-12)
    with pytest.raises(ValueError, match="expected 16 to 262144"):
        share_stddev(2**19, 1)
    with pytest.raises(ValueError, match="shares=0"):
        share_stddev(2**16, 0)
    with pytest.raises(ValueError, match="count=-1"):
        draw(50.0, -1, np.random.default_rng(0))
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
    for noised in (seeded, secure):
        noise = noised["a"] - 7
        assert abs(noise.mean()) < 7 * 50 / math.sqrt(noise.size)
        assert noise.std() == pytest.approx(50, rel=7 / math.sqrt(2 * noise.size))
    assert (secure["a"] != SecureNoise().add_discrete_gaussian(cells, 50.0)["a"]).mean() > 0.9
