"""Cells and rows that the tables of several papers need."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report.rows import read_rows
from flower_ext.runs.comparison import mean_and_std
from flower_ext.runs.page import table


def mean_text(values: Sequence[float], digits: int = 3) -> str:
    """Return the mean and the sample standard deviation as text; a dash if there are no values."""
    return mean_and_std(values, digits=digits) if values else "–"


def stored_table(name: str, without: tuple[str, ...] = ()) -> str:
    """Return a table that came from no run directories, without columns of these first words."""
    rows = read_rows(name)
    columns = [column for column in rows[0] if not column.startswith(without)]
    return table(columns, [[row[column] for column in columns] for row in rows])
