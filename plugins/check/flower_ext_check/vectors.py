"""Summaries of uploads and models, which are shorter and can still be compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np

HELD_NORM = 1e-3
"""L2 norm of the public update that clients send in a held run."""
SAMPLE = 100_000
"""Largest number of coordinates that a vector keeps."""


@dataclass(frozen=True, kw_only=True)
class Vector:
    """A summary of the floating-point numbers in arrays: a sample, a projection and the norm."""

    size: int
    sample: np.ndarray
    """Evenly spaced coordinates, at most `SAMPLE`; all of them if there are no more."""
    along: float
    """Projection onto `direction`."""
    norm: float
    """L2 norm of all coordinates; for the result of `minus`, of the sample alone."""
    finite: bool

    def minus(self, other: Vector) -> Vector:
        """Return this vector minus another of the same size."""
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
    """Return a public unit vector. A changed client moves the model in its direction."""
    return _signs(size, 7, norm=1.0)


@cache
def held_step(size: int) -> np.ndarray:
    """Return the public update of norm `HELD_NORM` that every client makes in a held run."""
    return _signs(size, 8, norm=HELD_NORM)


def _signs(size: int, seed: int, *, norm: float) -> np.ndarray:
    """Return equal numbers with pseudorandom signs. The signs are public, as the seed is."""
    bits = np.random.Generator(np.random.PCG64(seed)).integers(0, 2, size)
    signs: np.ndarray = np.where(bits == 0, -1.0, 1.0) * (norm / size**0.5)
    return signs


def summarize(arrays: Iterable[np.ndarray]) -> Vector | None:
    """Return a summary of all floating-point arrays; None if there are none."""
    parts = [np.asarray(array, np.float64).ravel() for array in arrays if array.dtype.kind == "f"]
    if not sum(part.size for part in parts):
        return None
    flat = np.concatenate(parts)
    spacing = -(-flat.size // SAMPLE)  # rounded up, so that no more than `SAMPLE` remain
    with np.errstate(all="ignore"):
        return Vector(
            size=flat.size,
            sample=flat[::spacing].copy(),
            along=float(flat @ direction(flat.size)),
            norm=float(np.linalg.norm(flat)),
            finite=bool(np.isfinite(flat).all()),
        )
