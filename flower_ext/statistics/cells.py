"""Statistics that count people by cells: histograms, tables of two columns, quantiles, survival.

A record's vector has a one in the record's cell and zeros elsewhere, so its norm is 1. `Quantiles`
count a record once on each level of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from flower_ext.checks import require_at_least_one
from flower_ext.errors import InvalidValue
from flower_ext.statistics.moments import check_bounds
from flower_ext.statistics.statistic import NORMAL_QUANTILE, Columns, Statistic


@dataclass(frozen=True)
class Bins:
    """Bins of equal width between public bounds.

    Three more bins count the values below the bounds, the values above them, and missing values.

    Parameters
    ----------
    column : str
    lower, upper : float
        The last bin includes ``upper``.
    count : int
        Number of bins between the bounds.
    """

    column: str
    lower: float
    upper: float
    count: int

    def __post_init__(self) -> None:
        check_bounds(self.column, self.lower, self.upper)
        require_at_least_one("count", self.count)

    @property
    def edges(self) -> NDArray[np.float64]:
        """Edges of the bins, of shape (count + 1,)."""
        edges: NDArray[np.float64] = np.linspace(self.lower, self.upper, self.count + 1)
        return edges

    @property
    def names(self) -> list[str]:
        """Names of the bins: first those between the bounds, then "below", "above", "missing"."""
        *others, last = [f"[{low:g}, {high:g}" for low, high in pairwise(self.edges)]
        between = [*(f"{name})" for name in others), f"{last}]"]
        return [*between, f"below {self.lower:g}", f"above {self.upper:g}", "missing"]

    def of(self, values: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return each value's bin, as its position in `names`."""
        bins = np.searchsorted(self.edges, values, side="right") - 1
        bins = np.where(values == self.upper, self.count - 1, bins)
        bins = np.where(values < self.lower, self.count, bins)
        bins = np.where(values > self.upper, self.count + 1, bins)
        return np.where(np.isnan(values), self.count + 2, bins)


@dataclass(frozen=True)
class Histogram(Statistic):
    """Numbers of people in cells.

    A histogram of one column has a cell for each bin. A table of several columns has a cell for
    each combination of their bins.

    Parameters
    ----------
    axes : tuple of Bins
        The bins of each column.
    """

    axes: tuple[Bins, ...]
    norm = 1.0

    @property
    def title(self) -> str:
        """The statistic in words."""
        kind = "histogram" if len(self.axes) == 1 else "table"
        return f"{kind} of {' by '.join(self.columns)}"

    @property
    def columns(self) -> Sequence[str]:
        """The columns."""
        return [bins.column for bins in self.axes]

    @property
    def names(self) -> Sequence[str]:
        """Names of the cells: the bins' names, after their columns' names if there are several."""
        if len(self.axes) == 1:
            return self.axes[0].names
        labels = [[f"{bins.column} {name}" for name in bins.names] for bins in self.axes]
        return [", ".join(cell) for cell in product(*labels)]

    @property
    def size(self) -> int:
        """Number of cells."""
        return len(self.names)

    def vectors(self, columns: Columns) -> NDArray[np.float64]:
        """Return a row for each record: a one in the record's cell, and zeros elsewhere."""
        positions = tuple(bins.of(columns[bins.column]) for bins in self.axes)
        cells = np.ravel_multi_index(positions, [len(bins.names) for bins in self.axes])
        ones = np.zeros((len(cells), self.size))
        ones[np.arange(len(cells)), cells] = 1.0
        return ones

    def estimate(self, totals: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the totals themselves. They are unbiased, so noise may move a count below 0."""
        return totals


@dataclass(frozen=True)
class SurvivalCurve(Statistic):
    """Kaplan–Meier's curve: shares of people without an event at the end of each interval.

    The run releases the number of events and the number of censorings in each interval, and the
    number of people whose time is after the last interval. The people at risk in an interval are
    all who are counted in it or later, so they need no separate count. The estimate treats events
    as if they preceded the censorings of the same interval.

    Parameters
    ----------
    times : Bins
        Intervals of the column with each person's time of event or censoring. A time after the last
        interval counts as censored at the end of this interval.
    event : str
        Column with 1 for an event, 0 for censoring.
    """

    times: Bins
    event: str
    norm = 1.0

    @property
    def title(self) -> str:
        """The statistic in words."""
        return f"Kaplan–Meier curve of {self.times.column}"

    @property
    def columns(self) -> Sequence[str]:
        """Names of the columns with times and with events."""
        return self.times.column, self.event

    @property
    def size(self) -> int:
        """Number of counts: events and censorings by interval, and people after the last one."""
        return 2 * self.times.count + 1

    @property
    def names(self) -> Sequence[str]:
        """Names of the estimates: survival beyond the end of each interval."""
        return [f"survival beyond {end:g}" for end in self.times.edges[1:]]

    def vectors(self, columns: Columns) -> NDArray[np.float64]:
        """Return a row for each record: a one in the record's cell, and zeros elsewhere.

        A record whose time or event is not known has zeros only.
        """
        times, events = columns[self.times.column], columns[self.event]
        intervals = self.times.of(times)
        cells = np.where(events == 1, intervals, intervals + self.times.count)
        cells = np.where(intervals == self.times.count + 1, 2 * self.times.count, cells)
        is_known = (intervals < self.times.count) | (intervals == self.times.count + 1)
        is_known &= (events == 0) | (events == 1)
        ones = np.zeros((len(times), self.size))
        ones[np.flatnonzero(is_known), cells[is_known]] = 1.0
        return ones

    def estimate(self, totals: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the survival at the end of each interval.

        This is the product of (1 − events / people at risk) over this and all earlier intervals. It
        is NaN if the noised number of people at risk is not above 0 in one of them.
        """
        count = self.times.count
        events, leaving = totals[:, :count], totals[:, :count] + totals[:, count:-1]
        at_risk = np.cumsum(np.column_stack([leaving, totals[:, -1]])[:, ::-1], axis=1)[:, :0:-1]
        with np.errstate(divide="ignore", invalid="ignore"):
            factors: NDArray[np.float64] = np.where(at_risk > 0, 1 - events / at_risk, np.nan)
        return np.asarray(np.cumprod(factors, axis=1), dtype=np.float64)


@dataclass(frozen=True)
class Quantiles(Statistic):
    """Quantiles of a column, from counts on every level of a binary tree of bins.

    The number of people in any range of bins is a sum of few counts of the tree, so its noise grows
    only with the logarithm of the number of bins. Without noise, each count would equal the sum of
    two counts on the next level. The estimate finds the counts of the bins that fit the noised
    counts of all levels best, by least squares (Hay et al. 2010).

    Parameters
    ----------
    column : str
    lower, upper : float
        Public bounds. Values outside are moved to the nearer bound.
    probabilities : tuple of float
        In (0, 1), such as 0.5 for the median.
    depth : int
        The finest level has 2^depth bins. Within a bin, quantiles are interpolated.
    """

    column: str
    lower: float
    upper: float
    probabilities: tuple[float, ...] = (0.25, 0.5, 0.75)
    depth: int = 7

    def __post_init__(self) -> None:
        check_bounds(self.column, self.lower, self.upper)
        if not self.probabilities or not all(0 < p < 1 for p in self.probabilities):
            raise InvalidValue(f"probabilities={self.probabilities!r}: expected numbers in (0, 1)")
        if not 1 <= self.depth <= 10:
            raise InvalidValue(f"depth={self.depth!r}: expected 1 to 10")

    @property
    def title(self) -> str:
        """The statistic in words, with its bounds."""
        return (
            f"quantiles of {self.column}, values clamped to [{self.lower:g}, {self.upper:g}], to "
            f"{(self.upper - self.lower) / 2**self.depth:g}"
        )

    @property
    def columns(self) -> Sequence[str]:
        """The one column."""
        return (self.column,)

    @property
    def size(self) -> int:
        """Number of nodes of the tree."""
        return (2 << self.depth) - 1

    @property
    def norm(self) -> float:
        """√(levels), because a record is in one node of each level."""
        return float((self.depth + 1) ** 0.5)

    @property
    def names(self) -> Sequence[str]:
        """The quantiles."""
        return [f"{p:g} quantile of {self.column}" for p in self.probabilities]

    def vectors(self, columns: Columns) -> NDArray[np.float64]:
        """Return a row for each record: ones in its node on every level, and zeros elsewhere.

        A record whose value is missing has zeros only.
        """
        values = columns[self.column]
        is_known = ~np.isnan(values)
        leaves = self._leaves.of(np.clip(values[is_known], self.lower, self.upper))
        nodes = np.zeros((len(values), self.size))
        for level in range(self.depth + 1):
            nodes[np.flatnonzero(is_known), 2**level - 1 + (leaves >> (self.depth - level))] = 1.0
        return nodes

    def estimate(self, totals: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the quantiles of the distribution that fits the totals of all levels best."""
        return self._inverted(self._distributions(totals))

    def intervals(
        self,
        total: NDArray[np.float64],
        moved_totals: NDArray[np.float64],
        values: NDArray[np.float64],
        errors: NDArray[np.float64],
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the lower and the upper end of each quantile's 95 % interval.

        Noise moves the distribution function at the edges of the bins. The ends are the quantiles
        of two functions: one higher and one lower than the estimate, by 1.96 standard deviations.
        """
        (function,) = self._distributions(total[np.newaxis])
        half = NORMAL_QUANTILE * np.std(self._distributions(moved_totals), axis=0)
        highest, lowest = _rising(function + half)[0], _rising(function - half)[1]
        least, largest = self._inverted(np.stack([highest, lowest]))
        return least, largest

    @property
    def _leaves(self) -> Bins:
        """The bins of the finest level."""
        return Bins(self.column, self.lower, self.upper, 2**self.depth)

    def _distributions(self, totals: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the distribution function at the bins' edges, of shape (draws, 2^depth + 1)."""
        sums = np.cumsum(totals @ _tree_inverse(self.depth).T, axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.where(sums[:, -1:] > 0, sums / sums[:, -1:], np.nan)
        above, below = _rising(np.column_stack([np.zeros(len(totals)), shares]))
        return (above + below) / 2  # one of them alone would be biased

    def _inverted(self, functions: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the values at which distribution functions reach `probabilities`.

        ``functions`` has the shape (draws, edges). The result for a function with NaN is NaN.
        """
        wanted, edges = np.asarray(self.probabilities), self._leaves.edges
        reached = (functions[:, :, np.newaxis] <= wanted).sum(axis=1)
        right = np.clip(reached, 1, len(edges) - 1)
        below, above = (np.take_along_axis(functions, at, axis=1) for at in (right - 1, right))
        with np.errstate(divide="ignore", invalid="ignore"):
            values = edges[right - 1] + (wanted - below) * np.diff(edges)[right - 1] / (
                above - below
            )
        values = np.where(reached == 0, edges[0], values)
        values = np.where(reached == len(edges), edges[-1], values)
        return np.where(np.isnan(functions).any(axis=1, keepdims=True), np.nan, values)


def _rising(functions: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the least rising function above each function, and the largest rising one below it.

    All functions have the shape (…, edges).
    """
    below = np.minimum.accumulate(functions[..., ::-1], axis=-1)[..., ::-1]
    return np.maximum.accumulate(functions, axis=-1), below


@cache
def _tree_inverse(depth: int) -> NDArray[np.float64]:
    """Return the matrix, of shape (leaves, nodes), that takes a tree's counts to its leaves.

    It gives the counts of the leaves that fit the counts of all nodes best, by least squares.
    """
    leaves = np.arange(2**depth)
    levels = [
        np.arange(2**level)[:, np.newaxis] == leaves >> (depth - level)
        for level in range(depth + 1)
    ]
    return np.linalg.pinv(np.concatenate(levels).astype(np.float64))
