"""Inverses modulo a number, many for about the price of one."""

from __future__ import annotations

from collections.abc import Sequence

import gmpy2
from gmpy2 import mpz


def invert_all(values: Sequence[mpz], modulus: mpz) -> list[mpz]:
    """Inverses modulo ``modulus`` for one inversion and three multiplications each (Montgomery).

    Raises
    ------
    ZeroDivisionError
        A value is no unit.
    """
    prefixes = [mpz(1)]
    for value in values:
        prefixes.append(prefixes[-1] * value % modulus)
    rest = gmpy2.invert(prefixes.pop(), modulus)
    inverses = []
    for value, prefix in zip(reversed(values), reversed(prefixes), strict=True):
        inverses.append(rest * prefix % modulus)
        rest = rest * value % modulus
    return inverses[::-1]
