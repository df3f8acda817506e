"""A clipping norm that follows a quantile of the updates' norms, from noised counts.

Source: Andrew, Thakkar, McMahan, Ramaswamy, "Differentially Private Learning with Adaptive
Clipping" (NeurIPS 2021).

====================  ==========================================================================
paper                 here
====================  ==========================================================================
C, γ, η_C             ``adaptive_norm`` of a round, ``quantile``, ``learning_rate``
z                     σ, the ``noise_multiplier`` of the plan
z_Δ                   σ' with 1/σ² = 1/σ'² + 1/(2σ_b)²
σ_b, m                ``count_noise_stddev``, the *expected* cohort size
b_i − ½               the *side* of an update: +½ if its norm is at most C, −½ if its norm is
                      above C, and 0 if the update is zero
b̃                     ``fraction``: noised fraction of a round's updates with a norm of at most C
====================  ==========================================================================

A client with the update Δ contributes the vector (clip(Δ, C), κ·side), with κ = σ'C/σ_b. Its norm
is at most C' = √(C² + κ²/4) = σ'C/σ. So a round releases an ordinary noised sum, whose vectors have
one more number and the clipping norm C'. Its noise has the stddev σC' = σ'C. The sum of sides is
the sum of the additional numbers divided by κ, so its noise has the stddev σ_b. Every vector is
clipped to C' again before noise is added, so the sensitivity depends on C' alone, not on how the
side was computed. In a secure sum, the sensitivity depends on C' alone, too: the cells of its grid
are proportional to σC', and the client rounds the whole vector, side included, to cells. It then
checks in whole numbers that the vector's norm is at most C'/cell (see `quantization`).

A zero update has the side 0. (The paper gives it the side ½.) Clients whose training fails or
whose data cannot be loaded send zero updates. So does a client whose contribution is replaced by
zeros in a neighbouring data set. If zero updates had the side ½, replacing an update longer than C
would move the sum by √(C² + κ²), more than C'. The whole vector of a zero update is therefore zero.

C is a function of earlier releases and public numbers, so all rounds compose adaptively.

A user in several silos (Uldp-FL) contributes Σ_s w_s (clip(Δ_s, C), κ·side_s), where Δ_s is the
update from the user's records in silo s. Each silo compares the norm of Δ_s with C before it
applies the weight w_s, and clips the vector to C'. Since Σ_s w_s <= 1, the user's contributions in
all silos add up to a norm of at most C', so the sensitivity equals that of one vector. A user
without records in a silo contributes nothing there, like a zero update. C thus follows the quantile
of the norms of all Δ_s, each counted by its weight.
"""

import math
from dataclasses import dataclass
from typing import Any

import array_api_compat as api
import numpy as np

from flower_ext.checks import Checked, Positive, ProperFraction, Scale
from flower_ext.errors import InvalidValue
from flower_ext.privacy.mechanisms.bounds import ClippedSum, clip, clip_each_row
from flower_ext.privacy.mechanisms.quantization import squared_norms_of_rows
from flower_ext.privacy.mechanisms.updates import NamedArrays, flat_rows, l2_norm

SIDE = "adaptive-clipping-side"
"""Name of the array that holds κ·side in an upload, in a sum and in a mean."""


@dataclass(frozen=True, kw_only=True)
class AdaptiveClipping(Checked):
    """A clipping norm that follows a quantile of the norms of clients' updates.

    Pass it to a `ReleasePlan` as ``clipping_norm``. ε is the same as with a fixed norm and the same
    noise multiplier σ. For the same norm, the model gets more noise, by the factor
    1/√(1 − (σ/2σ_b)²).

    In one round, the norm grows by a factor of at most exp(η_C γ), and shrinks by a factor of at
    most exp(η_C (1 − γ)), apart from noise. A client that does not answer counts as half an update
    within the norm and half an update that is longer. If only a fraction r of the clients answers,
    the norm settles where a fraction ½ + (γ − ½)/r of their updates is within it. If this number is
    outside [0, 1], the norm moves to one of its limits.

    Parameters
    ----------
    initial_norm : float
        Norm of the first round.
    quantile : float
        γ: fraction of the updates that should not be longer than the norm, in (0, 1).
    learning_rate : float
        η_C: speed with which the norm follows the quantile.
    count_noise_stddev : float, optional
        σ_b: standard deviation of the noise on the number of updates within the norm. It must be
        above half of the plan's noise multiplier σ. The default is a twentieth of the expected
        cohort size, as in the paper, but at least σ, so that small cohorts are possible.
    min_norm, max_norm : float
        Limits of the norm, which are public.

    Raises
    ------
    InvalidValue
        A field is out of range.
    """

    initial_norm: Scale = 0.1
    quantile: ProperFraction = 0.5
    learning_rate: Positive = 0.2
    count_noise_stddev: Scale | None = None
    min_norm: Scale = 1e-6
    max_norm: Scale = 1e6

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.min_norm <= self.initial_norm <= self.max_norm:
            raise InvalidValue(
                f"initial_norm={self.initial_norm!r}: expected a norm from min_norm="
                f"{self.min_norm:g} to max_norm={self.max_norm:g}"
            )

    def count_noise(self, noise_multiplier: float, expected_cohort: float) -> float:
        """Return σ_b: the stddev of the noise on the number of updates within the norm.

        The arguments are a plan's noise multiplier and its expected cohort size. Refuse a
        ``count_noise_stddev`` of at most half of the noise multiplier.
        """
        stddev = self.count_noise_stddev
        if stddev is None:
            return max(expected_cohort / 20, noise_multiplier)
        if 2 * stddev <= noise_multiplier:
            raise InvalidValue(
                f"count_noise_stddev={stddev!r} with noise_multiplier={noise_multiplier:.4g}: "
                f"expected more than {noise_multiplier / 2:.4g}, half of noise_multiplier, because "
                "with less noise, releasing the number of updates within the norm would use up all "
                "of ε; leave count_noise_stddev=None to get a valid value"
            )
        return stddev

    def next_norm(self, norm: float, fraction: float) -> float:
        """Return the next round's norm: ``norm`` · exp(−η_C (``fraction`` − γ)), within the limits.

        ``norm`` is this round's norm, and ``fraction`` the fraction of updates that are within it.
        """
        step = self.learning_rate * (fraction - self.quantile)
        moved = math.log(norm) - step  # logarithms cannot overflow
        if moved <= math.log(self.min_norm):
            return self.min_norm
        return self.max_norm if moved >= math.log(self.max_norm) else math.exp(moved)

    def describe(self) -> str:
        """Return a short description for the log."""
        return f"adaptive from {self.initial_norm:g} to the quantile {self.quantile:g}"


def with_side(update: NamedArrays, adaptive_norm: float, weight: float) -> dict[str, Any]:
    """Return (clip(Δ, C), κ·side): the clipped update, and a number that says if ‖Δ‖ is above C.

    ``adaptive_norm`` is C, and ``weight`` is κ (see the table at the top of this module).
    """
    norm = l2_norm(update)
    side = 0.0 if norm == 0 else 0.5 if norm <= adaptive_norm else -0.5
    like = next(iter(update.values()))
    namespace = api.array_namespace(like)
    part = namespace.asarray([weight * side], dtype=namespace.float64, device=api.device(like))
    return {**clip(update, adaptive_norm).value, SIDE: part}


def rows_with_sides(rows: NamedArrays, adaptive_norm: float, weight: float) -> dict[str, Any]:
    """Apply `with_side` to every row of arrays of shape (units, …); return the rows in float64.

    No bit of a row's side depends on other rows.
    """
    clipped = clip_each_row(rows, adaptive_norm)
    namespace, flat = api.array_namespace(*rows.values()), [*flat_rows(rows).values()]
    with np.errstate(over="ignore"):
        norms = namespace.sqrt(squared_norms_of_rows(namespace.concat(flat, axis=1)))
    sides = namespace.where(norms <= adaptive_norm, weight / 2, -weight / 2)
    # The square of a tiny norm is 0, so the norm cannot say which rows are zero.
    moved = namespace.any(namespace.concat(flat, axis=1) != 0, axis=1)
    return {**clipped, SIDE: namespace.where(moved, sides, 0.0)[:, None]}


def with_room_for_side(like: NamedArrays) -> dict[str, Any]:
    """Return the NumPy arrays of ``like``, and one more array, `SIDE`, which holds a zero."""
    if SIDE in like:
        raise InvalidValue(
            f"array {SIDE!r} of the model: expected a different name, because adaptive clipping "
            "adds an array with this name"
        )
    return {**like, SIDE: np.zeros(1)}


class SidedSum(ClippedSum):
    """Sum of the vectors (clip(Δ, C), κ·side) of updates, for a server that adds the noise.

    The server computes the side from the update that it received (see `with_side`); clients send
    no side. ``bound``, ``adaptive_norm`` and ``weight`` are C', C and κ.
    """

    def __init__(
        self, like: NamedArrays, bound: float, adaptive_norm: float, weight: float
    ) -> None:
        super().__init__(with_room_for_side(like), bound)
        self._adaptive_norm, self._weight = adaptive_norm, weight

    def add(self, update: NamedArrays) -> None:
        """Clip an update, append a number that says whether its norm was above C, and add it."""
        super().add(with_side(update, self._adaptive_norm, self._weight))
