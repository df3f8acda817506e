import numpy as np
from gmpy2 import mpz
from scipy import stats

from flower_ext.secure.weighting.silo_party import user_order
from flower_ext.secure.weighting.weighting_silo import user_blinds
from tests.support.weighting import key


def test_blinds_are_units_of_their_own_for_each_user_and_seed():
    n = key().public.n
    blinds = user_blinds(b"s" * 32, 50, n) + user_blinds(b"t" * 32, 50, n)
    assert len(set(blinds)) == 100
    assert user_blinds(b"s" * 32, 50, n) == blinds[:50]
    assert all(x % 3 and x % 5 for x in user_blinds(b"s" * 32, 200, mpz(15)))


def test_the_order_of_users_is_a_permutation_that_the_seed_decides():
    orders = [user_order(bytes([seed]) * 32, 5) for seed in range(200)]
    assert all(sorted(order) == list(range(5)) for order in orders)
    assert orders[0] == user_order(bytes(32), 5)
    first = np.bincount([order[0] for order in orders], minlength=5)
    assert stats.chisquare(first).pvalue > 1e-6
