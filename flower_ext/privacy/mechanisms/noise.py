"""Noise for privacy: Gaussian noise for sums, and gamma noise for objective perturbation.

The float sum of a value and its noise lies on a grid that depends on the value's low-order bits.
The sum therefore reveals which value was noised (Mironov 2012). `NoiseSource.add_gaussian` instead
releases whole multiples of a public grid g, a power of two. The argument:

1. Let v be the exact value, and Z a real Gaussian of the requested stddev σ.
2. The release is g·round((v + Z)/g), a function of v + Z and of the public g alone.
3. It is thus post-processing of the Gaussian mechanism, and the sensitivity of v is unchanged.
4. v/g is split into a whole number and a remainder of at most one half. Both are exact, because g
   is a power of two. Only the remainder is added to the noise before rounding.
5. Whole numbers below 2⁵³ add up without error in float64; a value above 2⁵² g is refused.
6. g is 2⁻¹⁹ to 2⁻¹⁸ of the σ of a sum's noise, which is public. A client's share of σ may depend on
   the size of the cohort, which may be secret; g depends on the whole σ only.
7. NumPy draws Z from 256 layers of 2⁵² equidistant points each, and every cell of the grid contains
   at least 2³¹ points of a layer. So every cell has its Gaussian probability to a relative 2⁻²⁹.
   (The tails are less exact, but their probability is too small to matter.) d numbers are within
   2⁻²⁹ √(d/2) of ideal ones in total variation (Pinsker; at worst 4·10⁻⁶ at d = 10⁷). The guarantee
   does not count this distance.
8. Let m values lie on one grid, each with a share of the noise of stddev s ≥ 16 g. Their sum is, up
   to exp(−2π²s²/g²) (Poisson's summation formula), the rounded total of three parts: the sum of the
   v's, a Gaussian with the shares' variances added up, and m − 1 independent uniforms of width g.
   Adding the uniforms and rounding is post-processing, so an adversary who sees only sums faces the
   whole noise.
9. The number of uniforms reveals how many units were drawn. But an additional uniform changes the
   variance only by a fraction of 2⁻³⁶/12, less than the error in statement 7.
10. Rounding to an array's own precision comes last, and is post-processing. float32 represents all
    multiples of g up to 2²⁴ g, above 32 σ, so sums of uploads stay sums on the grid.

Nothing here hides how long a draw takes.
"""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import array_api_compat as api
import numpy as np

from flower_ext.checks import require_at_least_one, require_not_negative, require_positive
from flower_ext.errors import InvalidValue
from flower_ext.privacy.mechanisms.discrete_gaussian import draw
from flower_ext.privacy.mechanisms.updates import NamedArrays, NonFiniteUpdate, check_arrays
from flower_ext.privacy.randomness import secure_generator, seeded_generator

IMPROBABLE = 1e-12
"""Largest probability with which an honest upload exceeds `largest_noised_norm`."""
_CELLS_PER_STDDEV = 18
"""Binary logarithm of the grid's cells per stddev. The grid is fine enough that rounding adds
nothing to the noise, and coarse enough that the generator's own points are far closer together."""
_FINEST, _COARSEST = 2.0**-32, 2.0**-4
"""Limits of the grid that a caller passes, in stddevs."""
_MOST_CELLS = 2.0**52
"""Largest value in cells: above it, value plus noise is no exact whole number in float64."""
_TOGETHER = 2**15
"""Number of values that are noised at a time, so that they stay in the processor's caches."""


def noise_grid(stddev: float) -> float:
    """Return the power of two above 2⁻¹⁹ and up to 2⁻¹⁸ times ``stddev``.

    This is the step of the grid to which noised values are rounded. It depends on ``stddev`` only,
    and so reveals nothing about a value.
    """
    return math.ldexp(1.0, math.frexp(stddev)[1] - 1 - _CELLS_PER_STDDEV)


def largest_noised_norm(bound: float, stddev: float, numbers: int) -> float:
    """Return a norm that ‖x + N(0, stddev² I)‖₂ exceeds with probability `IMPROBABLE` at most.

    x has ``numbers`` elements and a norm of at most ``bound``. The noised norm has a mean of at
    most √(bound² + numbers · stddev²). It is 1-Lipschitz in the noise, so it exceeds its mean by
    t·stddev with probability exp(−t²/2) at most.
    """
    tail = math.sqrt(2 * math.log(1 / IMPROBABLE))
    return math.sqrt(bound**2 + numbers * stddev**2) + tail * stddev


class NoiseSource(ABC):
    """A source of noise from NumPy generators; subclasses choose the generator."""

    is_secure: bool
    """True if nobody can reproduce the noise."""

    @abstractmethod
    def _generator(self) -> np.random.Generator:
        """Return the generator that draws the noise of the next release."""

    def add_gaussian(
        self, update: NamedArrays, stddev: float, *, grid: float | None = None
    ) -> dict[str, Any]:
        """Return ``update`` + N(0, stddev² I); each array keeps its type, precision and device.

        Guarantees
        ----------
        The sum is rounded to whole multiples of ``grid``, and only then to an array's precision.
        With ``stddev=0`` nothing is added, rounded or guaranteed.

        Parameters
        ----------
        grid : float, optional
            A public power of two, from 2⁻³² to 2⁻⁴ of ``stddev``; by default `noise_grid`. Pass a
            grid if ``stddev`` depends on a secret, or if noised values will be added up.

        Raises
        ------
        NonFiniteUpdate
            An array holds NaN or infinite values, before or after the noise is added, or values so
            large that float64 would lose the noise.
        TypeError, ValueError
            An array is not floating-point. Or ``stddev`` is not a finite number >= 0, or is too
            small for a grid. Or ``grid`` does not suit ``stddev``.
        """
        require_not_negative("stddev", stddev)
        check_arrays(update)
        if stddev == 0:
            return dict(update)
        chosen = noise_grid(stddev) if grid is None else grid
        _check_grid(chosen, stddev)
        rng = self._generator()
        return {name: _noised(name, array, stddev, chosen, rng) for name, array in update.items()}

    def gaussian(self, like: NamedArrays, stddev: float) -> dict[str, Any]:
        """Return N(0, stddev² I) in float64 with the names, shapes and devices of ``like``.

        The noise is not rounded. Add it to the value first, and then round the result to a public
        grid.
        """
        require_not_negative("stddev", stddev)
        check_arrays(like)
        rng = self._generator()
        return {name: stddev * _normal(array, array.shape, rng) for name, array in like.items()}

    def add_discrete_gaussian(
        self, cells: Mapping[str, np.ndarray], stddev: float
    ) -> dict[str, np.ndarray]:
        """Return ``cells`` + N_Z(0, stddev²): add discrete Gaussian noise to every whole number.

        ``cells`` are arrays of int64, and ``stddev`` counts whole numbers. Raises as
        `discrete_gaussian.draw`.
        """
        rng = self._generator()
        return {
            name: array + draw(stddev, array.size, rng).reshape(array.shape)
            for name, array in cells.items()
        }

    def gamma_direction(self, dimension: int, scale: float) -> np.ndarray:
        """Return a vector b of shape (dimension,) with density ∝ exp(−‖b‖₂ / scale).

        The vector's direction is uniform, and its norm has the distribution Gamma(dimension,
        scale). Objective perturbation uses this noise (Chaudhuri, Monteleoni, Sarwate 2011).
        """
        require_at_least_one("dimension", dimension)
        require_positive("scale", scale)
        rng = self._generator()
        direction = rng.standard_normal(dimension)
        radius = rng.gamma(shape=dimension, scale=scale)
        return np.asarray(radius * direction / np.linalg.norm(direction))


class SecureNoise(NoiseSource):
    """Noise under a fresh key from the operating system for every release: the default."""

    is_secure = True

    def _generator(self) -> np.random.Generator:
        return secure_generator()


class SeededNoise(NoiseSource):
    """Reproducible noise, for simulation only: anybody who knows the seed can subtract the noise.

    One object yields one stream, so its successive releases differ.
    """

    is_secure = False

    def __init__(self, seed: int, *path: str | int) -> None:
        self._rng = seeded_generator(seed, *path)

    def _generator(self) -> np.random.Generator:
        return self._rng


def _check_grid(grid: float, stddev: float) -> None:
    if not sys.float_info.min <= grid:
        raise InvalidValue(f"stddev={stddev!r}: expected a number above 1e-300, or 0 for no noise")
    if math.frexp(grid)[0] != 0.5 or not _FINEST <= grid / stddev <= _COARSEST:
        raise InvalidValue(
            f"grid={grid!r}: expected a power of two from {_FINEST:g} to {_COARSEST:g} times the "
            f"stddev of {stddev:g}"
        )


def _normal(like: Any, shape: Any, rng: np.random.Generator) -> Any:
    """Draw standard normal numbers in float64, on the device of ``like``."""
    drawn = rng.standard_normal(tuple(shape))
    return api.array_namespace(like).asarray(drawn, device=api.device(like))


def _noised(name: str, array: Any, stddev: float, grid: float, rng: np.random.Generator) -> Any:
    namespace = api.array_namespace(array)
    flat = namespace.reshape(array, (-1,))
    noised = namespace.empty_like(flat)
    with np.errstate(over="ignore", invalid="ignore"):  # non-finite results are refused below
        for start in range(0, flat.shape[0], _TOGETHER):
            rest = namespace.astype(flat[start : start + _TOGETHER], namespace.float64)
            rest *= 1 / grid
            if not float(namespace.max(namespace.abs(rest))) <= _MOST_CELLS:
                raise NonFiniteUpdate(
                    f"{name!r}: expected finite numbers, small enough for float64 to add noise of "
                    f"standard deviation {stddev:g} to them; clip the array before it is noised"
                )
            whole = namespace.round(rest)
            rest -= whole
            noise = _normal(array, rest.shape, rng)
            noise *= stddev / grid
            noise += rest  # the remainder of step 4 at the top of this module
            namespace.round(noise, out=noise)
            noise += whole
            noise *= grid
            noised[start : start + _TOGETHER] = noise
    if not bool(namespace.all(namespace.isfinite(noised))):
        raise NonFiniteUpdate(
            f"{name!r} is no longer finite once noise of standard deviation {stddev:g} is added: "
            f"the sum is too large for {array.dtype}; use a wider type or less noise"
        )
    return namespace.reshape(noised, array.shape)
