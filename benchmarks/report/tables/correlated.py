"""The table of accuracies under correlated noise and under Poisson sampling, as Markdown."""

from benchmarks.report.rows import column_values, read_rows, select_rows
from benchmarks.report.tables.cells import mean_text
from flower_ext.runs.page import table


def accuracies_table(epsilon: float) -> str:
    """Return accuracies at one ε: mean and standard deviation by mechanism and data set."""
    rows = select_rows(read_rows("correlated"), epsilon=epsilon)
    datasets, mechanisms = (
        dict.fromkeys(row[column] for row in rows) for column in ("data", "mechanism")
    )
    cells = [
        (
            mechanism,
            *(
                mean_text(
                    column_values(select_rows(rows, data=data, mechanism=mechanism), "accuracy")
                )
                for data in datasets
            ),
        )
        for mechanism in mechanisms
    ]
    return table(("mechanism", *datasets), cells)
