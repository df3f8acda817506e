"""Secrets that all silos share: the seed, the blinds and the order of users."""

import secrets

import numpy as np
from gmpy2 import mpz
from scipy import stats

from flower_ext.secure.messages import pack_numbers
from flower_ext.secure.weighting.paillier_silo import PaillierSilo, user_blinds
from flower_ext.secure.weighting.silo_party import user_order
from tests.support.weighting import key, weighting_settings


def seeds_of(monkeypatch, number: int, run: str = "test") -> list[bytes]:
    """Return the seed of every silo, where silo 0 chooses its part."""
    settings = weighting_settings(run=run)
    silos = [PaillierSilo(settings, at) for at in range(3)]
    server_key = pack_numbers([key(number=number).public.n], settings.count_bytes)
    question = b"".join(silo.answer("begin", b"") for silo in silos) + server_key
    with monkeypatch.context() as patch:
        patch.setattr(secrets, "token_bytes", bytes)
        sealed, *_ = [silo.answer("keys", question) for silo in silos]
    for silo, seed in ((silos[1], sealed[:60]), (silos[2], sealed[60:])):
        silo.answer("count", seed, [1] * settings.users)
    return [silo.seed for silo in silos]


def test_all_silos_have_one_seed_which_silo_0_cannot_choose(monkeypatch):
    """It depends on the server's key and the run as well, which silo 0 does not draw."""
    seeds = [seeds_of(monkeypatch, *case) for case in ((0,), (1,), (0, "another run"))]
    assert [len(set(of_silos)) for of_silos in seeds] == [1, 1, 1]
    assert len({of_silos[0] for of_silos in seeds}) == 3
    assert bytes(32) not in {of_silos[0] for of_silos in seeds}


def test_blinds_are_units_that_differ_for_each_user_and_seed():
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
