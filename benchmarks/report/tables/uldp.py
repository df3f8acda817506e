"""The tables of Uldp-FL's results; each function returns Markdown."""

import re
from collections.abc import Iterable, Sequence

from benchmarks.report.rows import Row, column_values, curve, gains, read_rows, select_rows
from benchmarks.report.tables.cells import mean_text
from benchmarks.runs import mean_and_error
from benchmarks.uldp.experiment import METHODS
from flower_ext.privacy import epsilon_text
from flower_ext.runs.page import table

USERS = {4: (100, 1000), 5: (100, 10_000), 6: (50, 200), 7: (50, 200)}
"""The numbers of users in the panels of each figure."""
METRICS = {4: "loss_pooled", 5: "accuracy_pooled", 6: "accuracy_pooled", 7: "concordance_mean"}
"""The metric that each figure shows."""
SAME_BUDGET = ("ULDP-SGD", "ULDP-AVG")
"""Methods with the ε of ULDP-AVG-w, which tables of ε therefore leave out."""


def budgets_table(figure: int) -> str:
    """Return ε, published / provable, by method and panel; a sentence has those of equal cells."""
    rows = [
        row for row in read_rows(f"uldp-fl-budgets-{figure}") if row["method"] not in SAME_BUDGET
    ]
    panels = dict.fromkeys(row["panel"] for row in rows)
    cells = [
        [
            method.removeprefix("ULDP-"),
            *(
                f"{row['published']} / {row['provable']}"
                for row in select_rows(rows, method=method)
                if row["panel"] in panels
            ),
        ]
        for method in dict.fromkeys(row["method"] for row in rows)
    ]
    labels = [re.sub(r"^\D+-(\d+)-(\w+)-?", r"\1, \2 ", panel).strip() for panel in panels]
    constant = [f"{row[0]} has {row[1]}" for row in cells if len(set(row[1:])) == 1]
    varying = [row for row in cells if len(set(row[1:])) > 1]
    text = f"In every panel, {' and '.join(constant)}:"
    return f"{text}\n\n{table(('users, records', *labels), varying)}"


def utility_table(figure: int, dataset: str) -> str:
    """Return the utility of every method in each panel of Uldp-FL's Figures 4 to 7."""
    rows = select_rows(
        read_rows(f"uldp-fl-figure-{figure}"), dataset=dataset, user_sampling_rate=1.0
    )
    panels = {
        f"{users}, {distribution}": select_rows(rows, num_users=users, distribution=distribution)
        for users in USERS[figure]
        for distribution in ("uniform", "zipf")
    }
    panels = {name: members for name, members in panels.items() if members}
    metric = METRICS[figure]
    early = int(rows[0]["rounds"]) // 5

    def utility(runs: Sequence[Row]) -> str:
        before = [curve(run, metric)[early] for run in runs]
        return f"{mean_text(column_values(runs, metric))} ({mean_text(before)})"

    counts = {len(_rows_of_method(members, "ULDP-AVG-w")) for members in panels.values()}
    text = (
        f"{metric.partition('_')[0].capitalize()} after {rows[0]['rounds']} rounds (in brackets: "
        f"after {early}), {'/'.join(map(str, sorted(counts)))} seeds, and AVG-w − AVG by seed:"
    )
    difference = [
        mean_and_error(
            gains(
                _rows_of_method(members, "ULDP-AVG-w"), _rows_of_method(members, "ULDP-AVG"), metric
            ),
            3,
        )
        for members in panels.values()
    ]
    shown = [label for label in METHODS if any(_rows_of_method(m, label) for m in panels.values())]
    cells = [
        *(
            [label, *(utility(_rows_of_method(members, label)) for members in panels.values())]
            for label in shown
        ),
        ["AVG-w − AVG", *difference],
    ]
    return f"{text}\n\n{table(('users, records', *panels), cells)}"


def _rows_of_method(rows: Iterable[Row], label: str) -> list[Row]:
    return select_rows(rows, **{key.replace("-", "_"): v for key, v in METHODS[label].items()})


def weighting_table(rows: Sequence[Row]) -> str:
    """Return the losses of Uldp-FL's Figure 8, by number of silos and distribution."""
    cells = []
    for distribution in ("uniform", "zipf"):
        for silos in (5, 20, 50):
            runs = select_rows(rows, num_users=1000, distribution=distribution, num_silos=silos)
            equal = select_rows(runs, method="uldp-avg")
            by_records = select_rows(runs, method="uldp-avg-w")
            if equal and by_records:
                losses = [
                    mean_text(column_values(each, "loss_pooled"), 4) for each in (equal, by_records)
                ]
                gap = mean_and_error(gains(equal, by_records, "loss_pooled"), 4)
                cells.append((distribution, silos, *losses, gap))
    header = ("records", "silos", "loss, ULDP-AVG", "loss, ULDP-AVG-w", "AVG − AVG-w, by seed")
    return table(header, cells)


def sampling_table(rows: Sequence[Row]) -> str:
    """Return utility and ε of Uldp-FL's Figure 10 by the share of users in a round."""
    cells = []
    by_records = select_rows(rows, distribution="zipf", method="uldp-avg-w")
    for dataset, users in (("creditcard", 1000), ("mnist", 10_000)):
        runs = select_rows(by_records, dataset=dataset, num_users=users)
        for rate in sorted({float(row["user-sampling-rate"]) for row in runs}):
            of_rate = select_rows(runs, user_sampling_rate=rate)
            utility = (
                mean_text(column_values(of_rate, m)) for m in ("accuracy_pooled", "loss_pooled")
            )
            budgets = [float(of_rate[0][f"epsilon_{b}"]) for b in ("published", "provable")]
            cells.append((dataset, f"{rate:g}", *utility, *map(epsilon_text, budgets)))
    return table(("data", "q", "accuracy", "loss", "ε published", "ε provable"), cells)
