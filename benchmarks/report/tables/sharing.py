"""The table of when sharing pays, made from the rows of `benchmarks.sharing`."""

import statistics
from collections.abc import Sequence

from benchmarks.report.rows import Row, column_values, gains, read_rows, select_rows
from benchmarks.runs import mean_and_error
from flower_ext.runs.page import table


def private_gains(cell: Sequence[Row]) -> tuple[str, list[float]]:
    """Return the better private method of a cell of `benchmarks.sharing`, and its gains by seed.

    A gain is the method's accuracy minus that of clients alone, in percentage points.
    """
    alone = select_rows(cell, method="alone")
    methods = {row["method"] for row in cell if row["epsilon"] not in ("", "inf")}
    points = {
        method: [100 * gain for gain in gains(select_rows(cell, method=method), alone, "accuracy")]
        for method in sorted(methods)
    }
    best = max(points, key=lambda method: statistics.mean(points[method]))
    return best, points[best]


def accuracies_table() -> str:
    """Return the accuracy of each method in each cell, and what the better private one gains."""
    rows = read_rows("sharing")
    methods = dict.fromkeys(row["method"] for row in rows)
    sizes = ("clients", "examples", "classes")
    cells = []
    for cell_sizes in sorted({tuple(int(row[size]) for size in sizes) for row in rows}):
        cell = select_rows(rows, **dict(zip(sizes, cell_sizes, strict=True)))
        means = [
            f"{statistics.mean(column_values(select_rows(cell, method=m), 'accuracy')):.2f}"
            for m in methods
        ]
        gain = mean_and_error(private_gains(cell)[1], 1)
        cells.append([*map(str, cell_sizes), *means, gain])
    return table(("clients", "examples", "classes", *methods, "sharing adds"), cells)
