"""Numbers of people, means and variances, with public bounds on the values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flower_ext.errors import InvalidValue
from flower_ext.statistics.statistic import Columns, Statistic


@dataclass(frozen=True)
class Count(Statistic):
    """The number of people."""

    title = "number of people"
    columns = ()
    size = 1
    norm = 1.0
    names = ("people",)

    def vectors(self, columns: Columns) -> NDArray[np.float64]:
        """Return ones."""
        return np.ones((_num_records(columns), 1))

    def estimate(self, totals: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the totals."""
        return totals


@dataclass(frozen=True)
class Mean(Statistic):
    """The mean of a column, and the number of people who have a value.

    Parameters
    ----------
    column : str
    lower, upper : float
        Public bounds. Values outside are moved to the nearer bound.
    """

    column: str
    lower: float
    upper: float
    highest_power = 1

    def __post_init__(self) -> None:
        check_bounds(self.column, self.lower, self.upper)

    @property
    def title(self) -> str:
        """The statistic in words, with its bounds."""
        return f"{self.names[-1]}, values clamped to [{self.lower:g}, {self.upper:g}]"

    @property
    def columns(self) -> Sequence[str]:
        """The one column."""
        return (self.column,)

    @property
    def size(self) -> int:
        """Number of powers in a record's vector: 1, the value, and so on to ``highest_power``."""
        return self.highest_power + 1

    @property
    def norm(self) -> float:
        """√size, because every power lies in [−1, 1]."""
        return math.sqrt(self.size)

    @property
    def names(self) -> Sequence[str]:
        """Names of the estimates: the number of values, and their mean."""
        return (f"people with {self.column}", f"mean of {self.column}")

    def vectors(self, columns: Columns) -> NDArray[np.float64]:
        """Scale the values to [−1, 1], and return their powers; zeros for a missing value."""
        values = columns[self.column]
        scaled = (np.clip(values, self.lower, self.upper) - self._middle) / self._half
        powers = np.clip(scaled, -1, 1)[:, np.newaxis] ** np.arange(self.size)
        return np.where(np.isnan(values)[:, np.newaxis], 0.0, powers)

    def estimate(self, totals: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the number of values and their mean, which noise may move beyond the bounds."""
        count, first = totals[:, 0], totals[:, 1]
        return np.stack([count, self._middle + self._half * _ratio(first, count)], axis=1)

    @property
    def _middle(self) -> float:
        return (self.lower + self.upper) / 2

    @property
    def _half(self) -> float:
        return (self.upper - self.lower) / 2


@dataclass(frozen=True)
class Variance(Mean):
    """Number, mean and variance of a column's values. The parameters are those of `Mean`."""

    highest_power = 2

    @property
    def names(self) -> Sequence[str]:
        """Names of the estimates: the number of values, their mean and their variance."""
        return (*super().names, f"variance of {self.column}")

    def estimate(self, totals: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the number of values, their mean and their variance.

        Noise may move all three out of range, even the variance below 0.
        """
        count, first, second = totals.T
        variance = _ratio(second, count) - _ratio(first, count) ** 2
        return np.column_stack([super().estimate(totals[:, :2]), self._half**2 * variance])


def check_bounds(column: str, lower: float, upper: float) -> None:
    """Refuse bounds that are not finite, or whose lower bound is not below the upper one."""
    if not (math.isfinite(lower) and math.isfinite(upper) and lower < upper):
        raise InvalidValue(
            f"bounds {lower:g}:{upper:g} of {column}: expected two finite numbers, the smaller "
            "one first"
        )


def _num_records(columns: Columns) -> int:
    return len(next(iter(columns.values())))


def _ratio(numerator: NDArray[np.float64], denominator: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divide; the result is NaN where noise moved the denominator to 0 or below."""
    return np.divide(
        numerator, denominator, out=np.full_like(numerator, np.nan), where=denominator > 0
    )
