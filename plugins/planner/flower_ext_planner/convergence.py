"""Distance of personal models from their optimum after T noisy rounds: DP-Ditto, Section IV.

====================  =====================================================
paper                 here
====================  =====================================================
λ                     ``global_weight``: 0 is purely local, 2 purely global
μ, L                  ``strong_convexity``, ``smoothness`` of every F_n
G₀, M                 ``gradient_bound``, ``model_spread``
Ψ₁, Ψ₂                ``initial_gap``, ``initial_distance`` (squared)
η_G, η_L              ``learning_rate``, ``personal_learning_rate``
ε_G, ε_L              ``global_rate``, ``personal_rate``
(1 + λ²) η_L² G, β    ``residual``, ``coupling``
φ_L                   ``gap_per_planned_round``: each of T planned rounds adds φ_L T to e_t
h(T, λ)               ``ConvergenceBound.after``
====================  =====================================================

Here F_n is the loss of client n, F the mean of all F_n with its least value F*, and G a bound on a
squared gradient, which follows from G₀ and M.

Theorem 1 follows from two recursions over the rounds t. Let e_t be the gap F(w) − F* of the global
model w, and a_t the squared distance of the personal model from its optimum. Then

    e_{t+1} ≤ ε_G e_t + φ_L T        a_{t+1} ≤ ε_L a_t + residual + β e_t

The noise is calibrated for T rounds, so more rounds mean more noise in each.

Lemma 1 is the second recursion. Step (37c) of its published proof fails for 0 < λ < 1, and the
proof lacks a necessary limit on η_L. Let m = (1 − λ/2) μ + λ and ℓ = (1 − λ/2) L + λ. If
η_L ≤ 2/(m + ℓ), a better recursion holds: ε_L = 1 − η_L m, no residual, β = 2 η_L λ²/(μ m). It
converges for every λ and needs neither G₀ nor M. This module calls it ``provable``.

Proof: the curvatures of client n's personal objective lie between m and ℓ, so a gradient step
contracts distances to its minimiser v* by 1 − η_L m. An error Δ in the global model w adds η_L λ Δ.
For a step from v to v⁺,

    ‖v⁺ − v*‖ ≤ (1 − η_L m) ‖v − v*‖ + η_L λ ‖Δ‖

By Young's inequality with weight η_L m/(1 − η_L m), and by strong convexity,

    ‖v⁺ − v*‖² ≤ (1 − η_L m) ‖v − v*‖² + (η_L λ²/m) ‖Δ‖²,    ‖Δ‖² ≤ (2/μ) (F(w) − F*)
"""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flower_ext.checks import (
    Checked,
    Rule,
    Scale,
    is_integer,
    is_number,
    require_at_least_one,
    require_not_negative,
    require_one_of,
)
from flower_ext.errors import InvalidValue
from flower_ext.privacy.guarantee import Basis, Condition
from flower_ext.privacy.theorems.dp_ditto_theorem import check_global_weight

BASES: tuple[Basis, ...] = ("published", "provable")
Size = Annotated[
    int, Rule("an integer from 1 to 10**15", lambda x: is_integer(x) and 1 <= x <= 10**15)
]
"""A number of clients, examples or weights, whose fourth power a float can hold."""
ScaleOrZero = Annotated[
    float,
    Rule("0, or a number from 1e-30 to 1e30", lambda x: is_number(x) and _is_scale_or_zero(x)),
]
_MaybeInfinite = Annotated[
    float,
    Rule(
        "0, a number from 1e-30 to 1e30, or infinity",
        lambda x: is_number(x) and (x == math.inf or _is_scale_or_zero(x)),
    ),
]


def _is_scale_or_zero(x: float) -> bool:
    return x == 0 or 1e-30 <= x <= 1e30


@dataclass(frozen=True, kw_only=True)
class DittoProblem(Checked):
    """Constants of the losses and the training that enter the bound.

    Theorem 1 covers one full-gradient step a round on the global and on the personal model,
    without clipping.

    Parameters
    ----------
    strong_convexity, smoothness : float
        μ and L of every client's loss, 0 < μ <= L.
    initial_gap : float
        Ψ₁ = F(w⁰) − F(w*).
    initial_distance : float
        Ψ₂ = ‖v_n⁰ − v_n*‖², of the client for which you plan; the largest distance covers all
        clients.
    dimension : int
        d, the number of weights.
    learning_rate, personal_learning_rate : float
        η_G, which must be below 2/L, and η_L.
    gradient_bound, model_spread : float
        G₀ ≥ ‖∇F_n‖ along the run and M ≥ ‖u_n* − w*‖; only the published bound needs them.
    """

    strong_convexity: Scale
    smoothness: Scale
    initial_gap: ScaleOrZero
    initial_distance: ScaleOrZero
    dimension: Size
    num_clients: Size
    learning_rate: Scale
    personal_learning_rate: Scale
    gradient_bound: _MaybeInfinite = math.inf
    model_spread: _MaybeInfinite = math.inf

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.smoothness < self.strong_convexity:
            raise InvalidValue(
                f"smoothness={self.smoothness!r}: expected at least strong_convexity="
                f"{self.strong_convexity!r}"
            )
        if self.learning_rate >= 2 / self.smoothness:
            raise InvalidValue(
                f"learning_rate={self.learning_rate!r}: expected a number below 2/L = "
                f"{2 / self.smoothness:.4g}"
            )


@dataclass(frozen=True, kw_only=True)
class ConvergenceBound:
    """The bound h(T, λ) of Theorem 1 for one λ, as coefficients of the module's two recursions.

    ``conditions`` are the conditions of Lemma 1; each says whether it holds.
    """

    personal_rate: float
    global_rate: float
    residual: float
    coupling: float
    gap_per_planned_round: float
    initial_gap: float
    initial_distance: float
    conditions: tuple[Condition, ...] = ()

    @property
    def converges(self) -> bool:
        """True if the recursions of the personal and the global model contract."""
        return 0 <= self.personal_rate < 1 and 0 <= self.global_rate < 1

    def after(self, rounds: ArrayLike) -> NDArray[np.float64]:
        """Return h(T, λ) for each number of rounds T >= 0; ``rounds`` is one number or an array.

        The result is infinite where h overflows. It is also infinite if ``personal_rate`` is
        negative, because a squared distance cannot be below 0.
        """
        T = np.asarray(rounds, dtype=np.float64)
        if (T < 0).any():
            raise InvalidValue(f"rounds={rounds!r}: expected integers >= 0")
        a, b = self.personal_rate, self.global_rate
        # The recursions give e_t = b^t Ψ₁ + φ_L T (1 − b^t)/(1 − b), and
        # h = a^T Ψ₂ + Σ_{t<T} a^(T−1−t) (residual + β e_t).
        with np.errstate(over="ignore", invalid="ignore"):
            decayed_gap = _geometric_convolution(a, b, T)
            accumulated = _geometric_convolution(a, 1.0, T)
            added_gap = (accumulated - decayed_gap) / (1 - b)
            gap_per_round = self.gap_per_planned_round * T
            h = (
                a**T * self.initial_distance
                + self.residual * accumulated
                + self.coupling * (self.initial_gap * decayed_gap + gap_per_round * added_gap)
            )
        # NaN comes from 0 · ∞ or ∞ − ∞, where the bound says nothing.
        return np.where(np.isnan(h) | ((a < 0) & (T > 0)), math.inf, h)

    def best_rounds(self, max_rounds: int) -> int:
        """Return T*, the number of rounds from 0 to ``max_rounds`` at which h is smallest.

        T* = 0 means that no number of rounds makes the bound h smaller than at the start.
        """
        require_at_least_one("max_rounds", max_rounds)
        return int(np.argmin(self.after(np.arange(max_rounds + 1))))


def convergence_bound(
    problem: DittoProblem,
    *,
    global_weight: float,
    variance_per_round: float,
    basis: Basis = "provable",
) -> ConvergenceBound:
    """Return the bound h of a problem for one λ.

    For each number of rounds T, h(T, λ) assumes the noise that T rounds need.

    Parameters
    ----------
    global_weight : float
        λ in [0, 2].
    variance_per_round : float
        σ_u²/T: the variance of the noise on each weight of an upload, divided by the planned number
        of rounds T. Under both calibrations, published and provable, it is the same for all T.
    basis : {"provable", "published"}
        Whether to use Lemma 1 as published, or the recursion that this module proves.

    Raises
    ------
    ValueError
        A parameter is out of range, or the published bound lacks G₀ or M.
    """
    check_global_weight(global_weight)
    require_not_negative("variance_per_round", variance_per_round)
    require_one_of("basis", basis, BASES)
    mu, L, weight = problem.strong_convexity, problem.smoothness, global_weight
    eta_G, eta_L = problem.learning_rate, problem.personal_learning_rate
    curvature = (1 - weight / 2) * mu + weight
    longest_step = 2 / (curvature + (1 - weight / 2) * L + weight)
    short_enough = Condition(
        f"η_L ≤ 2/(m + ℓ) (η_L = {eta_L:.4g}, bound {longest_step:.4g})", eta_L <= longest_step
    )
    recursion = _published if basis == "published" else _provable
    rate, residual, coupling, conditions = recursion(problem, weight, curvature)
    return ConvergenceBound(
        personal_rate=rate,
        global_rate=max(0.0, 1 - 2 * mu * eta_G + mu * L * eta_G**2),  # rounding may go below 0
        residual=residual,
        coupling=coupling,
        gap_per_planned_round=(
            problem.dimension * L * variance_per_round / (2 * problem.num_clients)
        ),
        initial_gap=problem.initial_gap,
        initial_distance=problem.initial_distance,
        conditions=(*conditions, short_enough),
    )


_Recursion = tuple[float, float, float, tuple[Condition, ...]]
"""Rate, residual and coupling of the personal model's recursion, and conditions on the problem."""


def _published(problem: DittoProblem, weight: float, curvature: float) -> _Recursion:
    """Return the recursion of Lemma 1 as published."""
    mu, eta_L = problem.strong_convexity, problem.personal_learning_rate
    G0, M = problem.gradient_bound, problem.model_spread
    for name, value in (("gradient_bound", G0), ("model_spread", M)):
        if math.isinf(value):
            raise InvalidValue(
                f"{name}={value!r}: expected a finite number, because the published bound "
                "needs it; if you do not know it, set basis='provable'"
            )
    G = ((1 - weight / 2) * G0 + weight * (G0 / mu + M)) ** 2  # bounds a squared gradient
    rate = 1 - eta_L * curvature + eta_L
    residual = (1 + weight**2) * eta_L**2 * G
    coupling = (4 * eta_L**2 * weight**2 + 2 * eta_L * weight**2) / mu
    least = (2 - 2 * weight) / (2 - weight) if weight < 2 else -math.inf
    convex_enough = Condition(f"μ > (2 − 2λ)/(2 − λ) (μ = {mu:.4g}, bound {least:.4g})", mu > least)
    return rate, residual, coupling, (convex_enough,)


def _provable(problem: DittoProblem, weight: float, curvature: float) -> _Recursion:
    """Return the recursion that this module proves."""
    mu, eta_L = problem.strong_convexity, problem.personal_learning_rate
    coupling = 2 * eta_L * weight**2 / (mu * curvature)
    return 1 - eta_L * curvature, 0.0, coupling, ()


def _geometric_convolution(a: float, b: float, T: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return Σ_{x<T} a^x b^(T−1−x), without a difference of two almost equal numbers."""
    large, small = max(a, b), min(a, b)
    if large == small:
        return np.where(T > 0, T * large ** np.maximum(T - 1, 0), 0.0)
    if small <= 0:  # the logarithm below needs a positive number
        return (large**T - small**T) / (large - small)
    return -(large**T) * np.expm1(T * math.log1p((small - large) / large)) / (large - small)
