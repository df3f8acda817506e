"""Several coordinates in one plaintext: the digits of a number to a large base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gmpy2 import mpz

from flower_ext.errors import InvalidValue

_SPARE_BITS = 64


@dataclass(frozen=True, kw_only=True)
class Packing:
    """``slots`` signed coordinates of ``slot_bits`` bits each.

    Packing is exact as long as every coordinate of the *sum* is at most ``bound`` in magnitude.

    Parameters
    ----------
    bound : int
        Largest magnitude of a coordinate of the sum over all users and silos.
    slots : int
        Coordinates in one plaintext.
    """

    bound: int
    slots: int

    def __post_init__(self) -> None:
        if self.bound < 1 or self.slots < 1:
            raise InvalidValue(f"bound={self.bound}, slots={self.slots}: expected both >= 1")

    @classmethod
    def fitting(cls, bound: int, modulus_floor: int, slots: int | None = None) -> Packing:
        """Return a packing of ``slots`` slots, or by default of as many as fit.

        With two or more slots, 64 bits of a plaintext stay empty. A sum out of bounds fills them,
        except with probability 2⁻⁶⁴, and `unpack` then refuses it.

        Parameters
        ----------
        modulus_floor : int
            The modulus, or a lower bound on it.

        Raises
        ------
        ValueError
            The slots do not fit, because a sum could reach half the modulus.
        """
        most = int(2 * bound < modulus_floor)
        while most and cls(bound=bound, slots=most + 1).largest << _SPARE_BITS + 1 < modulus_floor:
            most += 1
        if most == 0:
            raise InvalidValue(
                f"a sum of up to {bound.bit_length()} bits does not fit a plaintext of "
                f"{modulus_floor.bit_length() - 1} bits and a sign: expected fewer records per "
                "user, smaller bounds, a coarser precision, or a larger key"
            )
        if slots is not None and not 1 <= slots <= most:
            raise InvalidValue(
                f"coordinates_per_plaintext={slots}: expected an integer from 1 to {most}"
            )
        return cls(bound=bound, slots=slots or most)

    @property
    def slot_bits(self) -> int:
        """Width of a slot in bits: magnitude and sign."""
        return self.bound.bit_length() + 1

    @property
    def largest(self) -> int:
        """Largest magnitude of a packed number."""
        return self.bound * ((1 << self.slots * self.slot_bits) - 1) // ((1 << self.slot_bits) - 1)

    def plaintexts(self, coordinates: int) -> int:
        """Return the number of plaintexts that hold ``coordinates`` coordinates."""
        return -(-coordinates // self.slots)

    def pack(self, coordinates: Sequence[int]) -> list[mpz]:
        """Return signed plaintexts; zeros fill up the last one."""
        packed = []
        for start in range(0, len(coordinates), self.slots):
            total = mpz(0)
            for value in reversed(coordinates[start : start + self.slots]):
                total = (total << self.slot_bits) + int(value)
            packed.append(total)
        return packed

    def unpack(self, plaintexts: Sequence[mpz], coordinates: int) -> list[mpz]:
        """Undo `pack`, for one list of plaintexts or for a sum of lists.

        Raises
        ------
        OverflowError
            A coordinate's magnitude exceeds ``bound``, so some summand broke the agreed limits.
        """
        half, mask = mpz(1) << (self.slot_bits - 1), (mpz(1) << self.slot_bits) - 1
        digits: list[mpz] = []
        for plaintext in plaintexts:
            rest = mpz(plaintext)
            for _ in range(self.slots):
                digit = ((rest + half) & mask) - half
                digits.append(digit)
                rest = (rest - digit) >> self.slot_bits
            if rest:
                raise OverflowError("a packed sum is longer than its slots")
        if any(abs(value) > self.bound for value in digits):
            raise OverflowError("a coordinate of the sum is above its bound")
        return digits[:coordinates]
