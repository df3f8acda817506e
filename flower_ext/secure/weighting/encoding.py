"""Encoding of a sum's coordinates: real numbers as integers, and several integers in a plaintext.

Source: Algorithm 5 of Kato et al., "Uldp-FL" (PVLDB 2024). A value is rounded to the nearest
multiple of a step, and −x is encoded as n − x. The paper rounds towards zero, which doubles the
largest error. A plaintext holds coordinates as the digits of a number to a large base.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from gmpy2 import mpz
from numpy.typing import ArrayLike, NDArray

from flower_ext.checks import Checked, Count, Positive
from flower_ext.errors import InvalidValue

LARGEST_EXPONENT = 2**61
"""Largest magnitude of an encoded value, which serves as an exponent of a ciphertext. Twice this
number fits a signed 64-bit integer."""
_SPARE_BITS = 64


@dataclass(frozen=True, kw_only=True)
class FixedPoint(Checked):
    """Encoding of numbers up to ``bound`` in magnitude, as multiples of ``step``."""

    step: Positive
    bound: Positive

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bound / self.step > LARGEST_EXPONENT:
            raise InvalidValue(
                f"bound={self.bound!r} over step={self.step!r} is above 2**61: "
                "expected a smaller bound or a coarser step"
            )

    @property
    def largest(self) -> int:
        """Largest encoded magnitude, in steps."""
        return max(1, math.floor(self.bound / self.step + 0.5))

    def encode(self, values: ArrayLike, *, name: str = "values") -> NDArray[np.int64]:
        """Round each value to the nearest multiple of ``step``, and return the signed multipliers.

        Refuse a value that is not finite, or whose magnitude is above ``bound``. No value is
        clipped or wraps around.
        """
        array = np.asarray(values, dtype=np.float64)
        if not np.isfinite(array).all():
            raise InvalidValue(f"{name} hold NaN or infinite values: expected finite numbers")
        highest = float(np.abs(array).max(initial=0.0))
        if highest > self.bound:
            raise InvalidValue(
                f"{name} reach a magnitude of {highest:g}: expected at most {self.bound:g}"
            )
        scaled = np.rint(array / self.step).astype(np.int64)
        return np.clip(scaled, -self.largest, self.largest)  # only rounding exceeds this limit

    def decode(self, encoded: Iterable[int], *, scale: int = 1) -> NDArray[np.float64]:
        """Undo `encode` for integers that were multiplied by ``scale`` after the encoding."""
        return np.array([int(x) / scale * self.step for x in encoded], dtype=np.float64)


def from_residue(residue: mpz, modulus: mpz) -> mpz:
    """Return the integer between ± ``modulus / 2`` that equals ``residue`` modulo ``modulus``."""
    return residue - modulus if 2 * residue > modulus else residue


@dataclass(frozen=True, kw_only=True)
class Packing(Checked):
    """Layout of a plaintext that holds ``slots`` signed coordinates of ``slot_bits`` bits each.

    Packing is exact as long as every coordinate of the *sum* over all users and silos is at most
    ``bound`` in magnitude.
    """

    bound: Count
    slots: Count

    @classmethod
    def fitting(cls, bound: int, modulus_floor: int) -> Packing:
        """Return a packing of as many slots as fit a modulus that is at least ``modulus_floor``.

        With two or more slots, the highest 64 bits of a plaintext stay empty. A sum that is out of
        bounds sets some of these bits, except with probability 2⁻⁶⁴, and `unpack` then refuses it.
        """
        most = int(2 * bound < modulus_floor)
        while most and cls(bound=bound, slots=most + 1).largest << _SPARE_BITS + 1 < modulus_floor:
            most += 1
        if most == 0:
            raise InvalidValue(
                f"a sum of up to {bound.bit_length()} bits and a sign does not fit a plaintext of "
                f"{modulus_floor.bit_length() - 1} bits: expected fewer records per user, smaller "
                "bounds, a coarser precision, or a larger key"
            )
        return cls(bound=bound, slots=most)

    @property
    def slot_bits(self) -> int:
        """Width of a slot in bits, which hold a magnitude and a sign."""
        return self.bound.bit_length() + 1

    @property
    def largest(self) -> int:
        """Largest magnitude of a packed number."""
        return self.bound * ((1 << self.slots * self.slot_bits) - 1) // ((1 << self.slot_bits) - 1)

    def pack(self, coordinates: Sequence[int]) -> list[mpz]:
        """Return plaintexts, as signed integers. Zeros fill up the last plaintext."""
        packed = []
        for start in range(0, len(coordinates), self.slots):
            total = mpz(0)
            for value in reversed(coordinates[start : start + self.slots]):
                total = (total << self.slot_bits) + int(value)
            packed.append(total)
        return packed

    def unpack(self, plaintexts: Sequence[mpz], coordinates: int) -> list[mpz]:
        """Return the coordinates in the plaintexts of `pack`, or in a sum of such plaintexts.

        Raise an OverflowError if a coordinate exceeds ``bound``, or if a sum exceeds its slots.
        """
        half, mask = mpz(1) << (self.slot_bits - 1), (mpz(1) << self.slot_bits) - 1
        digits: list[mpz] = []
        for plaintext in plaintexts:
            rest = mpz(plaintext)
            for _ in range(self.slots):
                # Digits are signed: a negative coordinate borrowed from the slot above it.
                digit = ((rest + half) & mask) - half
                digits.append(digit)
                rest = (rest - digit) >> self.slot_bits
            if rest:
                raise OverflowError("a packed sum does not fit its slots: a summand was too large")
        if any(abs(value) > self.bound for value in digits):
            raise OverflowError("a coordinate exceeds its bound: a summand was too large")
        return digits[:coordinates]
