"""Norms and sums of 32-bit numbers in float64, as loops over numbers that Numba translates.

NumPy would write a copy in float64 first. For a model of some thousand parameters, that takes as
long as the sum itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flower_ext.training.batched.passes import carray
from flower_ext.training.batched.products import loops, sums


def square(values: Any, count: int, found: Any) -> None:
    """Write the sum of squares of ``count`` float32 ``values`` to the float64 ``found``."""
    found[0] = _square(carray(values, count))


def add(values: Any, count: int, factor: Any, total: Any) -> None:
    """Add ``factor[0]`` times ``count`` float32 ``values`` to the float64 ``total``.

    Each product and each sum is rounded as NumPy rounds it.
    """
    _add(carray(values, count), factor[0], carray(total, count))


@sums
def _square(values: np.ndarray) -> float:
    found = 0.0
    for value in values:
        wide = np.float64(value)
        found += wide * wide
    return found


@loops
def _add(values: np.ndarray, factor: float, total: np.ndarray) -> None:
    for place in range(len(values)):
        total[place] += factor * np.float64(values[place])
