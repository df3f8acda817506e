"""Uploads and models as vectors, of which enough is kept to compare them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np

HELD = 1e-3
"""Norm of a held update."""
_SAMPLE = 100_000
"""Coordinates of each vector that are kept."""


@dataclass(frozen=True, kw_only=True)
class Vector:
    """All floating-point coordinates of some arrays, in short."""

    size: int
    sample: np.ndarray
    """At most `_SAMPLE` coordinates, evenly spaced."""
    along: float
    """Projection onto `direction`."""
    norm: float
    """Norm of all coordinates; of a difference, of the sample."""
    finite: bool

    def minus(self, other: Vector) -> Vector:
        """Return the difference to a vector of the same size."""
        difference = self.sample - other.sample
        return Vector(
            size=self.size,
            sample=difference,
            along=self.along - other.along,
            norm=float(np.linalg.norm(difference)),
            finite=self.finite and other.finite,
        )


@cache
def direction(size: int) -> np.ndarray:
    """Return a public unit vector, in which a changed client moves the model."""
    unit: np.ndarray = _signs(size, 7) / size**0.5
    return unit


@cache
def held_step(size: int) -> np.ndarray:
    """Return the public update of norm `HELD` that every client makes in a held run."""
    step: np.ndarray = _signs(size, 8) * (HELD / size**0.5)
    return step


def _signs(size: int, seed: int) -> np.ndarray:
    """Return public numbers of 1 and -1."""
    bits = np.random.Generator(np.random.PCG64(seed)).integers(0, 2, size)
    return np.where(bits == 0, -1.0, 1.0)


def vector(arrays: Iterable[np.ndarray]) -> Vector | None:
    """Return the vector of the floating-point arrays; None if there are none."""
    parts = [np.asarray(array, np.float64).ravel() for array in arrays if array.dtype.kind == "f"]
    if not sum(part.size for part in parts):
        return None
    flat = np.concatenate(parts)
    with np.errstate(all="ignore"):
        return Vector(
            size=flat.size,
            sample=flat[:: max(1, flat.size // _SAMPLE)].copy(),
            along=float(flat @ direction(flat.size)),
            norm=float(np.linalg.norm(flat)),
            finite=bool(np.isfinite(flat).all()),
        )
