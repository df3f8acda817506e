"""Many products of powers over the same bases: the hot path of private weighting.

This module computes Π_u b_u^{x_uj} for every column j of a matrix of short signed exponents. All
columns have the same bases, so each base gets a table of its small powers. An exponent then becomes
a few signed digits. Each digit costs one look-up and one multiplication, into a numerator or a
denominator. All bases of a column share squarings, and many columns share inversions. For exponents
of 36 bits this takes a tenth of the time of one power for each base and column.

With U bases, d columns and k digits of w bits, the number of modular multiplications is about

    U·2^(w-1)  +  d·(U·k + (k-1)·w + 5·k)
    tables        look-ups, squarings, inversions

`choose_windows` minimises it. Bucket methods (Pippenger) over the bases of one column cost
d·(U·k + 2^w) instead, because buckets serve one column only and the tables serve all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from gmpy2 import mpz
from numpy.typing import NDArray

from flower_ext.errors import InvalidValue
from flower_ext.secure.pair_keys import invert_all
from flower_ext.secure.threads import Progress, map_slices

LARGEST_EXPONENT = 2**61
"""Largest magnitude of an exponent, because digits are taken from 64-bit integers."""

_TABLE_MEMORY = 512 * 2**20
"""Bytes that tables may use, except those of digits of two bits, which are the smallest."""
_LARGEST_WIDTH = 16
_OBJECT_BYTES = 64  # an mpz and its place in a list, besides its limbs
_SETTLING = 5  # multiplications per column and digit: numerator, denominator and its inverse


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Division of an exponent into ``digits`` digits of ``width`` bits each."""

    width: int
    digits: int

    @classmethod
    def covering(cls, width: int, lowest: int, highest: int) -> Windows:
        """Return the fewest digits, from -2^(w-1) to 2^(w-1) - 1, that write a whole range."""
        half, ones, digits = 1 << (width - 1), 1, 1
        while not -half * ones <= lowest <= highest <= (half - 1) * ones:
            ones, digits = (ones << width) + 1, digits + 1
        return cls(width=width, digits=digits)

    def table_multiplications(self, bases: int) -> int:
        """Return the number of modular multiplications for the tables of ``bases`` bases."""
        return bases * ((1 << (self.width - 1)) - 1)

    def column_multiplications(self, bases: int) -> int:
        """Return the number of modular multiplications for one product over ``bases`` bases."""
        return (bases + _SETTLING) * self.digits + (self.digits - 1) * self.width

    def table_bytes(self, bases: int, modulus_bits: int) -> int:
        """Return the memory of the tables in bytes."""
        return bases * ((1 << (self.width - 1)) + 1) * (modulus_bits // 8 + _OBJECT_BYTES)


def choose_windows(
    *, bases: int, products: int, lowest: int, highest: int, modulus_bits: int
) -> Windows:
    """Return the windows with the fewest multiplications whose tables fit the memory.

    Parameters
    ----------
    lowest, highest : int
        Range of exponents.
    """
    least, *others = (
        Windows.covering(width, lowest, highest) for width in range(2, _LARGEST_WIDTH + 1)
    )
    fitting = [w for w in others if w.table_bytes(bases, modulus_bits) <= _TABLE_MEMORY]
    return min(
        [least, *fitting],
        key=lambda w: w.table_multiplications(bases) + products * w.column_multiplications(bases),
    )


class FixedBaseProducts:
    """Products Π_u bases[u]^x_u modulo ``modulus``, for many vectors x.

    Parameters
    ----------
    bases : Sequence[mpz]
        Units modulo ``modulus``.
    lowest, highest : int
        Range of exponents.
    expected_products : int
        Estimate of the number of products that callers will ask for. It decides on the tables.

    Raises
    ------
    ValueError
        The range is longer than 62 bits.
    """

    def __init__(
        self,
        bases: Sequence[mpz],
        modulus: mpz,
        *,
        lowest: int,
        highest: int,
        expected_products: int,
        workers: int = 1,
    ) -> None:
        if not -LARGEST_EXPONENT <= lowest <= 0 < highest <= LARGEST_EXPONENT:
            raise InvalidValue(
                f"lowest={lowest}, highest={highest}: expected lowest <= 0 < highest, within 2**61"
            )
        self._modulus = modulus
        self._lowest, self._highest = lowest, highest
        self.windows = choose_windows(
            bases=max(1, len(bases)),
            products=expected_products,
            lowest=lowest,
            highest=highest,
            modulus_bits=modulus.bit_length(),
        )
        self._tables = map_slices(self._build, bases, workers=workers)

    def of(
        self,
        exponents: NDArray[np.int64],
        *,
        workers: int = 1,
        progress: Progress | None = None,
    ) -> list[mpz]:
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
        if exponents.size and not self._lowest <= exponents.min() <= exponents.max() <= (
            self._highest
        ):
            raise InvalidValue(
                f"exponents: expected integers from {self._lowest} to {self._highest}"
            )

        def multiply(columns: Sequence[int]) -> list[mpz]:
            return self._columns(exponents[:, columns[0] : columns[-1] + 1])

        return map_slices(multiply, range(exponents.shape[1]), workers=workers, progress=progress)

    def _build(self, bases: Sequence[mpz]) -> list[list[mpz]]:
        """Return the powers 0 to 2^(w-1) of each base."""
        tables = []
        for base in bases:
            table = [mpz(1), base]
            for _ in range((1 << (self.windows.width - 1)) - 1):
                table.append(table[-1] * base % self._modulus)
            tables.append(table)
        return tables

    def _columns(self, exponents: NDArray[np.int64]) -> list[mpz]:
        modulus = self._modulus
        totals = [mpz(1)] * exponents.shape[1]
        for place, of_place in enumerate(reversed(self._digits(exponents))):
            numerators, denominators = [], []
            for of_column in of_place.T.tolist():
                above = below = mpz(1)
                for table, digit in zip(self._tables, of_column, strict=True):
                    if digit > 0:
                        above = above * table[digit] % modulus
                    elif digit < 0:
                        below = below * table[-digit] % modulus
                numerators.append(above)
                denominators.append(below)
            inverses = invert_all(denominators, modulus)
            for at, total in enumerate(totals):
                for _ in range(self.windows.width if place else 0):
                    total = total * total % modulus
                totals[at] = total * numerators[at] % modulus * inverses[at] % modulus
        return totals

    def _digits(self, exponents: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return signed digits, lowest first, each of shape (bases, products)."""
        half = 1 << (self.windows.width - 1)
        digits, rest = [], exponents
        for _ in range(self.windows.digits):
            digit = ((rest + half) & (2 * half - 1)) - half
            rest = (rest - digit) >> self.windows.width
            digits.append(digit)
        return digits
