"""Updates as whole numbers that count steps (cells) of a public grid, so that sums are exact.

A client clips its update to C and rounds it to whole multiples of the cell g, a power of two. The
rounded update has a norm of at most C again, which the client checks exactly in whole numbers. One
client therefore moves the sum by at most C, as without rounding. Plain rounding of d coordinates
would raise the sensitivity by √d · g/2. See `discrete_gaussian` for the noise.

A silo of Uldp-FL rounds each user's contribution to its sum in this way (`sum_rows_in_cells`). A
contribution with weight w has a norm of at most w C. Whole numbers add up without error, so a user
whose weights add up to at most 1 over all silos moves the sum by at most C. A user's whole numbers
depend on that user's row only: every step works on single numbers, or adds a row's numbers in an
order that depends only on the number of columns, or adds whole numbers.
"""

import math
from collections.abc import Sequence
from typing import Any

import array_api_compat as api
import numpy as np

from flower_ext.checks import require_positive
from flower_ext.errors import InvalidValue
from flower_ext.privacy.mechanisms.bounds import BoundedSum, checked_weights
from flower_ext.privacy.mechanisms.updates import (
    NamedArrays,
    NonFiniteUpdate,
    RunningSum,
    check_arrays,
    flat_rows,
    l2_norm,
    split_into,
)

_PER_STDDEV = 16
"""Binary logarithm of the number of cells in a standard deviation of the sum's noise."""
_MOST_CELLS = 2.0**30
"""Largest number of cells in a clipping norm, so that squared norms are exact in 64 bits."""
_ROOM = 4
"""A norm that is too large is scaled to this many cells below the bound, as room for rounding."""
_TRIES = 8
_MARGIN = 1.0 - 1e-9
"""Factor that leaves room for rounding of weights and norms in float64. A check is exact."""
_TOGETHER = 2**18
"""Largest number of values that are rounded at a time, so that memory stays bounded."""


def cell_of(stddev: float) -> float:
    """Return the width of a cell for a sum whose noise has the standard deviation ``stddev``.

    The width is the power of two above 2⁻¹⁷ and up to 2⁻¹⁶ times ``stddev``. It depends on
    public numbers only.
    """
    require_positive("stddev", stddev)
    return math.ldexp(1.0, math.frexp(stddev)[1] - 1 - _PER_STDDEV)


def check_cell(cell: float, clipping_norm: float) -> None:
    """Refuse a cell that is not a power of two, or too large or too small for the clipping norm."""
    if math.frexp(cell)[0] != 0.5:
        raise InvalidValue(f"cell={cell!r}: expected a power of two")
    if not 1 <= clipping_norm / cell <= _MOST_CELLS:
        raise InvalidValue(
            f"noise multiplier of about {cell * 2**_PER_STDDEV / clipping_norm:.2g} in secure "
            "sums: expected one from 2**-13 to 2**15, so that the clipping norm is 1 to 2**30 "
            f"cells long; the width of a cell, here {cell!r}, follows from the noise"
        )


def in_cells(update: NamedArrays, clipping_norm: float, cell: float) -> BoundedSum:
    """Clip an update to an L2 norm of ``clipping_norm``; return it in whole numbers of cells.

    Guarantees
    ----------
    The result's norm is at most ``clipping_norm / cell``, exactly.
    """
    l2_norm(update)  # refuses numbers that are not finite, and names their array
    row = {name: _plain(array)[None] for name, array in update.items()}
    return sum_rows_in_cells(row, clipping_norm, cell, [1.0])


def sum_rows_in_cells(
    rows: NamedArrays, clipping_norm: float, cell: float, weights: Sequence[float]
) -> BoundedSum:
    """Clip every row, multiply it by its weight, round it to cells, and return the rows' sum.

    Guarantees
    ----------
    Row k adds a vector of integers whose norm is at most ``weights[k] * clipping_norm / cell``. If
    a unit has rows in several such sums, the norm of all its rows together is at most
    ``clipping_norm / cell``, as long as its weights add up to 1 + 1e-10 or less. No bit that a row
    adds depends on other rows.

    Parameters
    ----------
    rows : Mapping[str, array]
        Arrays of shape (units, …). Row k of all arrays together is one unit's update.
    cell : float
        Width of a cell, a power of two.
    weights : Sequence[float]
        One weight per unit, in [0, 1].
    """
    require_positive("clipping_norm", clipping_norm)
    check_cell(cell, clipping_norm)
    check_arrays(rows)
    count = len(next(iter(rows.values())))
    shares = np.asarray(checked_weights(weights, count), dtype=np.float64)
    namespace = api.array_namespace(*rows.values())
    shapes = {name: tuple(array.shape[1:]) for name, array in rows.items()}
    size = sum(map(math.prod, shapes.values()))
    summed = np.zeros(size, dtype=np.int64)
    step = max(1, _TOGETHER // max(1, size))
    for start in range(0, count, step):
        some = {name: array[start : start + step, ...] for name, array in rows.items()}
        exact = namespace.concat([*flat_rows(some).values()], axis=1)
        whole = _rows_in_cells(exact, clipping_norm, cell, shares[start : start + step])
        summed += _plain(namespace.sum(whole, axis=0))
    value = split_into(shapes, summed)
    return BoundedSum(value=value, bound=clipping_norm, cell=cell, count=count)


class CellSum(RunningSum):
    """Sum of updates whose values are integers, in units of ``cell``, as a secure sum needs."""

    def __init__(self, like: NamedArrays, cell: float) -> None:
        super().__init__(like)
        # Sort by name: the protocol returns the sum, and the server draws noise, in this order.
        self.value = {name: np.zeros(like[name].shape, np.int64) for name in sorted(like)}
        self.cell = cell


def _rows_in_cells(exact: Any, clipping_norm: float, cell: float, shares: np.ndarray) -> Any:
    """Clip each row of ``exact``, multiply it by its weight in ``shares``, and round it to cells.

    The result is int64. The function overwrites ``exact``.
    """
    namespace = api.array_namespace(exact)

    def column(values: np.ndarray) -> Any:
        return namespace.asarray(values[:, None], device=api.device(exact))

    def rounded(values: Any) -> tuple[Any, np.ndarray]:
        whole = namespace.astype(namespace.round(values), namespace.int64)
        return whole, _plain(namespace.sum(whole * whole, axis=1))

    largest = _plain(namespace.max(namespace.abs(exact), axis=1))
    if not np.isfinite(largest).all():
        raise NonFiniteUpdate("a row holds NaN or infinite values: expected finite numbers")
    # Scale by a power of two, which is exact, so that squares neither overflow nor vanish.
    scale = np.ldexp(1.0, np.frexp(np.where(largest > 0, largest, 1.0))[1] - 1)
    exact /= column(scale)
    norms = np.sqrt(_plain(squared_norms_of_rows(exact)))
    # Weights apply before rounding, because a whole number times a weight is not a whole number.
    limits = shares * (clipping_norm / cell) * _MARGIN
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        clipped = np.where(norms > 0, limits / norms, 0.0)
        exact *= column(np.minimum(shares * scale / cell, clipped))
    whole, squares = rounded(exact)
    bounds = np.floor(limits).astype(np.int64)  # integers, so that the check below is exact
    # Rounding may lengthen a row. Shorten it a little and round again: one or two tries suffice.
    for _ in range(_TRIES):
        if not (longer := np.flatnonzero(squares > bounds**2)).size:
            return whole
        factors = np.maximum(bounds[longer] - _ROOM, 0) / np.sqrt(squares[longer])
        exact[longer] = exact[longer] * column(factors)
        whole[longer], squares[longer] = rounded(exact[longer])
    if (longer := np.flatnonzero(squares > bounds**2)).size:  # rows with few cells and many numbers
        whole[longer] = namespace.astype(namespace.trunc(exact[longer]), namespace.int64)
    return whole


def squared_norms_of_rows(rows: Any) -> Any:
    """Return the sum of squares of each row, of shape (rows,).

    The order of the additions depends only on the number of columns, so no bit of a row's result
    depends on other rows.
    """
    squares = rows * rows
    while (width := squares.shape[1]) > 1:
        half = (width + 1) // 2
        squares[:, : width - half] += squares[:, half:]
        squares = squares[:, :half]
    return squares[:, 0]


def _plain(array: Any) -> np.ndarray:
    return np.asarray(api.to_device(array, "cpu"))
