"""The tables of results, made of rows."""

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.report.rows import read_rows
from benchmarks.report.tables import correlated, ditto, sharing, uldp, upcycled
from benchmarks.report.tables.cells import stored_table
from benchmarks.upcycled.experiment import SYNTHETIC

# Metrics of DP-Ditto, and the digits that a table shows of them.
_LOSS = {"training_loss_mean": 3}
_LOSSES = {**_LOSS, "training_loss_std": 3}
_UTILITY = {"accuracy_mean": 3, "training_loss_std": 3}


def _stored(make: Callable[..., str], *names: str, **options: Any) -> str:
    """Return a table of the rows that are stored under these names."""
    return make(read_rows(*names), **options)


TABLES: dict[str, Callable[[], str]] = {
    "uldp-figure-4": partial(uldp.utility_table, 4, "creditcard"),
    "uldp-figure-5": partial(uldp.utility_table, 5, "mnist"),
    "uldp-figure-6": partial(uldp.utility_table, 6, "heart-disease"),
    "uldp-figure-7": partial(uldp.utility_table, 7, "tcga-brca"),
    "uldp-figure-7-scaled": partial(uldp.utility_table, 7, "tcga-brca-scaled"),
    **{f"uldp-budgets-{number}": partial(uldp.budgets_table, number) for number in uldp.USERS},
    "uldp-figure-11": partial(stored_table, "uldp-fl-figure-11", without=("set-up",)),
    "uldp-figure-12": partial(stored_table, "uldp-fl-figure-12", without=("set-up", "ring-LWE")),
    "uldp-figure-8": partial(_stored, uldp.weighting_table, "uldp-fl-figure-8", "uldp-fl-figure-4"),
    "uldp-figure-10": partial(
        _stored, uldp.sampling_table, "uldp-fl-figure-10", "uldp-fl-figure-4"
    ),
    **{
        f"upcycled-table-{number}": partial(
            _stored, upcycled.accuracy_table, f"upcycled-fl-stragglers-{ratio:g}", ratio=ratio
        )
        for number, ratio in ((1, 0.9), (3, 0.3))
    },
    **{
        f"upcycled-by-rate-{r:g}": partial(stored_table, f"upcycled-fl-by-rate-{r:g}")
        for r in upcycled.PAPER
    },
    "upcycled-figure-5": partial(upcycled.losses_table, 0.9, tuple(SYNTHETIC)),
    "upcycled-figure-6": partial(upcycled.losses_table, 0.3, tuple(SYNTHETIC)),
    "upcycled-figure-3-tau-2": partial(upcycled.private_table, "output-2"),
    "upcycled-figure-3-tau-4": partial(upcycled.private_table, "output-4"),
    "upcycled-figure-4": partial(upcycled.private_table, "objective"),
    "ditto-figure-2": ditto.bounds_table,
    **{
        f"ditto-{figure}": partial(
            _stored, ditto.rounds_table, f"dp-ditto-{figure}", metrics=metrics
        )
        for figure, metrics in {
            "figure-3-mnist-dnn": _UTILITY,
            "figure-4-mnist-dnn": _UTILITY,
            "figure-5-mnist-dnn": _LOSS,
            "figure-5-mnist-mlr": _LOSS,
            "figure-7": _LOSSES,
        }.items()
    },
    "ditto-figure-6-mnist-dnn": partial(
        _stored, ditto.series_table, "dp-ditto-figure-6-mnist-dnn", metrics=_UTILITY
    ),
    "sharing": sharing.accuracies_table,
    "correlated-ratios": partial(stored_table, "correlated-ratios"),
    "correlated-accuracies": partial(correlated.accuracies_table, 2.0),
}
"""The tables by their names in the pages."""
