"""Noise has its distribution in every precision, and unfit arrays are refused."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from flower_ext.privacy import NonFiniteUpdate, SecureNoise, SeededNoise, clip
from flower_ext.privacy.mechanisms.noise import (
    IMPROBABLE,
    NoiseSource,
    largest_noised_norm,
    noise_grid,
)
from tests.support.arrays import FLOATS, array_of
from tests.support.sums import sum_clipped

DRAWS = 1_000_000


def has_stddev(sample: np.ndarray, stddev: float) -> bool:
    """Return True if a sample's variance is within 1 % of ``stddev²``, its mean within 5 errors.

    At 10⁶ draws the variance of a correct sample has a standard error of 0.14 %.
    """
    variance_fits = abs(sample.var() / stddev**2 - 1) < 0.01
    return bool(variance_fits and abs(sample.mean()) < 5 * stddev / math.sqrt(sample.size))


@pytest.mark.parametrize("noise", [SecureNoise(), SeededNoise(3, "test")])
@pytest.mark.parametrize("stddev", [1e-6, 0.3, 1e4])
def test_gaussian_noise_has_the_requested_stddev_to_within_two_percent(noise, stddev):
    update = {"a": np.zeros((1000, DRAWS // 2000)), "b": np.zeros(DRAWS // 2)}
    sample = np.concatenate([a.ravel() for a in noise.add_gaussian(update, stddev).values()])
    assert has_stddev(sample, stddev)
    for factor in (0.98, 1.02):
        assert not has_stddev(sample * math.sqrt(factor), stddev)


@pytest.mark.parametrize("numbers", [1, 100, 10**6])
@pytest.mark.parametrize("bound", [0.0, 0.5, 30.0])
def test_the_largest_norm_of_noised_values_is_rarely_exceeded_and_near(bound, numbers):
    """The exact quantile is that of a non-central χ² distribution."""
    stddev = 0.1
    largest = largest_noised_norm(bound, stddev, numbers)
    centre = (bound / stddev) ** 2
    law = stats.ncx2(numbers, centre) if bound else stats.chi2(numbers)
    exact = stddev * math.sqrt(law.isf(IMPROBABLE))
    assert exact <= largest <= 1.2 * exact


def test_noise_is_gaussian_and_independent_across_coordinates_and_arrays():
    noised = SecureNoise().add_gaussian({"a": np.zeros(50_000), "b": np.zeros(50_000)}, 2.0)
    assert stats.kstest(noised["a"] / 2.0, "norm").pvalue > 1e-6
    assert abs(np.corrcoef(noised["a"], noised["b"])[0, 1]) < 0.03
    assert abs(np.corrcoef(noised["a"][1:], noised["a"][:-1])[0, 1]) < 0.03


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_precision_is_noised_and_keeps_its_type(dtype):
    update = {"a": array_of(np.zeros(20_000), dtype), "scalar": array_of(0.0, dtype)}
    noised = SecureNoise().add_gaussian(update, 1.0)
    for name, array in noised.items():
        assert type(array) is type(update[name]) or isinstance(array, np.floating | np.ndarray)
        assert array.dtype == update[name].dtype
        assert tuple(array.shape) == tuple(update[name].shape)
        assert not array.ndim or bool((array != 0).any())
    again = [SecureNoise().add_gaussian(update, 1.0)["scalar"] for _ in range(3)]
    assert any(bool(scalar != 0) for scalar in again)  # a value may be rounded to zero
    assert float(torch.as_tensor(noised["a"]).double().std()) == pytest.approx(1.0, rel=0.05)


def test_an_empty_array_stays_empty_beside_others():
    noised = SecureNoise().add_gaussian({"none": np.zeros((0, 2)), "a": np.zeros(2)}, 1.0)
    assert noised["none"].shape == (0, 2)


@pytest.mark.parametrize("array", [np.arange(3), np.array([True]), torch.arange(3)])
def test_arrays_that_cannot_carry_noise_are_refused(array):
    with pytest.raises(TypeError, match="'count' has dtype"):
        SecureNoise().add_gaussian({"count": array}, 1.0)
    with pytest.raises(TypeError, match="'count' has dtype"):
        SecureNoise().gaussian({"count": array}, 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_values_do_not_pass_noised(value):
    with pytest.raises(NonFiniteUpdate, match="'a'"):
        SecureNoise().add_gaussian({"a": np.array([value])}, 1.0)


def test_noise_that_overflows_the_precision_is_refused():
    with pytest.raises(NonFiniteUpdate, match="float16"):
        SecureNoise().add_gaussian({"a": np.zeros(1000, np.float16)}, 1e6)


@pytest.mark.parametrize("stddev", [-1.0, math.nan, math.inf])
def test_unfit_stddevs_are_refused(stddev):
    with pytest.raises(ValueError, match="stddev=.*: expected a finite number >= 0"):
        SecureNoise().add_gaussian({"a": np.zeros(1)}, stddev)


def test_noise_leaves_its_input_untouched():
    update = {"a": np.ones(5), "b": torch.ones(5)}
    SecureNoise().add_gaussian(update, 1.0)
    assert (update["a"] == 1).all()
    assert (update["b"] == 1).all()


def test_seeded_noise_repeats_by_path_and_moves_on_within_one_source():
    zeros = {"a": np.zeros(100)}
    first, again = SeededNoise(7, "x", 1), SeededNoise(7, "x", 1)
    one = first.add_gaussian(zeros, 1.0)["a"]
    np.testing.assert_array_equal(one, again.add_gaussian(zeros, 1.0)["a"])
    assert not np.array_equal(one, first.add_gaussian(zeros, 1.0)["a"])
    assert not np.array_equal(one, SeededNoise(7, "x", 2).add_gaussian(zeros, 1.0)["a"])


def test_secure_noise_never_repeats():
    zeros = {"a": np.zeros(100)}
    noise = SecureNoise()
    draws = [noise.add_gaussian(zeros, 1.0)["a"].tobytes() for _ in range(50)]
    assert len(set(draws)) == 50
    assert noise.is_secure
    assert not SeededNoise(1).is_secure


def test_gamma_direction_has_a_gamma_norm_and_no_preferred_direction():
    noise = SeededNoise(5)
    dimension, scale = 4, 0.7
    draws = np.array([noise.gamma_direction(dimension, scale) for _ in range(20_000)])
    norms = np.linalg.norm(draws, axis=1)
    assert stats.kstest(norms, stats.gamma(dimension, scale=scale).cdf).pvalue > 1e-4
    assert stats.kstest(norms, stats.gamma(dimension, scale=1.05 * scale).cdf).pvalue < 1e-6
    directions = draws / norms[:, None]
    assert np.abs(directions.mean(axis=0)).max() < 5 / math.sqrt(dimension * 20_000)
    np.testing.assert_allclose(directions.T @ directions / 20_000, np.eye(4) / 4, atol=0.01)


def test_a_gamma_direction_of_one_number_has_either_sign():
    draws = {math.copysign(1, float(SecureNoise().gamma_direction(1, 1.0)[0])) for _ in range(60)}
    assert draws == {1.0, -1.0}


@pytest.mark.parametrize(("dimension", "scale"), [(0, 1.0), (3, 0.0), (3, math.inf)])
def test_unfit_gamma_parameters_are_refused(dimension, scale):
    with pytest.raises(ValueError, match="dimension|scale"):
        SecureNoise().gamma_direction(dimension, scale)


@pytest.mark.parametrize(
    "huge", [np.full(3, 1e300), np.full(3, 3e38, np.float32), torch.ones(3) * 1e30]
)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("all_of_them", [True, False])
def test_huge_values_do_not_pass_with_their_noise_absorbed(huge, sign, all_of_them):
    values = huge * sign
    if not all_of_them:
        values[1:] = 0.0
    with pytest.raises(NonFiniteUpdate, match="clip the array before"):
        SecureNoise().add_gaussian({"a": values}, 1.0)


@pytest.mark.parametrize("stddev", [1e-3, 1.0, 1e6])
def test_accepted_values_carry_noise_of_many_floating_point_steps(stddev):
    """The spacing of floats grows with the value, but the noise must not become a coarse grid."""
    passed = 0
    for exponent in range(30, 60):
        value = np.full(1_000, stddev * 2.0**exponent)
        try:
            noised = SeededNoise(exponent).add_gaussian({"a": value}, stddev)["a"]
        except NonFiniteUpdate:
            break
        passed = exponent
        assert len(np.unique(noised)) > 800
        assert (noised - value).std() == pytest.approx(stddev, rel=0.15)
    assert 33 <= passed < 45


def variance_fits(sample: np.ndarray, stddev: float) -> bool:
    """Return True if a chi-square interval (1e-3) covers the variance: ±0.47 % at 10⁶ draws."""
    statistic = float(np.sum((sample / stddev) ** 2))
    low, high = stats.chi2.ppf([5e-4, 1 - 5e-4], sample.size)
    return bool(low <= statistic <= high)


KINDS = [
    lambda shape: np.zeros(shape),
    lambda shape: np.zeros(shape, np.float32),
    lambda shape: torch.zeros(shape),
    lambda shape: torch.zeros(shape, dtype=torch.float64),
]


@pytest.mark.parametrize("zeros", KINDS, ids=["f64", "f32", "torch-f32", "torch-f64"])
def test_noise_variance_fits_in_numpy_and_torch_unless_two_percent_off(zeros):
    noise = SeededNoise(1, "variance")

    def draw(stddev):
        noised = noise.add_gaussian({"a": zeros(1_000_000)}, stddev)["a"]
        return np.asarray(noised, dtype=np.float64)

    assert variance_fits(draw(0.3), 0.3)
    for factor in (0.98, 1.02):
        assert not variance_fits(draw(0.3 * math.sqrt(factor)), 0.3)


class _Fixed(NoiseSource):
    """Noise of one known value, to detect the precision in which it is added."""

    is_secure = False

    def __init__(self, value: float) -> None:
        self.value = value

    def _generator(self):
        return self

    def standard_normal(self, shape):
        return np.full(shape, self.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_noise_is_rounded_once_after_the_addition(dtype):
    """An addition in the array's own precision would lose the small part above step/2 first."""
    step = torch.finfo(dtype).eps
    noise, stddev = step / 2 * (1 + step / 4), step**2 * 2.0**15
    assert noise % noise_grid(stddev) == 0
    source = _Fixed(noise / stddev)
    noised = source.add_gaussian({"a": torch.ones(3, dtype=dtype)}, stddev)["a"]
    assert bool((noised.double() == 1 + step).all())


@pytest.mark.parametrize(
    "huge", [np.full(1000, 1e300), np.full(1000, 3e38, np.float32), torch.full((1000,), 3e38)]
)
def test_huge_values_are_noised_once_they_are_clipped(huge):
    bounded = clip({"a": huge}, 1.0).value
    noised = SecureNoise().add_gaussian(bounded, 1.0)["a"]
    change = np.asarray(noised, np.float64) - np.asarray(bounded["a"], np.float64)
    assert (change != 0).mean() > 0.99
    assert change.std() == pytest.approx(1.0, rel=0.15)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_sums_are_kept_in_float64(dtype):
    like = {"a": np.zeros(2, dtype)}
    summed = sum_clipped([{"a": np.full(2, 0.1, dtype)}] * 3_000, 1.0, like=like).value["a"]
    np.testing.assert_allclose(summed, 3_000 * float(dtype(0.1)), rtol=1e-12)
