"""Many products of powers over the same bases: most of the work of private weighting.

This module computes Π_u b_u^{x_uj} for every column j of a matrix of short signed exponents. All
columns have the same bases, so each base gets a table of its small powers. An exponent is then a
few digits, each of which costs one look-up and one multiplication, and all bases of a column share
squarings. With U bases and exponents of k digits a column takes about k · (U + 7) multiplications,
where one power for each base takes 50 · U.
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
"""Largest magnitude of an exponent, because digits are taken from 64-bit integers."""
# A table of 128 powers modulo n² takes 0.1 MB. Wider digits save a sixth of the multiplications of
# a large model at twice the memory, and cost a small model more than they save.
_DIGIT_BITS = 7


class FixedBaseProducts:
    """Products Π_u bases[u]^x_u modulo ``modulus``, for many vectors x.

    Parameters
    ----------
    bases : Sequence[mpz]
        Units modulo ``modulus``.
    largest : int
        Largest magnitude of an exponent.

    Raises
    ------
    ValueError
        ``largest`` is not between 1 and 2**61.
    """

    def __init__(self, bases: Sequence[mpz], modulus: mpz, *, largest: int) -> None:
        if not 1 <= largest <= LARGEST_EXPONENT:
            raise InvalidValue(f"largest={largest}: expected an integer from 1 to 2**61")
        self._modulus, self._largest = modulus, largest
        self._digits = math.ceil((2 * largest).bit_length() / _DIGIT_BITS)
        self._tables = map_slices(self._build, bases)
        # Digits are those of x + largest, which is never negative. This factor takes the surplus
        # out of every product at once, so that no column needs an inversion.
        product = mpz(1)
        for base in bases:
            product = product * base % modulus
        self._surplus = gmpy2.powmod(product, -largest, modulus)

    def of(self, exponents: NDArray[np.int64], *, name: str = "") -> list[mpz]:
        """Return one product for each column of ``exponents``, of shape (bases, products).

        Raises
        ------
        ValueError
            The shape is wrong, or an exponent is out of range.
        """
        if exponents.ndim != 2 or len(exponents) != len(self._tables):
            raise InvalidValue(
                f"exponents of shape {exponents.shape}: expected ({len(self._tables)}, products)"
            )
        if np.abs(exponents).max(initial=0) > self._largest:
            raise InvalidValue(
                f"exponents: expected integers from {-self._largest} to {self._largest}"
            )

        def multiply(columns: Sequence[int]) -> list[mpz]:
            return self._columns(exponents[:, columns[0] : columns[-1] + 1])

        return map_slices(multiply, range(exponents.shape[1]), name=name)

    def _build(self, bases: Sequence[mpz]) -> list[list[mpz]]:
        """Return the powers of each base that one digit can ask for."""
        tables = []
        for base in bases:
            table = [mpz(1)]
            for _ in range((1 << _DIGIT_BITS) - 1):
                table.append(table[-1] * base % self._modulus)
            tables.append(table)
        return tables

    def _columns(self, exponents: NDArray[np.int64]) -> list[mpz]:
        modulus, shifted = self._modulus, exponents + self._largest
        totals = [mpz(1)] * exponents.shape[1]
        for place in reversed(range(self._digits)):  # the highest digit comes first
            digits = shifted >> (_DIGIT_BITS * place) & ((1 << _DIGIT_BITS) - 1)
            for at, of_column in enumerate(digits.T.tolist()):
                total = gmpy2.powmod(totals[at], 1 << _DIGIT_BITS, modulus)
                for table, digit in zip(self._tables, of_column, strict=True):
                    if digit:
                        total = total * table[digit] % modulus
                totals[at] = total
        return [total * self._surplus % modulus for total in totals]
