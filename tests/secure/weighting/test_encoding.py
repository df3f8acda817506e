"""Values are encoded as integers with a bounded error, or refused."""

import math

import numpy as np
import pytest
from gmpy2 import mpz
from hypothesis import given
from hypothesis import strategies as st

from flower_ext.secure.weighting.encoding import (
    LARGEST_EXPONENT,
    FixedPoint,
    Packing,
    from_residue,
)


@given(st.floats(-5, 5), st.sampled_from([1e-10, 1e-6, 0.3]))
def test_rounding_errs_by_half_a_step_at_most(value, step):
    encoding = FixedPoint(step=step, bound=5.0)
    (back,) = encoding.decode(encoding.encode([value]))
    assert abs(back - value) <= step / 2 + 1e-15


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_values_of_less_precision_are_encoded_as_what_they_are(dtype):
    """In their own precision, the division by the step would err by more than all roundings."""
    values = np.random.default_rng(0).uniform(-1, 1, 100).astype(dtype)
    encoded = FixedPoint(step=1e-10, bound=1.0).encode(values)
    assert [int(x) for x in encoded] == [round(float(value) / 1e-10) for value in values]
    assert FixedPoint(step=1e-10, bound=1.0).decode(encoded).dtype == np.float64


def test_a_common_factor_is_taken_out_exactly_even_where_it_is_huge():
    encoding = FixedPoint(step=1e-10, bound=1.0)
    factor = math.lcm(*range(1, 2001))
    encoded = [int(x) * factor for x in encoding.encode([0.25, -1.0])]
    assert encoding.decode(encoded, scale=factor) == pytest.approx([0.25, -1.0], abs=1e-15)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(value):
    with pytest.raises(ValueError, match="noise hold NaN or infinite"):
        FixedPoint(step=1e-10, bound=1.0).encode([0.0, value], name="noise")


def test_the_bound_itself_passes_and_the_next_float_does_not():
    encoding = FixedPoint(step=1e-10, bound=1.0)
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
    """Twice the largest number must fit, as `column_products` adds to it."""
    assert FixedPoint(step=1.0, bound=2.0**61).largest == LARGEST_EXPONENT
    for bound in (math.nextafter(2.0**61, math.inf), 1e19):
        with pytest.raises(ValueError, match="coarser step"):
            FixedPoint(step=1.0, bound=bound)


@pytest.mark.parametrize(("bound", "largest"), [(2.4, 2), (2.6, 3), (1.0, 1), (0.6, 1), (0.1, 1)])
def test_the_largest_number_of_steps_follows_the_bound_at_least_one(bound, largest):
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


@given(st.data(), st.integers(1, 2**90), st.integers(1, 6))
def test_sums_of_packed_lists_unpack_to_the_sums(data, bound, slots):
    packing = Packing(bound=bound, slots=slots)
    values = data.draw(st.lists(st.integers(-bound, bound), min_size=1, max_size=15))
    split = [data.draw(st.integers(-(2 * bound), 2 * bound)) for _ in values]
    one = packing.pack(split)
    other = packing.pack([value - part for value, part in zip(values, split, strict=True)])
    total = [a + b for a, b in zip(one, other, strict=True)]
    assert packing.unpack(total, len(values)) == values
    assert all(abs(x) <= packing.largest for x in packing.pack(values))


def test_a_single_slot_fits_up_to_half_the_modulus_exactly():
    modulus = 2**100 + 1
    assert Packing.fitting(2**99, modulus).slots == 1
    with pytest.raises(ValueError, match="fewer records per user"):
        Packing.fitting(2**99 + 1, modulus)


def test_as_many_slots_as_leave_64_bits_empty_and_no_more():
    packing = Packing.fitting(2**19 - 1, 2**511)
    assert packing.slot_bits == 20
    assert packing.slots == (510 - 64) // 20


@pytest.mark.parametrize("slots", [1, 3])
def test_sums_out_of_bounds_are_refused(slots):
    packing = Packing(bound=10, slots=slots)
    for packed in ([packing.largest + 1], packing.pack([11]), [2**70], [-(2**70)]):
        with pytest.raises(OverflowError):
            packing.unpack(packed, 1)
