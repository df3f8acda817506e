"""Noise that protects: Gaussian for sums, gamma-direction for objective perturbation.

All noise is drawn in float64 and added in float64; only the noised value is rounded back to the
array's precision, which is post-processing. Floating-point Gaussians are not proof against attacks
on low-order bits (Mironov 2012): guarantees list that as an assumption.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import array_api_compat as api
import numpy as np

from flower_ext.privacy.bounds import NonFiniteUpdate, Update, check_arrays
from flower_ext.privacy.randomness import secure_generator, seeded_generator

IMPROBABLE = 1e-12
"""Probability with which noise may exceed what it is expected to stay within."""
_ABSORBING = 2.0**40
"""Values above this many stddevs leave noise too few of a float64's 53 bits."""


def largest_noised_norm(bound: float, stddev: float, numbers: int) -> float:
    """What ‖x + N(0, stddev² I)‖₂ exceeds with probability `IMPROBABLE` at most, if ‖x‖₂ ≤ bound.

    A norm is 1-Lipschitz in the noise, so it exceeds its mean by t·stddev with probability
    exp(−t²/2) at most; its mean is at most √(bound² + numbers · stddev²).
    """
    tail = math.sqrt(2 * math.log(1 / IMPROBABLE))
    return math.sqrt(bound**2 + numbers * stddev**2) + tail * stddev


class NoiseSource(Protocol):
    """Adds noise to arrays."""

    @property
    def is_secure(self) -> bool:
        """Whether nobody can reproduce the noise."""
        ...

    def add_gaussian(self, update: Update, stddev: float) -> dict[str, Any]:
        """``update`` + N(0, stddev² I), each array in its own type, precision and device.

        Raises
        ------
        NonFiniteUpdate
            An array holds NaN or infinite values, before or after, or values that absorb the noise.
        TypeError, ValueError
            An array is not floating-point; ``stddev`` is not a finite number >= 0.
        """
        ...

    def gamma_direction(self, dimension: int, scale: float) -> np.ndarray:
        """A vector of shape (dimension,) with density ∝ exp(−‖b‖₂ / scale).

        Its direction is uniform and its norm Gamma(dimension, scale) distributed: the noise of
        objective perturbation (Chaudhuri, Monteleoni, Sarwate 2011).
        """
        ...


class _GeneratorNoise:
    """Noise from NumPy generators; subclasses say where a generator comes from."""

    def _generator(self) -> np.random.Generator:
        raise NotImplementedError

    def add_gaussian(self, update: Update, stddev: float) -> dict[str, Any]:
        """``update`` + N(0, stddev² I) (see `NoiseSource`)."""
        if not 0 <= stddev < math.inf:
            raise ValueError(f"stddev={stddev!r}: expected a finite number >= 0")
        check_arrays(update)
        if stddev == 0:
            return dict(update)
        rng = self._generator()
        return {name: _noised(name, array, stddev, rng) for name, array in update.items()}

    def gamma_direction(self, dimension: int, scale: float) -> np.ndarray:
        """A vector with density ∝ exp(−‖b‖₂ / scale) (see `NoiseSource`)."""
        if dimension < 1:
            raise ValueError(f"dimension={dimension!r}: expected an integer >= 1")
        if not 0 < scale < math.inf:
            raise ValueError(f"scale={scale!r}: expected a finite number > 0")
        rng = self._generator()
        direction = rng.standard_normal(dimension)
        radius = rng.gamma(shape=dimension, scale=scale)
        return np.asarray(radius * direction / np.linalg.norm(direction))


class SecureNoise(_GeneratorNoise):
    """Noise under a fresh key of the operating system for every release: the default."""

    is_secure = True

    def _generator(self) -> np.random.Generator:
        return secure_generator()


class SeededNoise(_GeneratorNoise):
    """Reproducible noise, for simulation only: whoever knows the seed can take it off again.

    One object gives one stream; successive releases from it differ.
    """

    is_secure = False

    def __init__(self, seed: int, *path: str | int) -> None:
        self._rng = seeded_generator(seed, *path)

    def _generator(self) -> np.random.Generator:
        return self._rng


def _noised(name: str, array: Any, stddev: float, rng: np.random.Generator) -> Any:
    namespace = api.array_namespace(array)
    wide = namespace.astype(array, namespace.float64, copy=False)
    if bool(namespace.any(namespace.abs(wide) > stddev * _ABSORBING)):
        raise NonFiniteUpdate(f"{name!r} is so large that noise of stddev {stddev:g} is lost in it")
    noise = namespace.asarray(rng.standard_normal(tuple(array.shape)), device=api.device(array))
    noise *= stddev
    noise += wide
    noised = namespace.astype(noise, array.dtype, copy=False)
    if not bool(namespace.all(namespace.isfinite(noised))):
        raise NonFiniteUpdate(
            f"{name!r} is not finite after noise of stddev {stddev:g} in {array.dtype}"
        )
    return noised
