"""Updates as whole numbers of cells of a public grid, for sums that are exact.

A client clips its update to C and rounds it to whole multiples of a cell g, a power of two. What
it rounds to has a norm of at most C again, as whole numbers tell without error. So one client moves
the sum of all by at most C, as before rounding: the sensitivity does not grow by √d · g/2, which
plain rounding of d coordinates would add. See `discrete_gaussian` for the noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import array_api_compat as api
import numpy as np

from flower_ext.checks import require_positive
from flower_ext.errors import InvalidValue
from flower_ext.privacy.bounds import clip
from flower_ext.privacy.updates import Update, check_arrays, check_like, in_float64

_PER_STDDEV = 16
"""Binary logarithm of the cells in a stddev of the sum's noise."""
_MOST_CELLS = 2.0**30
"""In a clipping norm, so that squared norms are exact in 64 bits."""
_ROOM = 4
"""Cells by which a norm is brought below its bound, against the chance of rounding."""
_TRIES = 8

Cells = Mapping[str, np.ndarray]
"""Whole numbers by name, as int64: an update or a sum in cells."""


def cell_of(stddev: float) -> float:
    """Return the width of a cell for a sum with noise of ``stddev``: 2⁻¹⁷ to 2⁻¹⁶ of it.

    A power of two that follows from public numbers alone.
    """
    require_positive("stddev", stddev)
    return math.ldexp(1.0, math.frexp(stddev)[1] - 1 - _PER_STDDEV)


def check_cell(cell: float, clipping_norm: float) -> None:
    """Refuse cells that are no power of two, or of which a clipping norm has none or too many.

    Raises
    ------
    InvalidValue
        Says which noise has other cells.
    """
    if math.frexp(cell)[0] != 0.5 or not 1 <= clipping_norm / cell <= _MOST_CELLS:
        raise InvalidValue(
            f"cell={cell!r}: expected a power of two from 2**-30 to 1 times the clipping norm of "
            f"{clipping_norm:g}; a noise multiplier of 2**-13 to 2**15 has such cells"
        )


def in_cells(update: Update, clipping_norm: float, cell: float) -> dict[str, np.ndarray]:
    """Return an update, clipped to an L2 norm of ``clipping_norm``, in whole numbers of cells.

    Guarantees
    ----------
    The result's norm is at most ``clipping_norm / cell``, exactly.

    Parameters
    ----------
    update : Mapping[str, array]
        Floating-point arrays of any shape.
    cell : float
        A power of two.

    Raises
    ------
    NonFiniteUpdate, TypeError, ValueError
        As `bounds.clip`; also where a clipping norm has more than 2³⁰ cells.
    """
    require_positive("clipping_norm", clipping_norm)
    check_cell(cell, clipping_norm)
    check_arrays(update)
    clipped = clip(in_float64(update), clipping_norm).value
    exact = {
        name: np.asarray(api.to_device(array, "cpu")) / cell for name, array in clipped.items()
    }
    most = clipping_norm / cell
    whole = _rounded(exact)
    for _ in range(_TRIES):
        squared = _squared_norm(whole)
        if squared <= math.floor(most) ** 2:
            return whole
        factor = max(most - _ROOM, 0.0) / math.sqrt(squared)
        exact = {name: array * factor for name, array in exact.items()}
        whole = _rounded(exact)
    # So few cells for so many numbers: those that are cut off are no larger than they were.
    return {name: np.trunc(array).astype(np.int64) for name, array in exact.items()}


def out_of_cells(cells: Cells, cell: float, like: Update) -> dict[str, np.ndarray]:
    """Return whole numbers of cells as float64, in the order and shapes of ``like``.

    Raises
    ------
    ValueError
        Other names or shapes.
    """
    values = {name: cells[name] * cell for name in like if name in cells}
    check_like(values, like)
    return values


def _rounded(exact: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.rint(array).astype(np.int64) for name, array in exact.items()}


def _squared_norm(whole: Cells) -> int:
    return sum(int(np.vdot(array, array)) for array in whole.values())
