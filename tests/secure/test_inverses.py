import pytest
from gmpy2 import invert, mpz

from flower_ext.secure.inverses import invert_all

MODULUS = mpz(2) ** 127 - 1


def test_many_inverses_for_one_inversion():
    values = [mpz(x) for x in range(1, 50)]
    assert invert_all(values, MODULUS) == [invert(x, MODULUS) for x in values]
    assert invert_all([], MODULUS) == []
    with pytest.raises(ZeroDivisionError):
        invert_all([mpz(3), mpz(0)], MODULUS)
