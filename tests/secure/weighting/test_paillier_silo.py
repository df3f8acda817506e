"""A silo's products of powers equal one power at a time."""

import numpy as np
import pytest
from gmpy2 import invert, mpz, powmod
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_ext.secure.weighting.encoding import LARGEST_EXPONENT
from flower_ext.secure.weighting.paillier_silo import column_products

MODULUS = mpz(2) ** 127 - 1


def plain(bases, exponents, modulus=MODULUS):
    """Return the products of powers, one power at a time."""
    products = []
    for column in exponents.T:
        product = mpz(1)
        for base, exponent in zip(bases, column, strict=True):
            product = product * powmod(base, int(exponent), modulus) % modulus
        products.append(product)
    return products


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 7),
    st.integers(0, 40),
    st.integers(1, 61),
    st.integers(0, 2**32),
)
def test_products_equal_one_power_at_a_time(users, columns, bits, seed):
    rng = np.random.default_rng(seed)
    bases = [mpz(int(x)) for x in rng.integers(1, 2**62, users)]
    largest = 2**bits
    exponents = rng.integers(-largest, largest, (users, columns), endpoint=True)
    if exponents.size:
        exponents.flat[0] = largest
        exponents.flat[-1] = -largest
    products = column_products(bases, exponents, MODULUS, largest=largest)
    assert products == plain(bases, exponents)


def test_exponents_out_of_range_and_wrong_shapes_are_refused():
    def products(exponents, largest=4):
        return column_products([mpz(2)], np.array(exponents), MODULUS, largest=largest)

    assert products([[-4, 4, 0]]) == [invert(mpz(16), MODULUS), 16, 1]
    for wrong in ([[5]], [[-5]]):
        with pytest.raises(ValueError, match="integers from -4 to 4"):
            products(wrong)
    with pytest.raises(ValueError, match="expected 1 rows, one for each base"):
        products([[0], [0]])
    with pytest.raises(ValueError, match=r"at most 2\*\*61"):
        products([[0]], largest=LARGEST_EXPONENT + 1)
