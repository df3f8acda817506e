import math

import numpy as np
import pytest
from gmpy2 import mpz
from hypothesis import given
from hypothesis import strategies as st

from flower_ext.secure.fixed_point import FixedPoint, from_residue
from flower_ext.secure.weighting.multiexp import LARGEST_EXPONENT


@given(st.floats(-5, 5), st.sampled_from([1e-10, 1e-6, 0.3]))
def test_rounding_errs_by_half_a_step_at_most(value, step):
    encoding = FixedPoint(step=step, bound=5.0)
    (back,) = encoding.decode(encoding.encode([value]))
    assert abs(back - value) <= step / 2 + 1e-15


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_values_of_less_precision_are_encoded_as_what_they_are(dtype):
    """In their own precision, the division by the step would err by more than all roundings."""
    values = np.random.default_rng(0).uniform(-1, 1, 100).astype(dtype)
    encoded = FixedPoint(bound=1.0).encode(values)
    assert [int(x) for x in encoded] == [round(float(value) / 1e-10) for value in values]
    assert FixedPoint(bound=1.0).decode(encoded).dtype == np.float64


def test_a_common_factor_is_taken_out_exactly_even_where_it_is_huge():
    encoding = FixedPoint(bound=1.0)
    factor = math.lcm(*range(1, 2001))
    encoded = [int(x) * factor for x in encoding.encode([0.25, -1.0])]
    assert encoding.decode(encoded, scale=factor) == pytest.approx([0.25, -1.0], abs=1e-15)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(value):
    with pytest.raises(ValueError, match="noise hold NaN or infinite"):
        FixedPoint(bound=1.0).encode([0.0, value], name="noise")


def test_the_bound_itself_passes_and_the_next_float_does_not():
    encoding = FixedPoint(bound=1.0)
    assert encoding.encode([1.0, -1.0]).tolist() == [10**10, -(10**10)]
    with pytest.raises(ValueError, match="expected at most 1"):
        encoding.encode([math.nextafter(1.0, 2.0)])
    with pytest.raises(ValueError, match="expected at most 1"):
        encoding.encode(np.array([[0.0], [-1.1]]))


@pytest.mark.parametrize("field", ["step", "bound"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_steps_and_bounds_must_be_positive(field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        FixedPoint(**{"step": 1e-3, "bound": 1.0} | {field: value})


def test_a_range_that_64_bits_do_not_hold_is_refused():
    """Twice the largest number must fit, as `multiexp` adds to it."""
    assert FixedPoint(step=1.0, bound=2.0**61).largest == LARGEST_EXPONENT
    for bound in (math.nextafter(2.0**61, math.inf), 1e19):
        with pytest.raises(ValueError, match="coarser step"):
            FixedPoint(step=1.0, bound=bound)


@pytest.mark.parametrize(("bound", "largest"), [(2.4, 2), (2.6, 3), (1.0, 1), (0.6, 1), (0.1, 1)])
def test_the_largest_number_of_steps_is_that_of_the_bound_and_at_least_one(bound, largest):
    encoding = FixedPoint(step=1.0, bound=bound)
    assert encoding.largest == largest
    assert largest == max(1, *abs(encoding.encode([bound, -bound])))


def test_numbers_below_one_and_no_numbers_pass_a_bound_below_one():
    encoding = FixedPoint(step=0.25, bound=0.5)
    assert encoding.encode([0.25, -0.5]).tolist() == [1, -2]
    assert encoding.encode([]).tolist() == []


@pytest.mark.parametrize("modulus", [mpz(101), mpz(100)])
def test_signed_integers_below_half_the_modulus_come_back(modulus):
    for value in range(-49, 50):
        assert from_residue(value % modulus, modulus) == value
