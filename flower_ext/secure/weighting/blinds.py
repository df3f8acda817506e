"""Secrets that the silos share and the server lacks: a factor for every user, and an order."""

from __future__ import annotations

from itertools import count

import gmpy2
from gmpy2 import mpz

from flower_ext.secure.labels import derive
from flower_ext.secure.pair_keys import uniform_residues


def user_blinds(seed: bytes, users: int, modulus: mpz) -> list[mpz]:
    """Return a unit modulo ``modulus`` for every user, uniform to a party without ``seed``."""

    def blind(user: int) -> mpz:
        for attempt in count():
            (drawn,) = uniform_residues(derive(seed, "blind", user, attempt), 1, modulus)
            if gmpy2.gcd(drawn, modulus) == 1:
                break
        return drawn

    return [blind(user) for user in range(users)]


def user_order(seed: bytes, users: int) -> list[int]:
    """Return the users in an order that is uniform to a party without ``seed``.

    The server numbers users by their place in this order. It therefore cannot tell which user has
    no records, or which user it drew.
    """
    return sorted(range(users), key=lambda user: derive(seed, "order", user))
