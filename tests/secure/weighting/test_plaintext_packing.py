import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_ext.secure.weighting.plaintext_packing import Packing


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
    assert Packing.fitting(2**99, modulus, 1).slots == 1
    with pytest.raises(ValueError, match="fewer records per user"):
        Packing.fitting(2**99 + 1, modulus)


def test_as_many_slots_as_leave_64_bits_empty_and_no_more():
    packing = Packing.fitting(2**19 - 1, 2**511)
    assert packing.slot_bits == 20
    assert packing.slots == (510 - 64) // 20
    assert Packing.fitting(2**19 - 1, 2**511, 3).slots == 3
    for slots in (0, packing.slots + 1):
        with pytest.raises(ValueError, match=f"coordinates_per_plaintext={slots}"):
            Packing.fitting(2**19 - 1, 2**511, slots)


@pytest.mark.parametrize("slots", [1, 3])
def test_sums_out_of_bounds_are_refused(slots):
    packing = Packing(bound=10, slots=slots)
    for packed in ([packing.largest + 1], packing.pack([11]), [2**70], [-(2**70)]):
        with pytest.raises(OverflowError):
            packing.unpack(packed, 1)
