"""Noised values lie on a public grid, so that their bits say nothing more."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from flower_ext.privacy import SecureNoise, SeededNoise
from flower_ext.privacy.mechanisms.noise import (
    noise_grid,
)
from tests.support.arrays import FLOATS, array_of

NUMBERS, TRIALS = 10_000, 200


def has_moved(upload: np.ndarray) -> bool:
    """Run Mironov's attack: near zero, a sum has fewer significant bits than noise by itself.

    If 0.01 was noised, a result below 2⁻¹⁰ is a difference of numbers of at least 2⁻⁷, and so a
    multiple of 2⁻⁵⁹. Noise of that size has four bits more.
    """
    near_zero = upload[np.abs(upload) < 2.0**-10] * 2.0**59
    return bool((near_zero == np.rint(near_zero)).all())


def test_low_order_bits_of_an_upload_separate_worlds_only_without_a_grid():
    """Worlds one clipping norm apart, noise multiplier 1: ideal noise allows Φ(1/2) = 69 %."""
    noise = SecureNoise()
    worlds = {False: np.zeros(NUMBERS), True: np.full(NUMBERS, 1 / math.sqrt(NUMBERS))}

    def right(release) -> int:
        return sum(
            has_moved(release(v)) is moved for moved, v in worlds.items() for _ in range(200)
        )

    def in_floats(value):
        return value + noise.gaussian({"a": value}, 1.0)["a"]

    def on_the_grid(value):
        return noise.add_gaussian({"a": value}, 1.0)["a"]

    assert right(in_floats) > 1.8 * TRIALS  # the attack works
    ideal = stats.binom(2 * TRIALS, stats.norm.cdf(0.5))
    assert right(on_the_grid) <= ideal.ppf(1 - 1e-9)


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_the_lowest_bits_of_grid_multiples_are_uniform_for_any_value(bits):
    for value in (0.0, 0.01, 1 / 3, 1e5, -7.0e-8):
        upload = SecureNoise().add_gaussian({"a": np.full(200_000, value)}, 1.0)["a"]
        lowest = (upload / noise_grid(1.0)).astype(np.int64) % 2**bits
        counts = np.bincount(lowest, minlength=2**bits)
        assert stats.chisquare(counts).pvalue > 1e-7


@pytest.mark.parametrize("dtype", [*FLOATS], ids=str)
@pytest.mark.parametrize("stddev", [1e-3, 0.3, 1.0])
def test_every_release_is_a_multiple_of_a_power_of_two(dtype, stddev):
    values = np.random.default_rng(1).normal(size=40_000)
    noised = SecureNoise().add_gaussian({"a": array_of(values, dtype)}, stddev)["a"]
    grid = noise_grid(stddev)
    assert stddev / 2**19 < grid <= stddev / 2**18
    cells = np.asarray(torch.as_tensor(noised).double()) / grid
    np.testing.assert_array_equal(cells, np.rint(cells))


def of_whole_numbers(released: np.ndarray, shift: float, stddev: float) -> float:
    """Return the p-value that whole numbers are round(shift + N(0, stddev²))."""
    low, high = math.floor(-3 * stddev), math.ceil(3 * stddev)
    edges = np.array([-np.inf, *(np.arange(low, high + 1) + 0.5 - shift), np.inf])
    expected = np.diff(stats.norm.cdf(edges / stddev)) * released.size
    inside = np.clip(released, low, high + 1).astype(int) - low
    counts = np.bincount(inside, minlength=expected.size)
    return float(stats.chisquare(counts, expected).pvalue)


@pytest.mark.parametrize("source", [SecureNoise(), SeededNoise(2)], ids=["secure", "seeded"])
@pytest.mark.parametrize("rest", [0.0, 0.37, -0.5])
def test_a_release_is_the_rounded_sum_of_the_exact_value_and_gaussian(source, rest):
    """A value between two multiples is not rounded first, or its neighbours would move further."""
    grid, draws = 2.0**-7, 1_000_000
    value = np.full(draws, 5 * grid + rest * grid)
    cells = source.add_gaussian({"a": value}, 16 * grid, grid=grid)["a"] / grid - 5
    assert of_whole_numbers(cells, rest, 16.0) > 1e-7
    for wrong in (rest + 0.4, rest - 0.4):
        assert of_whole_numbers(cells, wrong, 16.0) < 1e-7
    assert of_whole_numbers(cells, rest, 16.6) < 1e-7


def test_shares_of_noise_on_one_grid_add_up_to_the_whole_noise():
    grid, clients, draws = 2.0**-7, 9, 500_000
    noise, values = SecureNoise(), np.linspace(0, 1, 9) * grid * 3.3
    total = sum(
        noise.add_gaussian({"a": np.full(draws, value)}, 16 * grid, grid=grid)["a"]
        for value in values
    )
    shift, stddev = values.sum() / grid, math.sqrt(clients * 16.0**2 + (clients - 1) / 12)
    assert of_whole_numbers(total / grid - round(shift), shift - round(shift), stddev) > 1e-7
    assert of_whole_numbers(total / grid - round(shift), shift - round(shift), 47.0) < 1e-7


@pytest.mark.parametrize("steps", [1, -3, 2**20 + 1, 2**40])
def test_moving_a_value_by_grid_multiples_moves_the_release_by_exactly_these(steps):
    """As with integers, no bit of a huge value influences the rounding of its noise."""
    values = np.random.default_rng(0).normal(size=10_000)
    grid = noise_grid(1.0)
    values = np.rint(values * 2.0**30) / 2.0**30 * 2.0**-20  # room for the steps in their bits
    values = np.rint(values / grid * 16) * grid / 16
    released = SeededNoise(4).add_gaussian({"a": values}, 1.0)["a"]
    moved_release = SeededNoise(4).add_gaussian({"a": values + steps * grid}, 1.0)["a"]
    np.testing.assert_array_equal(moved_release - released, steps * grid)


def test_no_noise_is_no_rounding_either():
    values = np.random.default_rng(0).normal(size=100)
    np.testing.assert_array_equal(SecureNoise().add_gaussian({"a": values}, 0.0)["a"], values)


@pytest.mark.parametrize("grid", [0.3, 2.0**-3, 2.0**-33, 0.0, -1.0, math.nan, math.inf])
def test_a_grid_that_is_none_for_this_noise_is_refused(grid):
    with pytest.raises(ValueError, match=r"expected a power of two|expected a number above"):
        SecureNoise().add_gaussian({"a": np.zeros(3)}, 1.0, grid=grid)


def test_noise_too_small_for_a_grid_is_refused_and_the_smallest_exact():
    with pytest.raises(ValueError, match="stddev=1e-307: expected a number above"):
        SecureNoise().add_gaussian({"a": np.zeros(3)}, 1e-307)
    noised = SecureNoise().add_gaussian({"a": np.zeros(1000)}, 1e-300)["a"]
    assert (noised / 1e-300).std() == pytest.approx(1, rel=0.15)
    assert (noised % noise_grid(1e-300) == 0).all()


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_noise_does_not_depend_on_how_numbers_are_laid_out(kind):
    numbers = 100_001
    values = np.random.default_rng(0).normal(size=numbers)
    whole = SeededNoise(9).add_gaussian({"a": kind(values)}, 0.5)["a"]
    parts = SeededNoise(9).add_gaussian(
        {"a": kind(values[:70_000]), "b": kind(values[70_000:])}, 0.5
    )
    np.testing.assert_array_equal(whole, np.concatenate([parts["a"], parts["b"]]))
    turned = SeededNoise(9).add_gaussian({"a": kind(values[:99_999].reshape(3, -1).T)}, 0.5)["a"]
    assert turned.shape == (33_333, 3)


def test_noise_for_somebody_elses_grid_is_in_double_precision_and_on_none():
    like = {"a": torch.zeros(100_000, dtype=torch.float16), "b": torch.zeros(2, 3)}
    drawn = SecureNoise().gaussian(like, 2.0)
    assert {name: part.dtype for name, part in drawn.items()} == {
        "a": torch.float64,
        "b": torch.float64,
    }
    assert drawn["b"].shape == (2, 3)
    assert float(drawn["a"].std()) == pytest.approx(2.0, rel=0.02)
    cells = drawn["a"] / noise_grid(2.0)
    assert float((cells == cells.round()).double().mean()) < 0.01
