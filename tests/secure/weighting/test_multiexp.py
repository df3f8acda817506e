import math

import numpy as np
import pytest
from gmpy2 import invert, mpz, powmod
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_ext.secure import pair_keys
from flower_ext.secure.weighting import multiexp
from flower_ext.secure.weighting.multiexp import (
    LARGEST_EXPONENT,
    FixedBaseProducts,
    Windows,
    choose_windows,
)

MODULUS = mpz(2) ** 127 - 1


def plain(bases, exponents, modulus=MODULUS):
    found = []
    for column in exponents.T:
        product = mpz(1)
        for base, exponent in zip(bases, column, strict=True):
            product = product * powmod(base, int(exponent), modulus) % modulus
        found.append(product)
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 7),
    st.integers(0, 40),
    st.integers(1, 61),
    st.integers(1, 100_000),
    st.integers(0, 2**32),
)
def test_products_equal_one_power_at_a_time(users, columns, bits, expected, seed):
    rng = np.random.default_rng(seed)
    bases = [mpz(int(x)) for x in rng.integers(1, 2**62, users)]
    largest = 2**bits
    exponents = rng.integers(-largest, largest, (users, columns), endpoint=True)
    if exponents.size:
        exponents.flat[0] = largest
        exponents.flat[-1] = -largest
    products = FixedBaseProducts(
        bases,
        MODULUS,
        lowest=-largest,
        highest=largest,
        expected_products=expected,
    )
    assert products.of(exponents) == plain(bases, exponents)
    assert products.of(exponents, workers=2) == plain(bases, exponents)


def test_exponents_out_of_range_and_wrong_shapes_are_refused():
    products = FixedBaseProducts([mpz(2)], MODULUS, lowest=-4, highest=3, expected_products=1)
    assert products.of(np.array([[-4, 3, 0]])) == [invert(mpz(16), MODULUS), 8, 1]
    for wrong in ([[4]], [[-5]]):
        with pytest.raises(ValueError, match="integers from -4 to 3"):
            products.of(np.array(wrong))
    with pytest.raises(ValueError, match=r"expected \(1, products\)"):
        products.of(np.zeros((2, 1), dtype=np.int64))
    with pytest.raises(ValueError, match="within"):
        FixedBaseProducts(
            [mpz(2)], MODULUS, lowest=0, highest=LARGEST_EXPONENT + 1, expected_products=1
        )


@given(st.integers(1, 2**50), st.integers(2, 16))
def test_windows_cover_exactly_the_exponents_that_their_digits_can_write(largest, width):
    digits = math.ceil((largest.bit_length() + 2) / width)
    half = 2 ** (width - 1)
    highest = sum((half - 1) << (width * i) for i in range(digits))
    lowest = sum(-half << (width * i) for i in range(digits))
    assert Windows.covering(width, lowest, highest) == Windows(width=width, digits=digits)
    assert Windows.covering(width, lowest - 1, highest).digits == digits + 1
    assert Windows.covering(width, lowest, highest + 1).digits == digits + 1


def test_windows_are_the_cheapest_that_fit_the_memory(monkeypatch):
    facts = {
        "bases": 50,
        "lowest": -(2**39) + 2**30,
        "highest": 2**39 - 2**30,
        "modulus_bits": 6144,
    }
    free = choose_windows(products=1000, **facts)
    assert (free.width, free.digits) == (10, 4)
    more = choose_windows(products=10**6, **facts)
    assert more.table_multiplications(50) > free.table_multiplications(50)
    assert more.column_multiplications(50) < free.column_multiplications(50)
    limit = free.table_bytes(50, 6144) - 1
    monkeypatch.setattr(multiexp, "_TABLE_MEMORY", limit)
    tight = choose_windows(products=1000, **facts)
    assert tight.table_bytes(50, 6144) <= limit
    assert tight.width < free.width
    monkeypatch.setattr(multiexp, "_TABLE_MEMORY", 10)
    assert choose_windows(products=1000, **facts).width == 2  # the smallest tables in any case


def test_the_count_of_multiplications_is_what_the_products_do(monkeypatch):
    class Counted:
        """A number that counts its multiplications."""

        done = 0

        def __init__(self, value):
            self.value = value

        def __mul__(self, other):
            Counted.done += 1
            return Counted(self.value * other.value)

        def __mod__(self, modulus):
            return Counted(self.value % modulus)

    for module in (multiexp, pair_keys):
        monkeypatch.setattr(module, "mpz", lambda x: Counted(mpz(x)))
    monkeypatch.setattr(
        "flower_ext.secure.pair_keys.gmpy2.invert",
        lambda x, n: Counted(invert(x.value, n)),
    )
    rng = np.random.default_rng(0)
    bases = [Counted(mpz(int(x))) for x in rng.integers(2, 2**62, 60)]
    largest, columns = 2**39 - 2**30, 256
    products = FixedBaseProducts(
        bases, MODULUS, lowest=-largest, highest=largest, expected_products=columns
    )
    assert Counted.done == products.windows.table_multiplications(60)
    Counted.done = 0
    products.of(rng.integers(-largest, largest, (60, columns)))
    expected = columns * products.windows.column_multiplications(60)
    assert 0.95 * expected < Counted.done <= expected


def test_progress_ends_at_the_number_of_products():
    seen = []
    products = FixedBaseProducts([mpz(2)], MODULUS, lowest=0, highest=9, expected_products=1)
    products.of(np.ones((1, 300), dtype=np.int64), progress=lambda *at: seen.append(at))
    assert seen[-1] == (300, 300)
    assert seen == sorted(seen)
