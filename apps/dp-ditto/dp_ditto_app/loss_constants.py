"""Estimates of the constants μ, L, G₀, M, Ψ₁ and Ψ₂ of `DittoProblem`, from a run without noise.

Such a pilot run sees the losses only along its own path. Elsewhere L, G₀ and M may be larger, and μ
smaller.
"""

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike

from flower_ext.errors import InvalidValue


@dataclass(frozen=True, kw_only=True)
class LossConstants:
    """The constants of `DittoProblem` that depend on the losses.

    Pass them as ``DittoProblem(**asdict(constants), ...)``.
    """

    strong_convexity: float
    smoothness: float
    gradient_bound: float
    model_spread: float
    initial_gap: float
    initial_distance: float

    def lines(self, *, dimension: int) -> str:
        """Return the constants and the dimension as lines of a ``ditto-schedule`` settings file."""
        numbers = {**asdict(self), "dimension": dimension}
        return "".join(
            f"{name.replace('_', '-')} = {number!r}\n" for name, number in numbers.items()
        )


def estimate_constants(
    *,
    models: ArrayLike,
    gradients: ArrayLike,
    losses: ArrayLike,
    local_optima: ArrayLike,
    smallest_step: float = 1e-9,
) -> LossConstants:
    """Estimate the constants of the bound from a pilot run of the global model.

    Parameters
    ----------
    models : ArrayLike
        w⁰, w¹, …: shape (rounds, weights). The last one stands for w*.
    gradients : ArrayLike
        ∇F_n(wᵗ): shape (rounds, clients, weights).
    losses : ArrayLike
        F(wᵗ), the mean over clients: shape (rounds,).
    local_optima : ArrayLike
        u_n*: shape (clients, weights), for instance from training each client alone.
    smallest_step : float
        Rounds that move the model by a smaller L2 distance do not count for curvature.

    Returns
    -------
    LossConstants
        Over all clients and pairs of rounds, with differences Δ between the two rounds of a pair,
        μ is the least ⟨Δg, Δw⟩/‖Δw‖², and L the largest ‖Δg‖/‖Δw‖. Ψ₂ is the largest squared
        distance from w⁰ to w* or to a u_n*, because the personal optima lie between w* and the
        u_n*.

    Raises
    ------
    ValueError
        Shapes do not fit, a number is not finite, the model never moved, or a loss is not convex
        along the path.
    """
    w, g = np.asarray(models, dtype=np.float64), np.asarray(gradients, dtype=np.float64)
    f, u = np.asarray(losses, dtype=np.float64), np.asarray(local_optima, dtype=np.float64)
    fits = w.ndim == 2 and u.ndim == 2 and g.shape == (len(w), *u.shape) and f.shape == (len(w),)
    if not fits or u.shape[1] != w.shape[1] or len(u) == 0:
        raise InvalidValue(
            f"models {w.shape}, gradients {g.shape}, losses {f.shape}, local_optima {u.shape}: "
            "expected rounds × weights, rounds × clients × weights, rounds, clients × weights"
        )
    if not all(np.isfinite(array).all() for array in (w, g, f, u)):
        raise InvalidValue("models, gradients, losses, local_optima: expected finite numbers")
    lowest, highest = np.inf, 0.0
    for first in range(len(w)):
        steps, changes = w[first + 1 :] - w[first], g[first + 1 :] - g[first]
        lengths = np.linalg.norm(steps, axis=1)
        moved = lengths > smallest_step
        if moved.any():
            along = np.einsum("td,tnd->tn", steps[moved], changes[moved])
            lowest = min(lowest, float((along / lengths[moved, None] ** 2).min()))
            slopes = np.linalg.norm(changes[moved], axis=2) / lengths[moved, None]
            highest = max(highest, float(slopes.max()))
    if not np.isfinite(lowest):
        raise InvalidValue("models: expected a run in which the model moves; train longer")
    if lowest <= 0:
        raise InvalidValue(
            f"strong_convexity={lowest:.4g} along the path, expected a number > 0: the losses are "
            "not strongly convex there, so Theorem 1 does not cover them; take logistic regression "
            "(model='digits-logistic' or 'mnist-logistic'), or planner='none'"
        )
    optima = np.vstack([u, w[-1:]])
    return LossConstants(
        strong_convexity=lowest,
        smoothness=max(lowest, highest),  # rounding may swap the two
        gradient_bound=float(np.linalg.norm(g, axis=2).max()),
        model_spread=float(np.linalg.norm(u - w[-1], axis=1).max()),
        initial_gap=max(0.0, float(f[0] - f[-1])),
        initial_distance=float(np.square(optima - w[0]).sum(axis=1).max()),
    )
