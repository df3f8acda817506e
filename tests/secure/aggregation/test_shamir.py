"""Any t shares give the secret, and fewer reveal nothing."""

from itertools import combinations

import numpy as np
import pytest
from scipy.stats import chi2

from flower_ext.errors import InvalidValue
from flower_ext.secure.aggregation.shamir import PRIME, candidates, combine, split


def test_every_set_of_t_shares_gives_the_secret():
    source = np.random.default_rng(0)
    for secret in (bytes(32), b"\xff" * 32, source.bytes(32)):
        shares = split(secret, [1, 2, 5, 9, 10**6], 3, source.bytes)
        for points in combinations(shares, 3):
            assert combine({point: shares[point] for point in points}, 3) == secret


def test_the_field_is_a_field():
    assert all(pow(base, PRIME - 1, PRIME) == 1 for base in (2, 3, 5, 7))


def test_fewer_shares_than_t_are_refused():
    shares = split(bytes(32), [1, 2, 3], 3, np.random.default_rng(0).bytes)
    with pytest.raises(InvalidValue, match="threshold=3"):
        combine({point: shares[point] for point in (1, 2)}, 3)


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32])
def test_t_minus_one_shares_are_uniform_whatever_the_secret(secret):
    source = np.random.default_rng(1)
    pairs = np.zeros((16, 16))
    for _ in range(5_000):
        shares = split(secret, [1, 2, 3], 3, source.bytes)
        one, two = (int.from_bytes(shares[at], "big") * 16 // PRIME for at in (1, 2))
        pairs[one, two] += 1
    expected = pairs.sum() / pairs.size
    assert chi2.sf(((pairs - expected) ** 2 / expected).sum(), pairs.size - 1) > 1e-9


def altered(shares, points, source):
    return {p: source.bytes(32).rjust(33, b"\0") if p in points else s for p, s in shares.items()}


@pytest.mark.parametrize("wrong", range(7))
def test_wrong_shares_are_corrected_up_to_half_of_the_surplus(wrong):
    source = np.random.default_rng(wrong)
    for _ in range(5):
        secret = source.bytes(32)
        points = [int(point) for point in source.choice(1_000, 22, replace=False) + 1]
        shares = split(secret, points, 12, source.bytes)
        liars = set(points[:wrong])
        found = list(candidates(altered(shares, liars, source), 12))
        if wrong <= (22 - 12) // 2:
            assert (secret, frozenset(liars)) in found[-1:] or (
                wrong == 0 and found[0][0] == secret
            )
        else:
            assert secret not in [one for one, _ in found]


def test_a_single_surplus_share_is_enough_for_one_wrong_one():
    source = np.random.default_rng(0)
    secret = source.bytes(32)
    shares = split(secret, range(1, 6), 4, source.bytes)
    for liar in shares:
        assert (secret, frozenset({liar})) in candidates(altered(shares, {liar}, source), 4)


def test_shares_that_were_doubted_before_are_used_last():
    source = np.random.default_rng(0)
    secret = source.bytes(32)
    shares = split(secret, range(1, 13), 6, source.bytes)
    liars = {1, 2, 3, 4, 5, 6}  # too many to correct, but known
    first, _ = next(candidates(altered(shares, liars, source), 6, doubted=liars))
    assert first == secret


def test_the_work_on_wrong_shares_is_bounded_whatever_they_are():
    source = np.random.default_rng(0)
    points = range(1, 97)
    junk = {point: source.bytes(32).rjust(33, b"\0") for point in points}
    assert len(list(candidates(junk, 67, doubted={1, 2}))) <= 3
    zeros = dict.fromkeys(points, bytes(33))
    assert next(candidates(zeros, 67)) == (bytes(32), frozenset())
