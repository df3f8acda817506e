"""Kinds of statistics: counts, means, variances, histograms, quantiles and survival curves.

Means and variances add up powers of bounded values. All other kinds count people by cells: a
record's vector has a one in the record's cell and zeros elsewhere, so its norm is 1. `Quantiles`
count a record once on each level of a tree.
"""

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from flower_ext.checks import require_at_least_one
from flower_ext.errors import InvalidValue
from flower_ext_consortium.statistics.statistic import NORMAL_QUANTILE, Columns, Statistic


class Count(Statistic):
    """The number of people."""

    def __init__(self) -> None:
        super().__init__("number of people", columns=(), names=["people"], size=1, norm=1.0)

    def vectors(self, columns: Columns) -> NDArray[np.float64]:
        """Return a one for each record."""
        return np.ones((len(next(iter(columns.values()))), 1))


class Mean(Statistic):
    """The mean of a column, and the number of people who have a value.

    Parameters
    ----------
    column : str
    lower, upper : float
        Public bounds. Values outside are moved to the nearer bound.
    """

    highest_power = 1

    def __init__(self, column: str, lower: float, upper: float) -> None:
        check_bounds(column, lower, upper)
        names = [f"people with {column}", f"mean of {column}", f"variance of {column}"]
        names = names[: self.highest_power + 1]
        super().__init__(
            f"{names[-1]}, values clamped to [{lower:g}, {upper:g}]",
            columns=[column],
            names=names,
            size=self.highest_power + 1,  # 1, the value, and so on to the highest power
            norm=math.sqrt(self.highest_power + 1),  # each power lies in [−1, 1]
        )
        self.column, self.lower, self.upper = column, lower, upper
        self._middle, self._half = (lower + upper) / 2, (upper - lower) / 2

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


class Variance(Mean):
    """Number, mean and variance of a column's values. The parameters are those of `Mean`."""

    highest_power = 2

    def estimate(self, totals: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the number of values, their mean and their variance.

        Noise may move all three out of range, even the variance below 0.
        """
        count, first, second = totals.T
        variance = _ratio(second, count) - _ratio(first, count) ** 2
        return np.column_stack([super().estimate(totals[:, :2]), self._half**2 * variance])


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
        # `searchsorted` puts ``upper``, larger values and NaN into one bin after the last.
        bins = np.searchsorted(self.edges, values, side="right") - 1
        bins = np.where(values == self.upper, self.count - 1, bins)
        bins = np.where(values < self.lower, self.count, bins)
        bins = np.where(values > self.upper, self.count + 1, bins)
        return np.where(np.isnan(values), self.count + 2, bins)


class Histogram(Statistic):
    """Numbers of people in cells.

    A histogram of one column has a cell for each bin. A table of several columns has a cell for
    each combination of their bins.

    Parameters
    ----------
    *axes : Bins
        The bins of each column.
    """

    def __init__(self, *axes: Bins) -> None:
        kind, names = "histogram", axes[0].names
        if len(axes) > 1:
            labels = [[f"{bins.column} {name}" for name in bins.names] for bins in axes]
            kind, names = "table", [", ".join(cell) for cell in product(*labels)]
        columns = [bins.column for bins in axes]
        title = f"{kind} of {' by '.join(columns)}"
        super().__init__(title, columns=columns, names=names, size=len(names), norm=1.0)
        self.axes = axes

    def vectors(self, columns: Columns) -> NDArray[np.float64]:
        """Return a row for each record: a one in the record's cell, and zeros elsewhere."""
        positions = tuple(bins.of(columns[bins.column]) for bins in self.axes)
        cells = np.ravel_multi_index(positions, [len(bins.names) for bins in self.axes])
        return np.asarray(cells[:, np.newaxis] == np.arange(self.size), dtype=np.float64)


class SurvivalCurve(Statistic):
    """Kaplan–Meier's curve: the fraction of people without an event up to each interval's end.

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

    def __init__(self, times: Bins, event: str) -> None:
        super().__init__(
            f"Kaplan–Meier curve of {times.column}",
            columns=[times.column, event],
            names=[f"survival beyond {end:g}" for end in times.edges[1:]],
            size=2 * times.count + 1,  # events, censorings, and people after the last interval
            norm=1.0,
        )
        self.times, self.event = times, event

    def vectors(self, columns: Columns) -> NDArray[np.float64]:
        """Return a row for each record: a one in the record's cell, and zeros elsewhere.

        A record has zeros only if its time is missing or before the first interval, or if its event
        is not 0 or 1.
        """
        times, events = columns[self.times.column], columns[self.event]
        intervals = self.times.of(times)
        # Cells: events by interval, then censorings by interval, then times after the last one.
        cells = np.where(events == 1, intervals, intervals + self.times.count)
        cells = np.where(intervals == self.times.count + 1, 2 * self.times.count, cells)
        is_known = (intervals < self.times.count) | (intervals == self.times.count + 1)
        is_known &= (events == 0) | (events == 1)
        cells = np.where(is_known, cells, -1)
        return np.asarray(cells[:, np.newaxis] == np.arange(self.size), dtype=np.float64)

    def estimate(self, totals: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the survival at the end of each interval.

        This is the product of (1 − events / people at risk) over this and all earlier intervals. It
        is NaN if the noised number of people at risk is not above 0 in one of these intervals.
        """
        count = self.times.count
        events, leaving = totals[:, :count], totals[:, :count] + totals[:, count:-1]
        # At risk in an interval are all people who leave in it or later. Add up from the last
        # column, which counts people who stay to the end. Then reverse, and drop that column.
        at_risk = np.cumsum(np.column_stack([leaving, totals[:, -1]])[:, ::-1], axis=1)[:, :0:-1]
        return np.asarray(np.cumprod(1 - _ratio(events, at_risk), axis=1), dtype=np.float64)


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
        From 1 to 10. The finest level has 2^depth bins. Within a bin, quantiles are interpolated.
    """

    def __init__(
        self,
        column: str,
        lower: float,
        upper: float,
        probabilities: tuple[float, ...] = (0.25, 0.5, 0.75),
        depth: int = 7,
    ) -> None:
        check_bounds(column, lower, upper)
        if not probabilities or not all(0 < p < 1 for p in probabilities):
            raise InvalidValue(f"probabilities={probabilities!r}: expected numbers in (0, 1)")
        if not 1 <= depth <= 10:
            raise InvalidValue(f"depth={depth!r}: expected 1 to 10")
        super().__init__(
            f"quantiles of {column}, values clamped to [{lower:g}, {upper:g}], to "
            f"{(upper - lower) / 2**depth:g}",
            columns=[column],
            names=[f"{p:g} quantile of {column}" for p in probabilities],
            size=(2 << depth) - 1,  # nodes of the tree
            norm=math.sqrt(depth + 1),  # a record is in one node of each level
        )
        self.probabilities, self.depth = probabilities, depth
        self._leaves = Bins(column, lower, upper, 2**depth)

    def vectors(self, columns: Columns) -> NDArray[np.float64]:
        """Return a row for each record: ones in its node on every level, and zeros elsewhere.

        A record whose value is missing has zeros only.
        """
        values = columns[self._leaves.column]
        is_known = ~np.isnan(values)
        bounded = np.clip(values[is_known], self._leaves.lower, self._leaves.upper)
        leaves, nodes = self._leaves.of(bounded), np.zeros((len(values), self.size))
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

    def _distributions(self, totals: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the distribution function at the bins' edges, of shape (draws, 2^depth + 1)."""
        sums = np.cumsum(totals @ _tree_inverse(self.depth).T, axis=1)
        shares = _ratio(sums, np.broadcast_to(sums[:, -1:], sums.shape))
        above, below = _rising(np.column_stack([np.zeros(len(totals)), shares]))
        return (above + below) / 2  # one of them alone would be biased

    def _inverted(self, functions: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the values at which distribution functions reach `probabilities`.

        ``functions`` has the shape (draws, edges). The result for a function with NaN is NaN.
        """
        wanted, edges = self.probabilities, self._leaves.edges
        values = np.array([np.interp(wanted, function, edges) for function in functions])
        return np.where(np.isnan(functions).any(axis=1, keepdims=True), np.nan, values)


def check_bounds(column: str, lower: float, upper: float) -> None:
    """Refuse bounds that are not finite, or that lie too close or too far apart for a float.

    With such bounds, a value's place between them could be NaN, so that one record would decide
    whether its silo can send anything.
    """
    if not (math.isfinite(lower) and math.isfinite(upper) and 1e-100 <= upper - lower <= 1e100):
        raise InvalidValue(
            f"bounds {lower:g}:{upper:g} of {column}: expected two finite numbers, the smaller "
            "one first, and a distance from 1e-100 to 1e100"
        )


def _ratio(numerator: NDArray[np.float64], denominator: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return numerator / denominator; NaN where noise moved the denominator to 0 or below."""
    return np.divide(
        numerator, denominator, out=np.full_like(numerator, np.nan), where=denominator > 0
    )


def _rising(functions: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the least non-decreasing function above each function, and the largest below it.

    All functions have the shape (…, edges).
    """
    below = np.minimum.accumulate(functions[..., ::-1], axis=-1)[..., ::-1]
    return np.maximum.accumulate(functions, axis=-1), below


@cache
def _tree_inverse(depth: int) -> NDArray[np.float64]:
    """Return the matrix that computes the counts of a tree's leaves from those of all its nodes.

    The matrix has the shape (leaves, nodes). Among all counts of leaves, the computed ones fit the
    nodes' counts best, by least squares.
    """
    leaves = np.arange(2**depth)
    # A level has a row per node: True for the leaves below it. The first ``level`` of the ``depth``
    # bits of a leaf's number are the number of its node on that level.
    levels = [
        np.arange(2**level)[:, np.newaxis] == leaves >> (depth - level)
        for level in range(depth + 1)
    ]
    return np.linalg.pinv(np.concatenate(levels).astype(np.float64))
