"""Perturb a client's whole local model before it leaves: its weights, or its training objective."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from flower_ext.checks import require_positive
from flower_ext.privacy.mechanisms.bounds import clip
from flower_ext.privacy.mechanisms.noise import NoiseSource
from flower_ext.privacy.mechanisms.updates import Update, check_arrays, in_float64, in_precision_of


@dataclass(frozen=True, kw_only=True)
class OutputPerturbation:
    """Clip the whole local model to norm τ and add N(0, σ² I).

    Parameters
    ----------
    clipping_norm : float
        τ > 0, the L2 norm over all arrays together.
    noise_stddev : float
        σ > 0, a standard deviation in the unit of the weights.
    """

    clipping_norm: float
    noise_stddev: float

    def __post_init__(self) -> None:
        require_positive("clipping_norm", self.clipping_norm)
        require_positive("noise_stddev", self.noise_stddev)

    def __str__(self) -> str:
        return (
            f"output perturbation: clipping norm {self.clipping_norm:g}, "
            f"noise stddev {self.noise_stddev:g}"
        )

    def apply(self, model: Update, noise: NoiseSource) -> dict[str, Any]:
        """Clip and noise a model in float64, then round the result to the model's own precision.

        Raises
        ------
        NonFiniteUpdate, TypeError, ValueError
            As `clip`; also if the result is too large for the model's precision.
        """
        check_arrays(model)
        bounded = clip(in_float64(model), self.clipping_norm).value
        noised = noise.add_gaussian(bounded, self.noise_stddev)
        return in_precision_of(model, noised)


@dataclass(frozen=True, kw_only=True)
class ObjectivePerturbation:
    """Add ⟨n, w⟩ to the local objective, with n of density ∝ exp(−α‖n‖₂).

    Parameters
    ----------
    rate : float
        α > 0. The norm of n is Gamma distributed with mean d/α for d parameters.
    """

    rate: float

    def __post_init__(self) -> None:
        require_positive("rate", self.rate)

    def __str__(self) -> str:
        return f"objective perturbation: rate {self.rate:g}"

    def direction(self, like: Update, noise: NoiseSource) -> dict[str, np.ndarray]:
        """Draw n, as float64 arrays with the names and shapes of ``like``."""
        check_arrays(like)
        sizes = [math.prod(array.shape) for array in like.values()]
        parts = np.split(noise.gamma_direction(sum(sizes), 1 / self.rate), np.cumsum(sizes)[:-1])
        return {
            name: part.reshape(tuple(array.shape))
            for (name, array), part in zip(like.items(), parts, strict=True)
        }


Perturbation = OutputPerturbation | ObjectivePerturbation
"""A client's perturbation of its model before the model leaves."""
