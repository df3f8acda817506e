"""The tables of DP-Ditto's results; each function returns Markdown."""

import math
from collections.abc import Mapping, Sequence

from benchmarks.report.rows import Row, column_values, curve, read_rows, select_rows
from benchmarks.report.tables.cells import mean_text
from flower_ext.runs.page import table

SERIES = (3, 9, 15, 30)
"""Rounds of Figure 6 that its table shows."""


def bounds_table() -> str:
    """Return the bounds of DP-Ditto's Figure 2, each number from its least to its greatest seed."""
    rows = read_rows("dp-ditto-figure-2")
    numbered = ("ε_L", "T*", "h(0)", "h(80)", "h(1000)", "least distance to the line")
    cells = []
    for rate, bound in dict.fromkeys((row["η"], row["bound"]) for row in rows):
        runs = [
            {**row, "ε_L": row["ε_L, ε_G"].partition(",")[0]}
            for row in rows
            if (row["η"], row["bound"]) == (rate, bound)
        ]
        cells.append((rate, bound, *(_span([run[name] for run in runs]) for name in numbered)))
    return table(("η", "bound", *numbered), cells)


def _span(values: Sequence[str]) -> str:
    if "–" in values:
        return "–"
    least, greatest = min(values, key=float), max(values, key=float)
    return least if least == greatest else f"{least}–{greatest}"


def rounds_table(rows: Sequence[Row], metrics: Mapping[str, int]) -> str:
    """Return metrics, with so many digits, by T for each λ, ε or method of a world."""
    labels = sorted({row["run"].rpartition(", T = ")[0] for row in rows}, key=_last_number)
    lengths = sorted({int(row["rounds"]) for row in rows})
    parts = []
    for metric, digits in metrics.items():
        cells = []
        for label in labels:
            line = [row for row in rows if row["run"].startswith(f"{label}, T = ")]
            by_length = [column_values(select_rows(line, rounds=T), metric) for T in lengths]
            cells.append((label, *(mean_text(values, digits) for values in by_length)))
        header = (metric.replace("_", " "), *(f"T = {T}" for T in lengths))
        parts.append(table(header, cells))
    return "\n\n".join(parts)


def _last_number(label: str) -> tuple[float, str]:
    """Return the key by which labels such as "ε = 10" are sorted; those without a number follow."""
    number = label.rpartition(" = ")[2]
    return (float(number) if number != label else math.inf), label


def series_table(rows: Sequence[Row], metrics: Mapping[str, int]) -> str:
    """Return metrics, with so many digits, after some rounds for each λ of Figure 6."""
    parts = []
    for metric, digits in metrics.items():
        cells = []
        for weight in sorted({float(row["global-weight"]) for row in rows}):
            curves = [curve(row, metric) for row in select_rows(rows, global_weight=weight)]
            values = [[line[t] for line in curves] for t in SERIES]
            cells.append((f"λ = {weight:g}", *(mean_text(each, digits) for each in values)))
        parts.append(table((metric.replace("_", " "), *(f"t = {t}" for t in SERIES)), cells))
    return "\n\n".join(parts)
