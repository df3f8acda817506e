"""A clipping norm that follows a quantile of the updates' norms, from noised counts.

Source: Andrew, Thakkar, McMahan, Ramaswamy, "Differentially Private Learning with Adaptive
Clipping" (NeurIPS 2021).

====================  ==========================================================================
paper                 here
====================  ==========================================================================
C, γ, η_C             ``update_norm`` of a round, ``quantile``, ``learning_rate``
z                     σ, the ``noise_multiplier`` of the plan
z_Δ                   σ' with 1/σ² = 1/σ'² + 1/(2σ_b)²
σ_b, m                ``bit_noise``, the *expected* cohort size
b_i − ½               the side of a client: +½ if its update is within C, −½ if longer, and 0 if
                      the update is zero
b̃                     ``fraction`` of a round
====================  ==========================================================================

A client contributes the vector (clip(Δ, C), κ·side), with κ = σ'C/σ_b. Its norm is at most
C' = √(C² + κ²/4) = σ'C/σ. So a round is an ordinary noised sum of one more number and of clipping
norm C'. Its noise σC' = σ'C is σ'C on the update and, divided by κ, σ_b on the sum of sides. Every
vector is clipped to C' again before it is noised, so the sensitivity rests on C' alone, not on how
the side was computed. This also holds on the grid of a secure sum, whose cells follow σC': the
whole vector, side included, is rounded to cells with a norm of at most C'/cell, checked in whole
numbers (see `quantization`).

A zero update has the side 0, whereas the paper counts it within C. Clients whose training fails or
whose data cannot be loaded send zero updates. So does a client whose data are zeroed out in a
neighbouring data set. If zero updates had the side ½, zeroing out an update longer than C would
move the sum by √(C² + κ²), more than C'. The whole vector of a zero update is therefore zero.

C is a function of earlier releases and public numbers, so all rounds compose adaptively.

A user in several silos (Uldp-FL) contributes Σ_s w_s (clip(Δ_s, C), κ·side_s), where Δ_s is the
update on the user's records in silo s. Each silo compares the norm of its own Δ_s, before the
weight, and clips the vector to C'. Since Σ_s w_s <= 1, the contribution of all silos is at most C'
long, so the sensitivity equals that of one vector. A user without records in a silo contributes
nothing there, like a zero update. So C follows the quantile over all users' parts, counted by
weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import array_api_compat as api
import numpy as np

from flower_ext.checks import Checked, Positive, ProperFraction
from flower_ext.errors import InvalidValue
from flower_ext.privacy.mechanisms.bounds import ClippedSum, clip, clip_each_row
from flower_ext.privacy.mechanisms.quantization import squared_norms_of_rows
from flower_ext.privacy.mechanisms.updates import NamedArrays, as_float64, l2_norm

SIDE = "adaptive-clipping-side"
"""Name of the array that holds κ·side in an upload, in a sum and in a mean."""


@dataclass(frozen=True, kw_only=True)
class AdaptiveClipping(Checked):
    """A clipping norm that follows a quantile of the norms of clients' updates.

    Give it to a `ReleasePlan` in place of a number. ε equals that of a fixed norm under the same
    noise multiplier σ. The model gets a little more noise for the same norm, by the factor 1/√(1 −
    (σ/2σ_b)²).

    A fraction far from the quantile moves the norm by a factor of up to exp(η γ) or exp(η (1 − γ))
    a round. Clients that do not answer count as half within the norm. If only a share r answers,
    the norm settles where the fraction is ½ + (γ − ½)/r; if that is no fraction, the norm runs to a
    limit.

    Parameters
    ----------
    initial : float
        Norm of the first round.
    quantile : float
        γ: fraction of the updates that should not be longer than the norm, in (0, 1).
    learning_rate : float
        η_C.
    bit_noise : float, optional
        σ_b: standard deviation of the noise on the number of updates within the norm, above half
        the plan's noise multiplier σ. By default a twentieth of the expected cohort as in the
        paper, but at least σ, so that small cohorts are possible.
    least, most : float
        Limits of the norm, which are public.

    Raises
    ------
    InvalidValue
        A field is out of range.
    """

    initial: Positive = 0.1
    quantile: ProperFraction = 0.5
    learning_rate: Positive = 0.2
    bit_noise: Positive | None = None
    least: Positive = 1e-6
    most: Positive = 1e6

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.least <= self.initial <= self.most:
            raise InvalidValue(
                f"initial={self.initial!r}: expected a norm from least={self.least:g} to "
                f"most={self.most:g}"
            )

    def count_noise(self, noise_multiplier: float, expected_cohort: float) -> float:
        """Return σ_b under a plan's noise multiplier and expected cohort size.

        Raises
        ------
        InvalidValue
            ``bit_noise`` is at most half the noise multiplier, which leaves nothing for updates.
        """
        if self.bit_noise is None:
            return max(expected_cohort / 20, noise_multiplier)
        if 2 * self.bit_noise <= noise_multiplier:
            raise InvalidValue(
                f"bit_noise={self.bit_noise!r} with noise_multiplier={noise_multiplier:.4g}: "
                f"expected more than {noise_multiplier / 2:.4g}, half of it, because counts with "
                "less noise spend all of the privacy; None chooses a valid value"
            )
        return self.bit_noise

    def next_norm(self, norm: float, fraction: float) -> float:
        """Return C exp(−η (fraction − γ)), within the limits."""
        step = self.learning_rate * (fraction - self.quantile)
        least, most = math.log(self.least), math.log(self.most)
        moved = math.log(norm) - step  # logarithms cannot overflow
        return self.least if moved <= least else self.most if moved >= most else math.exp(moved)

    def describe(self) -> str:
        """Return a few words for the log."""
        return f"adaptive from {self.initial:g} to the quantile {self.quantile:g}"


def with_side(update: NamedArrays, update_norm: float, weight: float) -> dict[str, Any]:
    """Clip an update and append its side: return (clip(Δ, C), κ·side).

    Guarantees
    ----------
    A zero update becomes a zero vector.

    Parameters
    ----------
    update_norm, weight : float
        C and κ.

    Raises
    ------
    NonFiniteUpdate, TypeError, ValueError
        As `clip`.
    """
    norm = l2_norm(update)
    side = 0.0 if norm == 0 else 0.5 if norm <= update_norm else -0.5
    like = next(iter(update.values()))
    namespace = api.array_namespace(like)
    part = namespace.asarray([weight * side], dtype=namespace.float64, device=api.device(like))
    return {**clip(update, update_norm).value, SIDE: part}


def rows_with_sides(rows: NamedArrays, update_norm: float, weight: float) -> dict[str, Any]:
    """Return `with_side` of every row of arrays of shape (units, …), in float64.

    Guarantees
    ----------
    No bit of a row's side depends on other rows.

    Raises
    ------
    NonFiniteUpdate, TypeError, ValueError
        As `clip_each_row`.
    """
    clipped = clip_each_row(rows, update_norm)
    namespace, count = api.array_namespace(*rows.values()), len(next(iter(rows.values())))
    flat = [namespace.reshape(as_float64(array), (count, -1)) for array in rows.values()]
    with np.errstate(over="ignore"):
        norms = namespace.sqrt(squared_norms_of_rows(namespace.concat(flat, axis=1)))
    sides = namespace.where(norms <= update_norm, weight / 2, -weight / 2)
    return {**clipped, SIDE: namespace.where(norms > 0, sides, 0.0)[:, None]}


def with_room_for_side(like: NamedArrays) -> dict[str, Any]:
    """Return the NumPy arrays of ``like``, and an array of zeros for the side.

    Raises
    ------
    InvalidValue
        ``like`` already has an array of that name.
    """
    if SIDE in like:
        raise InvalidValue(
            f"array {SIDE!r} of the model: expected another name, which clipping does not use"
        )
    return {**like, SIDE: np.zeros(1)}


class SidedSum(ClippedSum):
    """Sum of the vectors (clip(Δ, C), κ·side) of updates, for a server that adds the noise.

    The server computes each side from the update that it received, and trusts no client's side.

    Parameters
    ----------
    like : NamedArrays
        Names and shapes of updates.
    bound, update_norm, weight : float
        C', C and κ.
    """

    def __init__(self, like: NamedArrays, bound: float, update_norm: float, weight: float) -> None:
        super().__init__(with_room_for_side(like), bound)
        self._update_norm, self._weight = update_norm, weight

    def add(self, update: NamedArrays) -> None:
        """Clip an update, add it, and count its side.

        Raises
        ------
        NonFiniteUpdate, TypeError, ValueError
            As `clip` and `RunningSum.add`.
        """
        super().add(with_side(update, self._update_norm, self._weight))
