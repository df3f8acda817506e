"""Real numbers as integers modulo n: multiples of a step, negatives as n − x.

Source: Algorithm 5 of Kato et al., "Uldp-FL" (PVLDB 2024). Values are rounded to the nearest
multiple; the paper cuts towards zero, which errs twice as far.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from gmpy2 import mpz
from numpy.typing import ArrayLike, NDArray

from flower_ext.checks import require_positive
from flower_ext.errors import InvalidValue

_LARGEST_ENCODED = 2**61
"""Twice of it still fits 64 bits, which the products of powers rely on."""


@dataclass(frozen=True, kw_only=True)
class FixedPoint:
    """Multiples of ``step`` of magnitude at most ``bound``.

    Parameters
    ----------
    step : float
        Distance of neighbouring values. Rounding errs by at most half of it.
    bound : float
        Largest magnitude that is accepted.
    """

    step: float = 1e-10
    bound: float

    def __post_init__(self) -> None:
        require_positive("step", self.step)
        require_positive("bound", self.bound)
        if self.bound / self.step > _LARGEST_ENCODED:
            raise InvalidValue(
                f"bound={self.bound!r} over step={self.step!r} is above 2**61: "
                "expected a smaller bound or a coarser step"
            )

    @property
    def largest(self) -> int:
        """The largest encoded magnitude."""
        return max(1, math.floor(self.bound / self.step + 0.5))

    def encode(self, values: ArrayLike, *, name: str = "values") -> NDArray[np.int64]:
        """Nearest multiples of ``step``, signed.

        Raises
        ------
        ValueError
            A value is not finite, or larger than ``bound``. Nothing is wrapped or clipped.
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
        return np.clip(scaled, -self.largest, self.largest)  # undoes only rounding at the bound

    def decode(self, encoded: Iterable[int], *, scale: int = 1) -> NDArray[np.float64]:
        """Real numbers from integers that also carry a factor ``scale``."""
        return np.array([int(x) / scale * self.step for x in encoded], dtype=np.float64)


def from_residue(residue: mpz, modulus: mpz) -> mpz:
    """The signed integer of magnitude below ``modulus / 2`` that ``residue`` stands for."""
    return residue - modulus if 2 * residue > modulus else residue
