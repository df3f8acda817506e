"""Any t shares give the secret, and fewer reveal nothing."""

from itertools import combinations

import numpy as np
import pytest
from scipy.stats import chi2

from flower_ext.errors import InvalidValue
from flower_ext.secure.aggregation.shamir import PRIME, combine, split_secret


def test_every_set_of_t_shares_gives_the_secret():
    for secret in (bytes(32), b"\xff" * 32, bytes(range(32))):
        shares = split_secret(secret, [1, 2, 5, 9, 10**6], 3)
        for points in combinations(shares, 3):
            assert combine({point: shares[point] for point in points}, 3) == secret


def test_the_field_is_a_field():
    assert all(pow(base, PRIME - 1, PRIME) == 1 for base in (2, 3, 5, 7))


def test_fewer_shares_than_t_are_refused():
    shares = split_secret(bytes(32), [1, 2, 3], 3)
    with pytest.raises(InvalidValue, match="threshold=3"):
        combine({point: shares[point] for point in (1, 2)}, 3)


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32])
def test_t_minus_one_shares_are_uniform_whatever_the_secret(secret):
    pairs = np.zeros((16, 16))
    for _ in range(5_000):
        shares = split_secret(secret, [1, 2, 3], 3)
        one, two = (int.from_bytes(shares[at], "big") * 16 // PRIME for at in (1, 2))
        pairs[one, two] += 1
    expected = pairs.sum() / pairs.size
    assert chi2.sf(((pairs - expected) ** 2 / expected).sum(), pairs.size - 1) > 1e-9
