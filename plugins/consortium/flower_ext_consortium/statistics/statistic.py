"""A statistic as a sum of bounded vectors, and estimates with the error that the noise gives them.

Every record makes a vector of bounded norm from the columns that the statistic reads. A privacy
unit's part is the mean of its records' vectors, so each unit counts as one, whatever its number of
records. The noised sum of all parts is released, and computing estimates from it costs no privacy.

An estimate's error is its distance from the same statistic of the same records without noise. The
error says nothing about people who are not in the data. To find the error, `Statistic.estimates`
draws the noise again many times and measures how far the estimate moves. This works for sums,
ratios and curves alike.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flower_ext.data import Examples
from flower_ext.errors import InvalidValue

Columns = Mapping[str, NDArray[np.float64]]
DRAWS = 1000
"""Number of draws of the noise, which makes standard errors exact to about two percent."""
NORMAL_QUANTILE = 1.959964
"""Half the width of a 95 % interval, in standard errors."""
LABEL = "label"
"""Name of the column of targets, if the targets are one tensor."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One released number.

    Parameters
    ----------
    name : str
        Description, such as "mean of age".
    value : float
        NaN if the number may be undefined, such as a mean whose noised number of people is below 0.
    standard_error : float
        Standard deviation that the noise gives to the estimate.
    lower, upper : float
        A 95 % interval for the same number without noise.
    """

    name: str
    value: float
    standard_error: float
    lower: float
    upper: float


class Statistic(ABC):
    """A statistic of the people in all silos together.

    Parameters
    ----------
    title : str
        The statistic in words, with its bounds.
    columns : Sequence[str]
        Names of the columns that the statistic reads.
    names : Sequence[str]
        Names of the estimates.
    size : int
        Number of elements of a record's vector.
    norm : float
        Largest L2 norm of a record's vector.
    """

    def __init__(
        self, title: str, *, columns: Sequence[str], names: Sequence[str], size: int, norm: float
    ) -> None:
        self.title, self.columns, self.names = title, columns, names
        self.size, self.norm = size, norm

    @abstractmethod
    def vectors(self, columns: Columns) -> NDArray[np.float64]:
        """Return the records' vectors, of shape (records, size).

        A value may be anything, NaN included, and changes the row of its record only.
        """

    def estimate(self, totals: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the estimates that follow from totals over all units.

        The totals have the shape (draws, size), and the estimates the shape (draws, names). By
        default, the estimates are the totals, which are unbiased and may be below 0.
        """
        return totals

    def estimates(
        self, total: NDArray[np.float64], stddev: float, rng: np.random.Generator
    ) -> list[Estimate]:
        """Return the estimates, with standard errors and intervals, from a noised total (size,).

        ``stddev`` is the standard deviation of the noise in each element. ``rng`` draws noise again
        to see how far the estimates move.
        """
        values = self.estimate(total[np.newaxis])[0]
        moved_totals = total + stddev * rng.standard_normal((DRAWS, self.size))
        moved = self.estimate(moved_totals)
        # If noise can make an estimate undefined, its denominator may be 0, and no error bounds it.
        is_lost = np.isnan(values) | np.isnan(moved).any(axis=0)
        moved[:, is_lost] = 0.0
        values = np.where(is_lost, np.nan, values)
        errors = np.where(is_lost, np.nan, np.std(moved, axis=0))
        lower, upper = self.intervals(total, moved_totals, values, errors)
        columns = (values.tolist(), errors.tolist(), lower.tolist(), upper.tolist())
        return [
            Estimate(name=name, value=value, standard_error=error, lower=low, upper=high)
            for name, value, error, low, high in zip(self.names, *columns, strict=True)
        ]

    def intervals(
        self,
        total: NDArray[np.float64],
        moved_totals: NDArray[np.float64],
        values: NDArray[np.float64],
        errors: NDArray[np.float64],
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the lower and the upper ends of the estimates' 95 % intervals.

        By default, the intervals assume normally distributed errors. ``moved_totals``, of shape
        (draws, size), is the noised ``total`` with new noise. ``values`` and ``errors`` are the
        estimates and their standard errors.
        """
        half = NORMAL_QUANTILE * errors
        return values - half, values + half


@dataclass(frozen=True)
class JointStatistics:
    """Several statistics that one noised sum releases together.

    All statistics get equal shares of the privacy budget. If there are m statistics, each
    statistic's vectors are scaled to a norm of at most 1/√m. The joined vectors of a record then
    have a norm of at most 1.
    """

    statistics: tuple[Statistic, ...]

    def __post_init__(self) -> None:
        if not self.statistics:
            raise InvalidValue("statistics: expected at least one")

    @property
    def size(self) -> int:
        """Number of elements of all vectors together."""
        return sum(statistic.size for statistic in self.statistics)

    def require_columns(self, examples: Examples) -> None:
        """Refuse examples that lack a column of a statistic, even if there are no rows.

        The server may see the error, because it depends on which columns the table has, and on no
        record.
        """
        columns = columns_of(examples)
        for statistic in self.statistics:
            if missing := [name for name in statistic.columns if name not in columns]:
                raise InvalidValue.tellable(
                    f"statistic {statistic.title!r}: no column {', '.join(missing)} in the data"
                )

    def part(self, examples: Examples) -> NDArray[np.float64]:
        """Return the mean of the joined vectors of one unit's records.

        It has the shape (size,) and an L2 norm of at most 1.
        """
        return self.parts([examples]).ravel()

    def parts(self, units: Sequence[Examples]) -> NDArray[np.float64]:
        """Return `part` for several units, as the rows of an array of shape (units, size).

        Each unit must have at least one record.
        """
        tables = [columns_of(examples) for examples in units]
        joined = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
        counts = np.array([len(examples) for examples in units])
        starts = np.cumsum(counts) - counts
        means = [
            np.add.reduceat(statistic.vectors(joined), starts)
            / (counts[:, np.newaxis] * self._unit(statistic))
            for statistic in self.statistics
        ]
        return np.concatenate(means, axis=1)

    def estimates(
        self, total: NDArray[np.float64], stddev: float, rng: np.random.Generator
    ) -> dict[Statistic, list[Estimate]]:
        """Return every statistic's estimates from the noised sum over all units.

        The parameters are those of `Statistic.estimates`.
        """
        ends = np.cumsum([statistic.size for statistic in self.statistics])
        return {
            statistic: statistic.estimates(
                part * self._unit(statistic), stddev * self._unit(statistic), rng
            )
            for statistic, part in zip(self.statistics, np.split(total, ends[:-1]), strict=True)
        }

    def _unit(self, statistic: Statistic) -> float:
        return statistic.norm * math.sqrt(len(self.statistics))


def columns_of(examples: Examples) -> dict[str, NDArray[np.float64]]:
    """Return the columns of examples by name.

    A mapping of features or targets names its columns. A table of features (n, d) has the columns
    x0, x1, …, and a tensor of targets is the column `LABEL`.
    """
    columns: dict[str, Tensor] = {}
    if isinstance(examples.features, Mapping):
        columns.update(examples.features)
    elif isinstance(examples.features, Tensor) and examples.features.dim() == 2:
        columns.update({f"x{i}": column for i, column in enumerate(examples.features.unbind(1))})
    if isinstance(examples.targets, Mapping):
        columns.update(examples.targets)
    elif isinstance(examples.targets, Tensor):
        columns[LABEL] = examples.targets
    return {
        name: column.detach().cpu().double().numpy()  # NumPy has no bfloat16
        for name, column in columns.items()
        if column.dim() == 1
    }
