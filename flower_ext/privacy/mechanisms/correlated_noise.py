"""Correlated noise: later rounds cancel part of earlier noise, so sums over rounds carry less.

Sources: Denisov, McMahan, Rush, Smith, Thakurta, "Improved Differential Privacy for SGD via Optimal
Private Linear Operators on Adaptive Streams" (2022); Choquette-Choo et al., "Multi-Epoch Matrix
Factorization Mechanisms for Private Machine Learning" (2023); Kalinin and Lampert, "Banded Square
Root Matrix Factorization for Differentially Private Model Training" (2024); McMahan, Xu, Zhang, "A
Hassle-free Algorithm for Private Learning in Practice" (2024), which has the buffers.

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

1. *Zero out one client that takes part in rounds p_0 < p_1 < …* Row t of C x moves by
   Σ_i c_{t − p_i} u_i with ‖u_i‖ ≤ 1. The square of the whole move is the sum of
   ⟨c(p_i), c(p_j)⟩⟨u_i, u_j⟩ over all i and j, where c(p) are columns of C. No coefficient is
   negative, so the move is largest if all u_i are equal.
   If p_i − p_{i−1} ≥ b, then p_i ≥ ib and p_j − p_i ≥ (j − i)b. As coefficients do not rise,
   ⟨c(p_i), c(p_j)⟩ falls as p_j grows, because fewer rows are left, and as the gap grows. So each
   term is largest for p_i = ib, and every further participation adds to the sum. Rows 1 … t alone
   are a smaller case of the same matrix. Thus for every t the move in the first t rows is at most
   that of one client in rounds 1, 1 + b, …, whose row t is in ``row_moves``. This holds with any
   number of bands, also above b, and however many rounds follow.
2. *x_t and the participations may depend on earlier releases.* Given the rows before it, row t of
   C x + σ sens(C) z is a Gaussian. Its mean moves by row t of the move in step 1, where the
   present u_i is now a function of the earlier rows. Whatever path the run takes, the squares of
   these moves add up to at most sens(C)². Such an adaptive sequence of Gaussians is no easier to
   tell apart than a single one with that move (Denisov et al. 2022, Theorem 2.1; Smith and Thakurta
   2022 for moves that depend on the past).

``sensitivity`` counts all rows, however many there are, so the guarantee needs no last round. An
account that charges round t as a Gaussian of noise multiplier σ sens(C) / row_moves_t adds up to at
most one Gaussian of multiplier σ. If the run stops early, it adds up to what step 1 proves.

y_t is kept in float64, and row t is z_t minus a sum over earlier y. What rounding adds to z_t is
below 2⁻⁴⁹ of its stddev, as little as the distance of the generator's own points (see `noise`).
"""

from __future__ import annotations

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
    """The noise of the last round, and the earlier noise that the next round needs. It is secret.

    Parameters
    ----------
    latest : Mapping[str, ndarray]
        y_t of the last round.
    earlier : tuple of Mapping[str, ndarray]
        y_{t−1}, y_{t−2}, … for the bands.
    buffers : tuple of Mapping[str, ndarray]
        For each decay λ, the sum of λ^{j−1} y_{t−j} over j ≥ 1.
    """

    latest: NamedArrays
    earlier: tuple[NamedArrays, ...] = ()
    buffers: tuple[NamedArrays, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StrategyMatrix:
    """A lower triangular Toeplitz matrix; by default the identity, whose noise is independent.

    Its coefficients are c_0 = 1 and, for j ≥ 1, bands_j + Σ_l weights_l · decays_l^{j−1}.

    Parameters
    ----------
    bands : tuple of float
        c_1, c_2, … without the decaying part.
    weights, decays : tuple of float
        The decaying part, which needs one vector of memory for each decay.

    Raises
    ------
    InvalidValue
        Coefficients are negative or rise, or a decay is not in [0, 1).
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
                f"bands={self.bands!r} with weights={self.weights!r}: expected bands >= 0 that do "
                "not rise, of which the first and all weights add up to at most 1"
            )
        if len(self.weights) != len(self.decays) or not (
            all(weight >= 0 for weight in self.weights) and all(0 <= d < 1 for d in self.decays)
        ):
            raise InvalidValue(
                f"weights={self.weights!r} with decays={self.decays!r}: expected as many weights, "
                "none negative, as decays in [0, 1)"
            )

    @property
    def vectors(self) -> int:
        """Number of model-sized vectors that the server keeps between rounds."""
        return 1 + max(0, len(self.bands) - 1) + len(self.decays)

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
        """Return the largest change by one client in each of the first rows of C x (step 1 above).

        Parameters
        ----------
        rounds : int
            Number of rows.
        rounds_apart, participations : int
            b and k.
        """
        column, moves = self.coefficients(rounds), np.zeros(rounds)
        for start in range(0, min(rounds, participations * rounds_apart), rounds_apart):
            moves[start:] += column[: rounds - start]
        return moves

    def sensitivity(self, *, rounds_apart: int, participations: int) -> float:
        """Return sens(C) over all rows, the most that one client moves C x."""
        whole = (participations - 1) * rounds_apart + len(self.bands) + 1
        moves = self.row_moves(whole, rounds_apart=rounds_apart, participations=participations)
        # Beyond these rows only the decaying part is left; its squares form a geometric series.
        starts = np.arange(participations) * rounds_apart
        decays = np.asarray(self.decays)
        left = self.weights * (decays ** (whole - 1 - starts[:, None])).sum(axis=0)
        products = np.outer(left, left) / (1 - np.outer(decays, decays))
        return math.sqrt(float(moves @ moves) + float(products.sum())) * (1 + 1e-12)

    def inverse(self, rounds: int) -> Vector:
        """Return the first coefficients of C⁻¹, by which the noise y is made from z."""
        from scipy.signal import lfilter  # clients do not need SciPy

        impulse = np.zeros(rounds)
        impulse[0] = 1.0
        solved: Vector = lfilter([1.0], self.coefficients(rounds), impulse)
        return solved

    def model_error(self, rounds: int, *, momentum: float = 0.0) -> float:
        """Return the root mean square error of the models after rounds 1 … t, for z of stddev 1.

        Without momentum, a model is the sum of the rounds so far.

        Parameters
        ----------
        momentum : float
            μ of a server that moves along (1 − μ) times the buffer b_t = μ b_{t−1} + y_t.
        """
        errors = np.convolve(self.inverse(rounds), _model_weights(rounds, momentum))[:rounds] ** 2
        return math.sqrt(float(np.arange(rounds, 0, -1) @ errors) / rounds)

    def next(self, drawn: NamedArrays, past: Past | None) -> Past:
        """Return the noise of the next round.

        Parameters
        ----------
        drawn : Mapping[str, ndarray]
            z of the round, fresh normal numbers of stddev 1.
        past : Past, optional
            The noise of the round before; None before the first.
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
        Number of decaying buffers. With two, the error is already within a tenth of the least.
    bands : int
        Number of bands, in place of buffers; 0 for buffers. The server keeps ``bands`` − 1 vectors
        of the model's size, or ``buffers`` + 1.
    momentum : float
        μ of the server's `Sgd`. Momentum smooths noise that alternates, so the best matrix for a
        server with momentum takes back more of a round's noise. The guarantee is the same.
    """

    buffers: CountOrZero = 2
    bands: CountOrZero = 0
    momentum: FractionBelowOne = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.bands or 1 <= self.buffers <= 5):
            raise InvalidValue(
                f"buffers={self.buffers!r} with bands=0: expected buffers from 1 to 5, or bands "
                "above 0"
            )

    def matrix(self, rounds: int, *, rounds_apart: int, participations: int) -> StrategyMatrix:
        """Return the matrix that minimises `model_error` times `sensitivity`, by L-BFGS.

        This takes seconds for thousands of rounds. Results are cached.
        """
        fit, size = (_best_bands, self.bands) if self.bands else (_best_buffers, self.buffers)
        return fit(size, rounds, rounds_apart, participations, self.momentum)

    def describe(self) -> str:
        """Return a few words for the log."""
        kept = f"{self.bands} bands" if self.bands else f"{self.buffers} buffers"
        return f"correlated over rounds by {kept}"


def _model_weights(rounds: int, momentum: float) -> Vector:
    """Return the weights of the newest, second newest, … noise in a model: 1 without momentum."""
    return 1 - momentum ** np.arange(1.0, rounds + 1)


@lru_cache(maxsize=64)
def _best_bands(
    bands: int, rounds: int, rounds_apart: int, participations: int, momentum: float
) -> StrategyMatrix:
    """Return the best matrix of so many bands, which may be hundreds, by exact gradients."""
    from scipy.optimize import minimize
    from scipy.signal import lfilter

    left = np.arange(rounds, 0, -1) / rounds  # fraction of the models that contain a round's noise
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
    """Return the best matrix of so many buffers, by numerical gradients of few variables."""
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
    optimum = minimize(error, first, bounds=[(-12.0, 12.0)] * (2 * buffers), method="L-BFGS-B")
    return matrix(optimum.x)


class PreparedNoise(NoiseSource):
    """Normal numbers for one release, drawn in advance. Each number is used once.

    Parameters
    ----------
    drawn : Mapping[str, ndarray]
        Numbers for each array, by name; their unit is the stddev of the release.
    is_secure : bool
        True if nobody can reproduce the numbers.
    """

    def __init__(self, drawn: NamedArrays, *, is_secure: bool) -> None:
        self._left, self.is_secure = dict(drawn), is_secure

    def add_gaussian(
        self, update: NamedArrays, stddev: float, *, grid: float | None = None
    ) -> dict[str, Any]:
        """Return ``update`` plus ``stddev`` times the numbers, rounded as in `NoiseSource`.

        Raises
        ------
        InvalidValue
            The numbers have been used, or are for other arrays.
        """
        if set(update) != set(self._left):
            raise InvalidValue(
                f"noise for arrays {sorted(update)}: expected {sorted(self._left)}, each once, "
                "because a second release with the same noise would reveal a difference"
            )
        noised: dict[str, Any] = {}
        for name in update:
            self._next = self._left.pop(name).reshape(-1)
            noised |= super().add_gaussian({name: update[name]}, stddev, grid=grid)
        return noised

    def standard_normal(self, shape: tuple[int, ...]) -> Vector:
        """Return the next numbers of the present array, as a generator would."""
        drawn, self._next = np.split(self._next, [math.prod(shape)])
        return drawn.reshape(shape).copy()

    def _generator(self) -> np.random.Generator:
        return cast(np.random.Generator, self)  # noise needs only `standard_normal` of a generator
