"""The spread of a score over clients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flower_ext.errors import InvalidValue


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Summary of one value per client.

    ``worst_decile`` is the mean of the worst tenth of the values (at least one value). ``jain`` is
    Jain's index (Σx)² / (n Σx²): 1 if all values are equal, 1/n if only one value is not 0.
    """

    mean: float
    std: float
    variance: float
    worst_decile: float
    jain: float


def summarize(values: Sequence[float], *, lower_is_better: bool = False) -> Spread:
    """Summarise one value per client. Set ``lower_is_better`` for losses.

    Raises
    ------
    ValueError
        There is no value, or a value is not finite.
    """
    array = np.sort(np.asarray(values, dtype=np.float64))
    if array.size == 0 or not np.isfinite(array).all():
        raise InvalidValue(f"{array.size} values: expected at least one, and all of them finite")
    squares = float(np.sum(array**2))
    worst = array[::-1] if lower_is_better else array
    return Spread(
        mean=float(array.mean()),
        std=float(array.std()),
        variance=float(array.var()),
        worst_decile=float(worst[: math.ceil(array.size / 10)].mean()),
        jain=1.0 if squares == 0 else float(array.sum() ** 2 / (array.size * squares)),
    )
