"""Correlated noise: later rounds cancel part of the noise of earlier rounds.

Sums over rounds, such as the model, then carry less noise.

Sources: Denisov, McMahan, Rush, Smith, Thakurta, "Improved Differential Privacy for SGD via Optimal
Private Linear Operators on Adaptive Streams" (2022); Choquette-Choo et al., "Multi-Epoch Matrix
Factorization Mechanisms for Private Machine Learning" (2023); Kalinin and Lampert, "Banded Square
Root Matrix Factorization for Differentially Private Model Training" (2024); McMahan, Xu, Zhang, "A
Hassle-free Algorithm for Private Learning in Practice" (2024), the source of the buffers.

====================  ==========================================================================
paper                 here
====================  ==========================================================================
C, its first column   `StrategyMatrix`, lower triangular and Toeplitz; ``coefficients`` c_0 = 1 ≥
                      c_1 ≥ … ≥ 0
b, k                  ``rounds_apart``, ``participations`` of a `SpacedSampling`
z_t, y_t              a round's fresh normal numbers, and its noise: C y = z
sens(C)               `StrategyMatrix.sensitivity`
====================  ==========================================================================

A round releases x_t + σ sens(C) y_t, where x_t is a sum of vectors of norm at most 1, one for each
client. All releases together are C⁻¹ (C x + σ sens(C) z), so they reveal exactly as much as
C x + σ sens(C) z. Two steps show that this is one Gaussian mechanism of noise multiplier σ.

1. *Replace by zeros one client that takes part in rounds p_0 < p_1 < …* Let u_i be the client's
   vector in round p_i, so ‖u_i‖ ≤ 1. Row t of C x moves by Σ_i c_{t − p_i} u_i. The square of the
   whole move is the sum of ⟨c(p_i), c(p_j)⟩⟨u_i, u_j⟩ over all i and j, where c(p) are columns of
   C. No coefficient is negative, so the move is largest if all u_i are equal.
   If p_i − p_{i−1} ≥ b, then p_i ≥ 1 + ib and p_j − p_i ≥ (j − i)b. Coefficients do not rise. So
   ⟨c(p_i), c(p_j)⟩ falls if p_j grows, because fewer rows are left, and it falls if the gap between
   p_i and p_j grows. So each term is largest for p_i = 1 + ib, and every further participation adds
   to the sum. Rows 1 … t alone are a smaller case of the same matrix. Thus for every t, the move in
   the first t rows is largest for a client that takes part in rounds 1, 1 + b, …. The moves of this
   client's rows are `StrategyMatrix.row_moves`. This holds with any number of bands, also above b,
   and however many rounds follow.
2. *x_t and the participations may depend on earlier releases.* Given the rows before it, row t of
   C x + σ sens(C) z is a Gaussian. Its mean moves by row t of the move in step 1. The u_i of round
   t is now a function of the earlier rows. Whatever path the run takes, the squares of these moves
   add up to at most sens(C)². Such an adaptive sequence of Gaussians reveals no more about the
   client than a single Gaussian with a move of sens(C) (Denisov et al. 2022, Theorem 2.1; Smith and
   Thakurta 2022 for moves that depend on the past).

``sensitivity`` counts all rows, however many there are, so the guarantee does not depend on the
number of rounds. An account may charge round t as a Gaussian of noise multiplier
σ sens(C) / row_moves_t. All rounds then add up to at most one Gaussian of multiplier σ. If the run
stops early, its rounds add up to the smaller move that step 1 proves.

y_t is z_t minus a sum over earlier y, computed in float64. Its rounding error is below 2⁻⁴⁹ of the
stddev of z_t, as small as the distance between the numbers that the generator can draw (see
`noise`).
"""

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from flower_ext.checks import Checked, CountOrZero, FractionBelowOne
from flower_ext.errors import InvalidValue
from flower_ext.privacy.mechanisms.noise import NoiseSource
from flower_ext.privacy.mechanisms.updates import NamedArrays

Vector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Past:
    """The noise y of the last round t, and the earlier noise that the next round subtracts.

    Keep it secret: whoever knows it can remove the noise.
    """

    latest: NamedArrays
    """The noise y_t of the last round."""
    earlier: tuple[NamedArrays, ...] = ()
    """The noise y_{t−1}, y_{t−2}, … of as many earlier rounds as the matrix's bands need."""
    buffers: tuple[NamedArrays, ...] = ()
    """For each decay λ of the matrix, the sum of λ^{j−1} y_{t−j} over j ≥ 1."""


@dataclass(frozen=True, kw_only=True)
class StrategyMatrix:
    """A lower triangular Toeplitz matrix; the default, the identity, gives independent noise.

    Its coefficients are c_0 = 1 and, for j ≥ 1, c_j = bands_j + Σ_l weights_l · decays_l^{j−1}.

    Parameters
    ----------
    bands : tuple of float
        bands_1, bands_2, …, below the diagonal.
    weights, decays : tuple of float
        Weights and decays of the sum over l. The server keeps one model-sized vector per decay.

    Raises
    ------
    InvalidValue
        Bands are negative or rise, bands_1 + Σ_l weights_l is above 1, a weight is negative, or a
        decay is not in [0, 1).
    """

    bands: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()
    decays: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("bands", "weights", "decays"):
            object.__setattr__(self, name, tuple(float(number) for number in getattr(self, name)))
        falling = [1.0 - sum(self.weights), *self.bands, 0.0]
        if not all(a >= b for a, b in itertools.pairwise(falling)):
            raise InvalidValue(
                f"bands={self.bands!r} with weights={self.weights!r}: expected bands >= 0, none "
                "larger than the one before it, and bands[0] + sum(weights) <= 1"
            )
        if len(self.weights) != len(self.decays) or not (
            all(weight >= 0 for weight in self.weights) and all(0 <= d < 1 for d in self.decays)
        ):
            raise InvalidValue(
                f"weights={self.weights!r} with decays={self.decays!r}: expected one weight >= 0 "
                "for each decay, and decays in [0, 1)"
            )

    def coefficients(self, count: int) -> Vector:
        """Return c_0, …, c_{count−1}."""
        column = np.zeros(count)
        column[:1] = 1.0
        inside = self.bands[: count - 1]
        column[1 : 1 + len(inside)] = inside
        powers = np.arange(count - 1)
        for weight, decay in zip(self.weights, self.decays, strict=True):
            column[1:] += weight * decay**powers
        return column

    def row_moves(self, rounds: int, *, rounds_apart: int, participations: int) -> Vector:
        """Return, for each of the first ``rounds`` rows of C x, how far one client can move it.

        C is this matrix, and row t of x is the sum of round t.
        ``rounds_apart`` and ``participations`` are b and k of step 1 at the top of this module.
        """
        column, moves = self.coefficients(rounds), np.zeros(rounds)
        for start in range(0, min(rounds, participations * rounds_apart), rounds_apart):
            moves[start:] += column[: rounds - start]
        return moves

    def sensitivity(self, *, rounds_apart: int, participations: int) -> float:
        """Return sens(C): the largest L2 distance by which one client can move all of C x.

        C is this matrix, and row t of x is the sum of round t.
        """
        whole = (participations - 1) * rounds_apart + len(self.bands) + 1
        moves = self.row_moves(whole, rounds_apart=rounds_apart, participations=participations)
        # Beyond these rows only the decaying part is left; its squares form a geometric series.
        starts = np.arange(participations) * rounds_apart
        decays = np.asarray(self.decays)
        left = self.weights * (decays ** (whole - 1 - starts[:, None])).sum(axis=0)
        products = np.outer(left, left) / (1 - np.outer(decays, decays))
        return math.sqrt(float(moves @ moves) + float(products.sum())) * (1 + 1e-12)

    def inverse(self, rounds: int) -> Vector:
        """Return ``rounds`` numbers of the inverse's first column; the inverse is Toeplitz, too."""
        from scipy.signal import lfilter  # clients do not need SciPy

        impulse = np.zeros(rounds)
        impulse[0] = 1.0
        solved: Vector = lfilter([1.0], self.coefficients(rounds), impulse)
        return solved

    def model_error(self, rounds: int, *, momentum: float = 0.0) -> float:
        """Return the root mean square, over the rounds, of the noise in the model after each round.

        A round draws fresh normal numbers z_t of stddev 1. Its noise y_t is row t of y = C⁻¹ z,
        where C is this matrix. Without momentum, the noise in the model after round t is the sum
        y_1 + … + y_t. With momentum μ, the server moves the model by (1 − μ) times the buffer
        b_t = μ b_{t−1} + y_t.
        """
        errors = np.convolve(self.inverse(rounds), _model_weights(rounds, momentum))[:rounds] ** 2
        return math.sqrt(float(np.arange(rounds, 0, -1) @ errors) / rounds)

    def next(self, drawn: NamedArrays, past: Past | None) -> Past:
        """Return the noise y of the next round, with the earlier noise that later rounds need.

        ``drawn`` is the next round's z: fresh normal numbers of stddev 1. ``past`` is the result
        for the round before; None for the first round.
        """
        if past is None:
            nothing = {name: np.zeros_like(array) for name, array in drawn.items()}
            return Past(latest=dict(drawn), buffers=(nothing,) * len(self.decays))
        earlier = (past.latest, *past.earlier)[: len(self.bands)]
        buffers = tuple(
            {name: decay * buffer[name] + past.latest[name] for name in drawn}
            for decay, buffer in zip(self.decays, past.buffers, strict=True)
        )
        latest = {name: np.array(array, dtype=np.float64) for name, array in drawn.items()}
        terms = [*zip(self.bands, earlier, strict=False), *zip(self.weights, buffers, strict=True)]
        for factor, vector in terms:
            for name, array in latest.items():
                array -= factor * vector[name]
        return Past(latest=latest, earlier=earlier[: len(self.bands) - 1], buffers=buffers)


@dataclass(frozen=True, kw_only=True)
class CorrelatedNoise(Checked):
    """Noise that is correlated over rounds, for a `ReleasePlan` with a `SpacedSampling`.

    Parameters
    ----------
    buffers : int
        Number of decaying buffers. With two buffers, the noise in the models is already within a
        tenth of the optimum. The server keeps ``buffers`` + 1 vectors of the model's size.
    bands : int
        Number of bands, including the diagonal. If it is above 0, the noise uses bands and no
        buffers, and the server keeps ``bands`` − 1 vectors.
    momentum : float
        μ of the server's `Sgd`. Momentum averages out noise whose sign changes from round to round,
        so the best matrix for a server with momentum cancels more of a round's noise. The guarantee
        is the same.
    """

    buffers: CountOrZero = 2
    bands: CountOrZero = 0
    momentum: FractionBelowOne = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.bands or 1 <= self.buffers <= 5):
            raise InvalidValue(
                f"buffers={self.buffers!r} with bands=0: expected from 1 to 5 buffers, or at least "
                "one band"
            )

    def matrix(self, rounds: int, *, rounds_apart: int, participations: int) -> StrategyMatrix:
        """Return the matrix that minimises `model_error` times `sensitivity`, by L-BFGS.

        ``rounds_apart`` and ``participations`` are b and k (see the table above). The search
        takes seconds for thousands of rounds. Results are cached.
        """
        fit, size = (_best_bands, self.bands) if self.bands else (_best_buffers, self.buffers)
        return fit(size, rounds, rounds_apart, participations, self.momentum)

    def describe(self) -> str:
        """Return a short description for the log."""
        kept = f"{self.bands} bands" if self.bands else f"{self.buffers} buffers"
        return f"correlated over rounds by {kept}"


def _model_weights(rounds: int, momentum: float) -> Vector:
    """Return the weight in a model of each round's noise, from the newest round to the oldest."""
    return 1 - momentum ** np.arange(1.0, rounds + 1)


@lru_cache(maxsize=64)
def _best_bands(
    bands: int, rounds: int, rounds_apart: int, participations: int, momentum: float
) -> StrategyMatrix:
    """Return the best matrix with ``bands`` bands (see `CorrelatedNoise.matrix`).

    The search uses exact gradients, so hundreds of bands are feasible.
    """
    from scipy.optimize import minimize
    from scipy.signal import lfilter

    left = np.arange(rounds, 0, -1) / rounds  # fraction of models that contain each round's noise
    weights = _model_weights(rounds, momentum)
    starts = np.arange(participations) * rounds_apart
    bands = min(bands, rounds)

    def column_of(steps: Vector) -> Vector:
        # The variables are the steps c_j − c_{j+1}, which only need to be 0 or more.
        return np.cumsum(steps[::-1])[::-1]

    def error(steps: Vector) -> tuple[float, Vector]:
        column = column_of(steps)
        moves = np.zeros(starts[-1] + bands)
        for start in starts:
            moves[start : start + bands] += column
        errors = lfilter([1.0], column, weights)
        square, moved = left @ errors**2, moves @ moves
        # Matrices of this form commute, so d errors / d c_j = −C⁻¹ (errors shifted by j).
        back = lfilter([1.0], column, (left * errors)[::-1])[::-1]
        by_error = np.array([-back[j:] @ errors[: rounds - j] for j in range(bands)]) / square
        by_move = sum(moves[start : start + bands] for start in starts) / moved
        # The error does not change with the scale of the column.
        return math.log(square * moved) / 2, np.cumsum(by_error + by_move)

    square_root = np.cumprod([1.0, *((2 * j - 1) / (2 * j) for j in range(1, bands))])
    first = square_root - np.append(square_root[1:], 0.0)
    optimum = minimize(error, first, jac=True, bounds=[(0.0, None)] * bands, method="L-BFGS-B")
    best = column_of(optimum.x)
    return StrategyMatrix(bands=tuple(best[1:] / best[0]))


@lru_cache(maxsize=64)
def _best_buffers(
    buffers: int, rounds: int, rounds_apart: int, participations: int, momentum: float
) -> StrategyMatrix:
    """Return the best matrix with ``buffers`` buffers (see `CorrelatedNoise.matrix`).

    The search uses numerical gradients, which suffice for a few buffers.
    """
    from scipy.optimize import minimize

    def matrix(variables: Vector) -> StrategyMatrix:
        # The weights add up to less than 1, and a decay of 1 − exp(−e^−x) is below 1.
        weights, decays = np.exp(variables[:buffers]), -np.expm1(-np.exp(-variables[buffers:]))
        return StrategyMatrix(weights=tuple(weights / (1 + weights.sum())), decays=tuple(decays))

    def error(variables: Vector) -> float:
        chosen = matrix(variables)
        moved = chosen.sensitivity(rounds_apart=rounds_apart, participations=participations)
        return math.log(chosen.model_error(rounds, momentum=momentum) * moved)

    reach = np.geomspace(0.5, 1 / max(rounds_apart, 2), buffers)
    first = np.concatenate([np.full(buffers, -math.log(buffers)), -np.log(-np.log(reach))])
    # With a limit below −3, rounding could make a decay 1. The objective is flat near its minimum.
    bounds = [(-12.0, 12.0)] * buffers + [(-3.0, 12.0)] * buffers
    accuracy = {"ftol": 1e-12, "gtol": 1e-8}
    optimum = minimize(error, first, bounds=bounds, method="L-BFGS-B", options=accuracy)
    return matrix(optimum.x)


class PreparedNoise(NoiseSource):
    """Normal numbers for one release, drawn in advance. Each number is used once.

    ``drawn`` has the numbers of each array of the release, by name. `add_gaussian` multiplies the
    numbers by the stddev of the release.
    """

    def __init__(self, drawn: NamedArrays, *, is_secure: bool) -> None:
        self._left, self.is_secure = dict(drawn), is_secure

    def add_gaussian(
        self, update: NamedArrays, stddev: float, *, grid: float | None = None
    ) -> dict[str, Any]:
        """Return ``update`` plus ``stddev`` times prepared numbers, rounded as in `NoiseSource`."""
        if set(update) != set(self._left):
            raise InvalidValue(
                f"arrays {sorted(update)}: expected {sorted(self._left)}, the arrays whose noise "
                "is not used yet, because two releases with the same noise would reveal the "
                "difference of their values"
            )
        noised: dict[str, Any] = {}
        for name in update:
            self._next = self._left.pop(name).reshape(-1)
            noised |= super().add_gaussian({name: update[name]}, stddev, grid=grid)
        return noised

    def standard_normal(self, shape: tuple[int, ...]) -> Vector:
        """Return the next prepared numbers, in place of numbers from a generator."""
        drawn, self._next = np.split(self._next, [math.prod(shape)])
        return drawn.reshape(shape).copy()

    def _generator(self) -> np.random.Generator:
        return cast(np.random.Generator, self)  # noise needs only `standard_normal` of a generator
