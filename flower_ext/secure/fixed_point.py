"""Real numbers as integers modulo n: multiples of a step, negatives as n − x.

Source: Algorithm 5 of Kato et al., "Uldp-FL" (PVLDB 2024). Values are rounded to the nearest
multiple. The paper rounds towards zero, which doubles the largest error.
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
"""Twice this number fits a signed 64-bit integer; `weighting.multiexp` relies on it."""


@dataclass(frozen=True, kw_only=True)
class FixedPoint:
    """Multiples of ``step`` of magnitude at most ``bound``.

    Parameters
    ----------
    step : float
        Distance between neighbouring values. The rounding error is at most half of it.
    bound : float
        Largest accepted magnitude.
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
        """Largest encoded magnitude, in steps."""
        return max(1, math.floor(self.bound / self.step + 0.5))

    def encode(self, values: ArrayLike, *, name: str = "values") -> NDArray[np.int64]:
        """Return the nearest multiples of ``step`` as signed numbers of steps.

        Raises
        ------
        ValueError
            A value is not finite, or its magnitude exceeds ``bound``. No value wraps or is clipped.
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
        return np.clip(scaled, -self.largest, self.largest)  # only rounding can exceed it

    def decode(self, encoded: Iterable[int], *, scale: int = 1) -> NDArray[np.float64]:
        """Undo `encode`, for integers that were also multiplied by ``scale``."""
        return np.array([int(x) / scale * self.step for x in encoded], dtype=np.float64)


def from_residue(residue: mpz, modulus: mpz) -> mpz:
    """Return the signed integer of magnitude below ``modulus / 2`` with this residue."""
    return residue - modulus if 2 * residue > modulus else residue
