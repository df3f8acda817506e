"""Rows of numbers, whose norms and sums are machine code where training is."""

from __future__ import annotations

import ctypes
import math

import numpy as np
from torch import Tensor

from flower_ext.privacy.updates import Layout, Row
from flower_ext.training.batched.network import loaded

_FEW = 2**14
"""Numbers up to which NumPy takes no longer than a call of machine code."""


def row_of(numbers: Tensor, layout: Layout) -> Row:
    """Return all numbers of an update on the CPU, of shape (numbers,), as a row."""
    array = numbers.numpy()
    gains = len(array) > _FEW and array.dtype == np.float32 and array.flags.c_contiguous
    return CompiledRow(array, layout) if gains and loaded() is not None else Row(array, layout)


class CompiledRow(Row):
    """A row of float32 numbers; `loaded` functions do what NumPy does in several passes."""

    __slots__ = ()

    def length(self) -> float:
        """Return the L2 norm, as `Row.length` up to the order of summation."""
        found = ctypes.c_double()
        loaded().square(_address(self.numbers), len(self.numbers), ctypes.addressof(found))
        return math.sqrt(found.value)

    def add_to(self, total: np.ndarray, factor: float = 1.0) -> None:
        """Add to ``total`` the same numbers as `Row.add_to`."""
        if total.dtype != np.float64 or total.shape != self.numbers.shape:
            raise TypeError(
                f"total is {total.dtype}{total.shape}: expected float64{self.numbers.shape}"
            )
        times = ctypes.c_double(factor)
        loaded().add(
            _address(self.numbers), len(self.numbers), ctypes.addressof(times), _address(total)
        )


def _address(array: np.ndarray) -> int:
    """Return the address of an array whose numbers are writable and lie in order.

    Raises
    ------
    TypeError, ValueError
        They do not.
    """
    return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
