"""The tables of Upcycled-FL's results; each function returns Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from benchmarks.report.rows import Row, column_values, curve, gains, read_rows, select_rows
from benchmarks.report.tables.cells import mean_text
from benchmarks.runs import mean_and_error
from benchmarks.upcycled.experiment import METHODS, SYNTHETIC
from benchmarks.upcycled.table1 import PAPER
from flower_ext.privacy import epsilon_text
from flower_ext.runs.page import table


def accuracy_table(ratio: float) -> str:
    """Return plain accuracy and gain of each pair beside the paper's, and how many gains agree."""
    rows = read_rows(f"upcycled-fl-stragglers-{ratio:g}")
    cells, near, signs = [], [], []
    for dataset in SYNTHETIC:
        for method, name in METHODS.items():
            pair = select_rows(rows, dataset=dataset, method=method)
            plain, upcycled = select_rows(pair, upcycled=False), select_rows(pair, upcycled=True)
            if not (plain and upcycled):
                continue
            accuracies = [100 * value for value in column_values(plain, "accuracy_pooled")]
            added = [100 * gain for gain in gains(upcycled, plain, "accuracy_pooled")]
            before, after = PAPER[ratio][method][list(SYNTHETIC).index(dataset)]
            near.append(abs(statistics.mean(accuracies) - before))
            near.append(abs(statistics.mean(accuracies) + statistics.mean(added) - after))
            error = statistics.stdev(added) / math.sqrt(len(added))
            signs.append((statistics.mean(added), error))
            cells.append(
                (
                    dataset.removeprefix("synthetic-"),
                    name,
                    mean_text(accuracies, digits=2),
                    f"{before:.2f}",
                    mean_and_error(added, 2),
                    f"{after - before:+.2f}",
                )
            )
    header = ("data", "method", "plain", "paper", "upcycled adds", "paper")
    # Of equal accuracies, the difference of two means may be 1e-17.
    up = sum(round(gain, 2) > 0 for gain, _ in signs)
    surely = sum(gain > 2 * error for gain, error in signs)
    worse = sum(gain < -2 * error for gain, error in signs)
    text = (
        f"**{up} of {len(signs)} pairs improve**, {surely} by more than two standard errors; "
        f"{worse} get worse by more than two. Of the {len(near)} accuracies, "
        f"{sum(gap <= 1 for gap in near)} are within 1 point of the paper's and "
        f"{sum(gap <= 2 for gap in near)} within 2."
    )
    return f"{table(header, cells)}\n\n{text}"


def losses_table(ratio: float, datasets: Sequence[str]) -> str:
    """Return how often the upcycled loss is below the plain one, and both losses at the end."""
    rows = read_rows(f"upcycled-fl-stragglers-{ratio:g}")
    cells = []
    for method, name in METHODS.items():
        runs = select_rows(rows, method=method)
        if not runs:
            continue
        row = [name]
        for dataset in datasets:
            pair = select_rows(runs, dataset=dataset)
            plain = _mean_curve(select_rows(pair, upcycled=False))
            upcycled = _mean_curve(select_rows(pair, upcycled=True))
            both = [at for at in plain if 2 * at in upcycled]
            lower = sum(upcycled[2 * at] < plain[at] for at in both)
            ends = f"{plain[both[-1]]:.3f} → {upcycled[2 * both[-1]]:.3f}" if both else "–"
            row.append(f"{lower}; {ends}")
        cells.append(row)
    names = [dataset.removeprefix("synthetic-") for dataset in datasets]
    return table(("method", *names), cells)


def _mean_curve(runs: Sequence[Row]) -> dict[int, float]:
    curves = [curve(run, "loss_mean") for run in runs]
    shared = set.intersection(*map(set, curves)) if curves else set()
    return {at: statistics.mean(line[at] for line in curves) for at in sorted(shared)}


def private_table(name: str) -> str:
    """Return plain and upcycled losses under one perturbation, and how many pairs gain."""
    rows = [
        row
        for row in read_rows("upcycled-fl-private")
        if row["run"].startswith(f"{name}-synthetic")
    ]
    cells, gained = [], []
    for method, label in METHODS.items():
        line = [label]
        for dataset in SYNTHETIC:
            pair = select_rows(rows, dataset=dataset, method=method)
            plain, upcycled = select_rows(pair, upcycled=False), select_rows(pair, upcycled=True)
            if not (plain and upcycled):
                line.append("–")
                continue
            losses = (statistics.mean(_late_losses(runs)) for runs in (plain, upcycled))
            line.append(" → ".join(f"{loss:.3f}" for loss in losses))
            differences = [
                after - before
                for before, after in zip(_late_losses(plain), _late_losses(upcycled), strict=True)
            ]
            error = statistics.stdev(differences) / math.sqrt(len(differences))
            gained.append((statistics.mean(differences), error))
        if any(cell != "–" for cell in line[1:]):
            cells.append(line)
    names = [dataset.removeprefix("synthetic-") for dataset in SYNTHETIC]
    budgets = [
        ("ε̄, " + basis, *(_budgets(select_rows(rows, dataset=d), basis) for d in SYNTHETIC))
        for basis in ("published", "provable")
    ]
    text = (
        f"**The upcycled loss is lower in {sum(mean < 0 for mean, _ in gained)} of {len(gained)} "
        f"pairs**, in {sum(mean < -2 * error for mean, error in gained)} by more than two standard "
        f"errors; it is higher by as much in {sum(mean > 2 * error for mean, error in gained)}."
    )
    return f"{table(('method', *names), [*cells, *budgets])}\n\n{text}"


def _late_losses(runs: Sequence[Row]) -> list[float]:
    """Return each run's mean loss over the last three evaluations, in the order of the seeds."""
    curves = [curve(run, "loss_mean") for run in sorted(runs, key=lambda run: run["seed"])]
    return [statistics.mean([*line.values()][-3:]) for line in curves]


def _budgets(rows: Sequence[Row], basis: str) -> str:
    pair = (select_rows(rows, upcycled=upcycled) for upcycled in (False, True))
    return " → ".join(_budget(runs, basis) for runs in pair if runs) or "–"


def _budget(runs: Sequence[Row], basis: str) -> str:
    text = runs[0][f"epsilon_{basis}_mean"]
    return epsilon_text(float(text)) if text else "none"
