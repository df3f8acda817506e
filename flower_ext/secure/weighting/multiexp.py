"""Many products of powers over the same bases: the hot path of private weighting.

This module computes Π_u b_u^{x_uj} for every column j of a matrix of short signed exponents. All
columns have the same bases, so each base gets a table of its small powers. An exponent then becomes
a few signed digits. Each digit costs one look-up and one multiplication, into a numerator or a
denominator. All bases of a column share squarings, and many columns share inversions.

With U bases, d columns, exponents of b bits, digits of w bits and v tables a base, there are
k = ⌈b/w⌉ digits and g = ⌈k/v⌉ steps, and the number of modular multiplications is about

    U·v·2^(w-1)  +  U·(v-1)·g·w     +  d·(U·k + (g-1)·w + 5·g)
    tables          their bases        columns: look-ups, squarings, inversions

`choose_windows` minimises it. Bucket methods (Pippenger) over the bases of one column cost
d·(U·k + 2^w) instead, because buckets serve one column only and the tables serve all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import gmpy2
import numpy as np
from gmpy2 import mpz
from numpy.typing import NDArray

from flower_ext.errors import InvalidValue
from flower_ext.secure.inverses import invert_all
from flower_ext.secure.threads import Progress, map_slices

DEFAULT_TABLE_MEMORY = 512 * 2**20
"""Bytes that tables may use by default."""

LARGEST_EXPONENT = 2**61
"""Largest magnitude of an exponent, because digits are taken from 64-bit integers."""

_LARGEST_WIDTH = 16
_OBJECT_BYTES = 64  # an mpz and its place in a list, besides its limbs
_SETTLING = 5  # multiplications per column and step: numerator, denominator and its inverse


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Division of an exponent: ``tables`` times ``steps`` digits of ``width`` bits each."""

    width: int
    tables: int
    steps: int

    def cover(self, lowest: int, highest: int) -> bool:
        """Return True if digits from -2^(w-1) to 2^(w-1) - 1 reach ``lowest`` and ``highest``."""
        digits, half = self.tables * self.steps, 1 << (self.width - 1)
        ones = ((1 << digits * self.width) - 1) // ((1 << self.width) - 1)
        return -half * ones <= lowest and highest <= (half - 1) * ones

    def table_multiplications(self, bases: int) -> int:
        """Return the number of modular multiplications for the tables of ``bases`` bases."""
        powers = self.tables * ((1 << (self.width - 1)) - 1)
        return bases * (powers + (self.tables - 1) * self.steps * self.width)

    def column_multiplications(self, bases: int) -> int:
        """Return the number of modular multiplications for one product over ``bases`` bases."""
        squarings = (self.steps - 1) * self.width
        return bases * self.tables * self.steps + squarings + _SETTLING * self.steps

    def table_bytes(self, bases: int, modulus_bits: int) -> int:
        """Return the memory of the tables in bytes."""
        powers = (1 << (self.width - 1)) + 1
        return bases * self.tables * powers * (modulus_bits // 8 + _OBJECT_BYTES)


def choose_windows(
    *,
    bases: int,
    products: int,
    lowest: int,
    highest: int,
    modulus_bits: int,
    table_memory_limit: int = DEFAULT_TABLE_MEMORY,
) -> Windows:
    """Return the windows with the fewest multiplications whose tables fit the memory.

    Parameters
    ----------
    lowest, highest : int
        Range of exponents.

    Raises
    ------
    ValueError
        Even the smallest tables exceed ``table_memory_limit``.
    """
    candidates = []
    for width in range(2, _LARGEST_WIDTH + 1):
        digits = 1
        while not Windows(width=width, tables=1, steps=digits).cover(lowest, highest):
            digits += 1
        candidates += [
            Windows(width=width, tables=tables, steps=-(-digits // tables))
            for tables in range(1, digits + 1)
        ]
    fitting = [w for w in candidates if w.table_bytes(bases, modulus_bits) <= table_memory_limit]
    if not fitting:
        least = min(windows.table_bytes(bases, modulus_bits) for windows in candidates)
        raise InvalidValue(
            f"table_memory_limit={table_memory_limit}: expected at least {least} bytes "
            f"for {bases} bases"
        )
    return min(
        fitting,
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
    table_memory_limit : int
        Most bytes that the tables may use.

    Raises
    ------
    ValueError
        The range is longer than 62 bits, or the tables do not fit.
    """

    def __init__(
        self,
        bases: Sequence[mpz],
        modulus: mpz,
        *,
        lowest: int,
        highest: int,
        expected_products: int,
        table_memory_limit: int = DEFAULT_TABLE_MEMORY,
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
            table_memory_limit=table_memory_limit,
        )
        built = map_slices(self._build, bases, workers=workers)
        self._bases = len(bases)
        self._tables = [table for of_base in built for table in of_base]

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
        if exponents.ndim != 2 or len(exponents) != self._bases:
            raise InvalidValue(
                f"exponents of shape {exponents.shape}: expected ({self._bases}, products)"
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

    def _build(self, bases: Sequence[mpz]) -> list[list[list[mpz]]]:
        """Return for each base b the powers 0 to 2^(w-1) of b, b^(2^gw), b^(2^2gw) and so on."""
        modulus, windows = self._modulus, self.windows
        apart = 1 << (windows.steps * windows.width)
        built = []
        for base in bases:
            tables: list[list[mpz]] = []
            for number in range(windows.tables):
                at = gmpy2.powmod(tables[-1][1], apart, modulus) if number else base
                table = [mpz(1), at]
                for _ in range((1 << (windows.width - 1)) - 1):
                    table.append(table[-1] * at % modulus)
                tables.append(table)
            built.append(tables)
        return built

    def _columns(self, exponents: NDArray[np.int64]) -> list[mpz]:
        modulus, windows = self._modulus, self.windows
        digits = self._digits(exponents)
        totals = [mpz(1)] * exponents.shape[1]
        for step in reversed(range(windows.steps)):
            of_step = digits[step :: windows.steps]  # (tables, bases, products)
            columns = of_step.transpose(2, 1, 0).reshape(len(totals), -1).tolist()
            numerators, denominators = [], []
            for of_column in columns:
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
                for _ in range(windows.width if step < windows.steps - 1 else 0):
                    total = total * total % modulus
                totals[at] = total * numerators[at] % modulus * inverses[at] % modulus
        return totals

    def _digits(self, exponents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return signed digits, lowest first, of shape (digits, bases, products)."""
        half = 1 << (self.windows.width - 1)
        digits = []
        rest = exponents
        for _ in range(self.windows.tables * self.windows.steps):
            digit = ((rest + half) & (2 * half - 1)) - half
            rest = (rest - digit) >> self.windows.width
            digits.append(digit)
        return np.stack(digits)
