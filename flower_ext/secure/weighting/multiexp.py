"""Many products of powers of the same bases. They are most of the work of private weighting.

This module computes Π_u b_u^{x_uj} for every column j of a matrix of short signed exponents. All
columns have the same bases, so each base gets a table of its small powers. An exponent is then a
few digits, each of which costs one look-up and one multiplication, and all bases of a column share
squarings. With U bases and exponents of k digits a column takes about k · (U + 7) multiplications.
If it computed each power separately, it would take about 50 · U.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import gmpy2
import numpy as np
from gmpy2 import mpz
from numpy.typing import NDArray

from flower_ext.errors import InvalidValue
from flower_ext.secure.threads import map_slices

LARGEST_EXPONENT = 2**61
"""Largest magnitude of an exponent: twice this number fits a signed 64-bit integer."""
# A table of 128 powers modulo n² takes 0.1 MB. Wider digits save a sixth of the multiplications of
# a large model at twice the memory, and cost a small model more than they save.
_DIGIT_BITS = 7


def column_products(
    bases: Sequence[mpz],
    exponents: NDArray[np.int64],
    modulus: mpz,
    *,
    largest: int,
    name: str = "",
) -> list[mpz]:
    """Return Π_u bases[u]^exponents[u, j] modulo ``modulus`` for every column j.

    The bases are units, and ``largest`` is the largest magnitude of an exponent.
    """
    if exponents.ndim != 2 or len(exponents) != len(bases):
        raise InvalidValue(
            f"exponents of shape {exponents.shape}: expected ({len(bases)}, products)"
        )
    if not np.abs(exponents).max(initial=0) <= largest <= LARGEST_EXPONENT:
        raise InvalidValue(
            f"exponents: expected integers from {-largest} to {largest}, and largest={largest} to "
            "be at most 2**61"
        )
    mask, num_digits = (1 << _DIGIT_BITS) - 1, math.ceil((2 * largest).bit_length() / _DIGIT_BITS)

    def powers(some: Sequence[mpz]) -> list[list[mpz]]:
        """Return for each base a table of its powers, one for every value of a digit."""
        tables = []
        for base in some:
            table = [mpz(1)]
            for _ in range(mask):
                table.append(table[-1] * base % modulus)
            tables.append(table)
        return tables

    tables = map_slices(powers, bases)
    # `multiply` takes the digits of x + largest, which is never negative. The factor ``surplus``
    # cancels the added ``largest`` in all products, so that no column needs an inversion.
    product = mpz(1)
    for base in bases:
        product = product * base % modulus
    surplus = gmpy2.powmod(product, -largest, modulus)

    def multiply(columns: Sequence[int]) -> list[mpz]:
        shifted = exponents[:, columns[0] : columns[-1] + 1] + largest
        totals = [mpz(1)] * len(columns)
        for place in reversed(range(num_digits)):  # the highest digit comes first
            digits = shifted >> (_DIGIT_BITS * place) & mask
            for at, of_column in enumerate(digits.T.tolist()):
                # All bases share these squarings, which make room for the next digit.
                total = gmpy2.powmod(totals[at], 1 << _DIGIT_BITS, modulus)
                for table, digit in zip(tables, of_column, strict=True):
                    if digit:
                        total = total * table[digit] % modulus
                totals[at] = total
        return [total * surplus % modulus for total in totals]

    return map_slices(multiply, range(exponents.shape[1]), name=name)
