"""What the silos share and the server does not know: a factor for every user, and their order."""

from __future__ import annotations

from itertools import count

import gmpy2
from gmpy2 import mpz

from flower_ext.secure.labels import derive
from flower_ext.secure.masks import uniform_residues


def user_blinds(seed: bytes, users: int, modulus: mpz) -> list[mpz]:
    """A unit modulo ``modulus`` for every user, uniform to whoever does not know ``seed``."""

    def blind(user: int) -> mpz:
        for attempt in count():
            (drawn,) = uniform_residues(derive(seed, "blind", user, attempt), 1, modulus)
            if gmpy2.gcd(drawn, modulus) == 1:
                break
        return drawn

    return [blind(user) for user in range(users)]


def user_order(seed: bytes, users: int) -> list[int]:
    """Users in an order that says nothing to whoever does not know ``seed``.

    The server counts users by their place in it. So it cannot tell who it is that has no records,
    or whom it drew.
    """
    return sorted(range(users), key=lambda user: derive(seed, "order", user))
