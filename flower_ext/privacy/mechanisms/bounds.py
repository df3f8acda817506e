"""Sums in which each unit's contribution is bounded; each sum states its bound.

Norms are taken as in `updates`, so that neither a huge value nor half precision can pass unclipped.

======================  ==========================================================
array                   outcome
======================  ==========================================================
zero                    stays zero
huge                    clipped; the norm cannot overflow
NaN, infinite           `NonFiniteUpdate`
0-d                     clipped like any other array
half precision          clipped; the bound holds after rounding
integer, bool, complex  `TypeError`: such an array has no place in a bounded sum
empty (no elements)     kept, adds nothing; `ValueError` if all arrays are empty
======================  ==========================================================
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import array_api_compat as api
import numpy as np

from flower_ext.checks import require_positive
from flower_ext.errors import InvalidValue
from flower_ext.privacy.mechanisms.noise import NoiseSource
from flower_ext.privacy.mechanisms.updates import (
    NamedArrays,
    RunningSum,
    as_float64,
    check_arrays,
    flat_rows,
    in_float64,
    l2_norm,
    plain_norm,
    scaled_norm,
)

_MARGIN = 1.0 - 1e-9
"""Factor that leaves room for rounding in float64, in any order of summation. It covers the norm of
up to 10⁷ numbers (2⁻⁵⁴ each). It also covers a sum of up to a thousand updates of equal norm, in
which one update changes the rounding of all others (2⁻⁵² n² in all, for n updates)."""


class UnitSum(Protocol):
    """A sum over units: `bound` states how far one unit moves the sum, and `noised` adds noise."""

    @property
    def bound(self) -> float:
        """Largest L2 distance by which adding, removing or zeroing one unit moves the sum."""

    @property
    def cell(self) -> float | None:
        """Step of a public grid if the sum is a whole number of such steps; otherwise None."""

    def noised(self, noise: NoiseSource, stddev: float, grid: float | None) -> NamedArrays:
        """Return the sum with one client's share of the noise, as it leaves the client.

        A sum of real numbers is rounded to multiples of ``grid``. A sum in cells gets discrete
        noise. If a protocol encrypts the noised sum, the protocol gets the noise unrounded.
        """

    def in_numbers(self) -> NamedArrays:
        """Return the sum in real numbers, without noise; refuse if the sum is encrypted."""


@dataclass(frozen=True, kw_only=True)
class BoundedSum:
    """Sum of ``count`` updates, one per unit, each of L2 norm at most ``bound``.

    Guarantees
    ----------
    Adding, removing or zeroing one unit moves the sum by at most ``bound``. Replacing one
    moves it by at most ``2 * bound``. These bounds are exact if ``value`` holds whole numbers.
    The sum is never clipped, because one unit's contribution would then depend on other units.

    Parameters
    ----------
    cell : float, optional
        Step of a public grid, if ``value`` counts such steps in whole numbers (see
        `quantization`). None if ``value`` holds real numbers.
    """

    value: NamedArrays
    bound: float
    count: int
    cell: float | None = None

    def in_numbers(self) -> NamedArrays:
        """Return the sum in real numbers; convert it if ``value`` counts steps of a grid."""
        cell = self.cell
        return self.value if cell is None else {name: a * cell for name, a in self.value.items()}

    def noised(self, noise: NoiseSource, stddev: float, grid: float | None) -> NamedArrays:
        """Return the sum with one client's share of the noise: see `UnitSum`."""
        if self.cell is None:
            return noise.add_gaussian(self.value, stddev, grid=grid)
        return noise.add_discrete_gaussian(self.value, stddev / self.cell)


def clip(update: NamedArrays, clipping_norm: float) -> BoundedSum:
    """Scale an update down to the norm ``clipping_norm`` if it is longer.

    Guarantees
    ----------
    ``l2_norm(result.value) <= clipping_norm``, after rounding to each array's own precision.

    Raises
    ------
    NonFiniteUpdate, TypeError, ValueError
        As `l2_norm`; also if ``clipping_norm`` is not a finite number above zero.
    """
    require_positive("clipping_norm", clipping_norm)
    check_arrays(update)
    largest, scaled = scaled_norm(update)
    norm = largest * scaled
    target = clipping_norm * _MARGIN
    if norm <= target:
        return BoundedSum(value=dict(update), bound=clipping_norm, count=1)
    rounding = [api.array_namespace(array).finfo(array.dtype).eps for array in update.values()]
    # Take the array with the least precision: rounding moves its numbers most.
    slack = float(max(rounding)) / 16
    factor = (target / largest) / scaled * (1.0 - slack)  # target / norm could overflow
    while True:
        value = {name: _times(array, factor) for name, array in update.items()}
        if l2_norm(value) <= target:
            return BoundedSum(value=value, bound=clipping_norm, count=1)
        factor *= 1.0 - slack  # rounding left the norm too large: shorten more each time
        slack = min(2 * slack, 0.5)


class ClippedSum(RunningSum):
    """Sum of updates in float64 that clips each update to the norm ``bound`` when it is added.

    Guarantees
    ----------
    Adding or removing one update moves ``value`` by at most ``bound``.
    """

    def __init__(self, like: NamedArrays, bound: float) -> None:
        require_positive("clipping_norm", bound)
        super().__init__(like)
        self.bound = bound

    def add(self, update: NamedArrays) -> None:
        """Clip an update, and add it to the sum."""
        check_arrays(update)
        wide: NamedArrays = in_float64(update)
        norm = plain_norm(wide) / self.bound
        if not 1e-100 < norm < 1e100:  # squares overflow or underflow
            wide = clip(wide, self.bound).value
        elif norm > _MARGIN:
            for array in wide.values():
                array *= _MARGIN / norm
        super().add(wide)


def sum_clipped_rows(
    rows: NamedArrays, clipping_norm: float, weights: Sequence[float]
) -> BoundedSum:
    """Clip every row, multiply it by its weight, and return the sum in float64.

    Guarantees
    ----------
    Adding or removing the unit of row k moves the sum by at most ``weights[k] * clipping_norm``.
    If a unit has rows in several such sums and its weights add up to at most 1, it moves the
    total of the sums by at most ``clipping_norm``.

    Parameters
    ----------
    rows : Mapping[str, array]
        Arrays of shape (units, …); row k of all arrays together is the update of unit k.
    weights : Sequence[float]
        One weight per unit, in [0, 1].
    """
    clipped = clip_each_row(rows, clipping_norm)
    first = next(iter(clipped.values()))
    shares, namespace = checked_weights(weights, len(first)), api.array_namespace(first)
    column = namespace.asarray(shares, dtype=namespace.float64, device=api.device(first))
    value = {name: namespace.tensordot(column, array, axes=1) for name, array in clipped.items()}
    return BoundedSum(value=value, bound=clipping_norm, count=len(first))


def checked_weights(weights: Sequence[float], count: int) -> list[float]:
    """Return weights of ``count`` units as floats; refuse a weight outside [0, 1]."""
    shares = [float(weight) for weight in weights]
    if len(shares) != count or not all(0 <= share <= 1 for share in shares):
        raise InvalidValue(f"weights={weights!r}: expected {count} numbers in [0, 1]")
    return shares


def clip_each_row(rows: NamedArrays, clipping_norm: float) -> dict[str, Any]:
    """Clip every row; return the clipped rows as float64 arrays of shape (units, …).

    Guarantees
    ----------
    Row k of all arrays together has L2 norm at most ``clipping_norm``.
    """
    require_positive("clipping_norm", clipping_norm)
    check_arrays(rows)
    flat = flat_rows(rows)
    namespace = api.array_namespace(*flat.values())
    with np.errstate(over="ignore", invalid="ignore"):
        norms = namespace.sqrt(sum(map(_squares, flat.values()))) / clipping_norm
    # A row with NaN is not usual either, so it goes to `clip`, whose error names the array.
    usual = (norms > 1e-100) & (norms < 1e100)
    exceeding = usual & (norms > _MARGIN)
    factors = _MARGIN / namespace.where(exceeding, norms, namespace.full_like(norms, _MARGIN))
    for array in flat.values():  # in place, because a second array takes long to fill
        array *= factors[:, None]
    if not bool(namespace.all(usual)):
        filled = namespace.stack([namespace.any(array != 0, axis=1) for array in flat.values()])
        # Squares of all other rows overflow or underflow. Clip each such row alone, except zeros.
        others = api.to_device(~usual & namespace.any(filled, axis=0), "cpu")
        for number in np.flatnonzero(np.asarray(others)).tolist():
            row = clip({name: array[number, ...] for name, array in flat.items()}, clipping_norm)
            for name, value in row.value.items():
                flat[name][number, ...] = value
    return {name: namespace.reshape(flat[name], array.shape) for name, array in rows.items()}


def _squares(rows: Any) -> Any:
    """Return the sum of squares of each row, by the fastest function of the array library."""
    namespace = api.array_namespace(rows)
    if api.is_numpy_array(rows):
        return namespace.vecdot(rows, rows)
    return namespace.linalg.vector_norm(rows, axis=1) ** 2


def _times(array: Any, factor: float) -> Any:
    return api.array_namespace(array).astype(as_float64(array) * factor, array.dtype)
