"""Rows of numbers, whose norms and sums are machine code where training is."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
from torch import Tensor

from flower_ext.privacy.mechanisms.updates import FastRow, Layout, Row
from flower_ext.training.batched.network import loaded


def row_of(numbers: Tensor, layout: Layout) -> Row:
    """Return all numbers of an update on the CPU, of shape (numbers,), as a row."""
    array = numbers.numpy()
    library = loaded()
    if library is None or array.dtype != np.float32 or not array.flags.c_contiguous:
        return Row(array, layout)
    return CompiledRow(array, layout, library)


class CompiledRow(FastRow):
    """A row of float32 numbers that lie in order; ``library`` has the functions of `compiled`."""

    __slots__ = ("_library",)

    def __init__(self, numbers: np.ndarray, layout: Layout, library: Any) -> None:
        super().__init__(numbers, layout)
        self._library = library

    def __reduce__(self) -> tuple[type[Row], tuple[np.ndarray, Layout]]:
        return Row, (self.numbers, self.layout)  # another process may not have the library

    def length(self) -> float:
        """Return the L2 norm, as `FastRow.length`."""
        found = ctypes.c_double()
        self._library.square(_address(self.numbers), self.numbers.size, ctypes.addressof(found))
        return math.sqrt(found.value)

    def add_to(self, total: np.ndarray, factor: float = 1.0) -> None:
        """Add to ``total``, as `FastRow.add_to`."""
        numbers, times = self.numbers, ctypes.c_double(factor)
        if total.dtype != np.float64 or total.shape != numbers.shape:
            raise TypeError(f"total is {total.dtype}{total.shape}: expected float64{numbers.shape}")
        where = _address(numbers), numbers.size, ctypes.addressof(times), _address(total)
        self._library.add(*where)


def _address(array: np.ndarray) -> int:
    """Return the address of an array whose numbers are writable and lie in order.

    Raises
    ------
    TypeError, ValueError
        They do not.
    """
    return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
