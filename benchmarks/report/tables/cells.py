"""Cells and rows that the tables of several papers need."""

import statistics
from collections.abc import Iterable, Sequence

from benchmarks.report.rows import read_rows
from benchmarks.runs import mean_and_std, standard_error
from flower_ext.runs.page import table


def mean_text(values: Sequence[float], digits: int = 3) -> str:
    """Return the mean and the sample standard deviation as text; a dash if there are no values."""
    return mean_and_std(values, digits=digits) if values else "–"


def count_gains(pairs: Iterable[Sequence[float]], digits: int) -> tuple[int, int, int]:
    """Return how many pairs gain, how many of them surely, and how many surely lose.

    Parameters
    ----------
    pairs : Iterable[Sequence[float]]
        The gains of each pair, seed by seed. Their mean is sure beyond two standard errors.
    digits : int
        Digits of a mean gain that count: the difference of two equal means may be 1e-17.
    """
    means = [(statistics.mean(gains), standard_error(gains)) for gains in pairs]
    sure = [mean for mean, error in means if abs(mean) > 2 * error and round(mean, digits)]
    up = sum(round(mean, digits) > 0 for mean, _ in means)
    return up, sum(mean > 0 for mean in sure), sum(mean < 0 for mean in sure)


def stored_table(name: str, without: tuple[str, ...] = ()) -> str:
    """Return a table that came from no run directories, without columns of these first words."""
    rows = read_rows(name)
    columns = [column for column in rows[0] if not column.startswith(without)]
    return table(columns, [[row[column] for column in columns] for row in rows])
