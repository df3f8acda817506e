"""Updates are real, finite arrays; their norms and totals are exact."""

import numpy as np
import pytest
import torch

from flower_ext.errors import InvalidValue
from flower_ext.privacy import NonFiniteUpdate, clip
from flower_ext.privacy.mechanisms.updates import (
    RunningSum,
    check_like,
    in_precision_of,
    is_finite,
    l2_norm,
)
from tests.support.sums import added


@pytest.mark.parametrize(
    "array",
    [
        np.arange(3),
        np.array([True]),
        np.array([1j]),
        torch.arange(3),
        torch.tensor([True]),
        torch.tensor([1j]),
    ],
)
def test_arrays_that_are_not_real_floats_are_refused_by_name(array):
    with pytest.raises(TypeError, match="'count' has dtype"):
        clip({"count": array}, 1.0)


@pytest.mark.parametrize("value", [1.0, [1.0], "x", None])
def test_things_that_are_not_arrays_are_refused(value):
    with pytest.raises(TypeError, match="not an array"):
        clip({"a": value}, 1.0)


@pytest.mark.parametrize("scale", [1e-310, 1e-200, 1.0, 1e200])
def test_norms_are_right_where_squares_vanish_or_overflow(scale):
    update = {"none": np.zeros(0), "a": scale * np.array([3.0, 0.0]), "b": scale * np.array(4.0)}
    assert l2_norm(update) == pytest.approx(5 * scale, rel=1e-6, abs=0)
    clipped = l2_norm(clip(update, 1.0).value)
    assert clipped == pytest.approx(min(5 * scale, 1.0), rel=1e-6, abs=0)


def test_numbers_too_large_for_a_precision_are_refused_and_others_rounded():
    like = {"a": np.zeros(2, np.float16)}
    rounded = in_precision_of(like, {"a": np.array([1.0001, -6e4])})
    assert rounded["a"].dtype == np.float16
    np.testing.assert_allclose(rounded["a"], [1.0, -6e4], rtol=1e-3)
    with pytest.raises(NonFiniteUpdate, match="'a' is not finite in float16"):
        in_precision_of(like, {"a": np.array([1.0, 1e5])})


def test_masked_arrays_are_refused_since_norms_would_leave_values_out():
    masked = np.ma.MaskedArray([1e6, 0.1], mask=[True, False])
    with pytest.raises(TypeError, match="masked array; fill it"):
        clip({"a": masked}, 1.0)


def test_a_total_counts_and_adds_each_update():
    one, other = {"w": np.ones(2, np.float32)}, {"w": np.full(2, 3.0, np.float32)}
    assert RunningSum(one).count == 0
    summed = added(RunningSum(one), [one, other, one])
    assert summed.count == 3
    np.testing.assert_array_equal(summed.value["w"], [5.0, 5.0])
    assert summed.value["w"].dtype == np.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_numbers_are_finite_whatever_their_sum(dtype):
    largest = torch.finfo(dtype).max
    assert is_finite(torch.full((3, 40), largest, dtype=dtype))
    assert is_finite(torch.zeros(0, dtype=dtype))
    assert is_finite(torch.tensor([2**62]))
    for odd in (torch.nan, torch.inf, -torch.inf):
        for rest in (1.0, largest):
            numbers = torch.full((3, 40), rest, dtype=dtype)
            numbers[1, 7] = odd
            assert not is_finite(numbers)
            numbers[2, 9] = -odd
            assert not is_finite(numbers)


def test_arrays_that_are_not_like_others_are_refused_without_their_numbers():
    like = {"a": np.full(3, 0.5, np.float32)}
    check_like({"a": torch.zeros(3, dtype=torch.float64)}, like)
    for odd, message in (
        ({}, r"names differ: missing \['a'\]"),
        ({**like, "b": like["a"]}, r"unexpected \['b'\]"),
        ({"a": np.zeros(2, np.float32)}, r"'a' has shape \(2,\)"),
        ({"a": np.full(3, 7.25)}, "type float64: expected shape .* and type float32"),
    ):
        with pytest.raises(InvalidValue, match=message) as refusal:
            check_like(odd, like, types=True)
        assert "0.5" not in str(refusal.value)
        assert "7.25" not in str(refusal.value)
