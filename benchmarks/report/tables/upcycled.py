"""The tables of Upcycled-FL's results; each function returns Markdown."""

import statistics
from collections.abc import Sequence

from benchmarks.report.rows import Row, column_values, curve, gains, read_rows, select_rows
from benchmarks.report.tables.cells import count_gains, mean_text
from benchmarks.runs import mean_and_error
from benchmarks.upcycled.experiment import ACCURACY, DEVICES, METHODS, SYNTHETIC
from flower_ext.privacy import epsilon_text
from flower_ext.runs.page import table

PAPER = {  # Tables 1 and 3, by stragglers: plain and upcycled accuracy in per cent on SYNTHETIC
    0.9: {
        "fedavg": ((98.06, 98.83), (79.28, 81.46), (81.58, 82.89), (80.40, 81.49)),
        "fedavgm": ((98.43, 98.72), (80.29, 81.74), (82.60, 83.13), (80.59, 81.37)),
        "fedprox": ((96.52, 97.62), (80.72, 80.88), (81.99, 83.10), (81.19, 81.94)),
        "scaffold": ((97.51, 98.68), (80.26, 81.10), (82.44, 82.64), (74.91, 76.14)),
        "feddyn": ((97.00, 98.32), (81.62, 82.41), (80.64, 82.89), (77.27, 80.03)),
        "pfedme": ((96.30, 96.77), (89.15, 89.08), (89.43, 89.55), (93.06, 93.12)),
        "fedyogi": ((99.30, 99.41), (81.20, 81.65), (79.49, 80.84), (78.95, 80.17)),
    },
    0.3: {
        "fedavg": ((98.50, 99.30), (80.30, 80.77), (82.60, 83.09), (78.81, 80.74)),
        "fedavgm": ((98.50, 99.12), (81.08, 82.20), (82.89, 82.68), (80.64, 80.43)),
        "fedprox": ((97.22, 98.24), (80.88, 81.52), (82.31, 83.05), (80.13, 81.73)),
        "scaffold": ((98.28, 99.52), (79.95, 79.46), (79.54, 81.83), (72.27, 73.34)),
        "feddyn": ((98.17, 98.57), (82.06, 82.08), (80.97, 82.80), (78.65, 81.11)),
        "pfedme": ((96.45, 96.89), (91.05, 91.06), (89.64, 89.40), (92.88, 92.64)),
        "fedyogi": ((99.38, 99.60), (81.06, 81.77), (80.65, 81.72), (79.14, 80.32)),
    },
}
Gains = dict[tuple[str, str], tuple[list[float], list[float]]]
"""Plain accuracies, and what upcycling adds by seed, of each data set and method."""


def accuracy_gains(rows: Sequence[Row]) -> Gains:
    """Return the accuracies and gains in per cent of all pairs of plain and upcycled runs."""
    gained: Gains = {}
    for dataset in DEVICES:
        for method in METHODS:
            pair = select_rows(rows, dataset=dataset, method=method)
            plain, upcycled = select_rows(pair, upcycled=False), select_rows(pair, upcycled=True)
            if plain and upcycled:
                gained[dataset, method] = (
                    [100 * value for value in column_values(plain, ACCURACY)],
                    [100 * gain for gain in gains(upcycled, plain, ACCURACY)],
                )
    return gained


def accuracy_table(rows: Sequence[Row], ratio: float) -> str:
    """Return plain accuracy and gain of each pair beside the paper's, and how many gains agree."""
    gained, cells, gaps = accuracy_gains(rows), [], []
    for (dataset, method), (accuracies, added) in gained.items():
        paper = ("–", "–")
        if ratio in PAPER and dataset in SYNTHETIC:
            before, after = PAPER[ratio][method][list(SYNTHETIC).index(dataset)]
            mean = statistics.mean(accuracies)
            gaps += [abs(mean - before), abs(mean + statistics.mean(added) - after)]
            paper = (f"{before:.2f}", f"{after - before:+.2f}")
        name, plain = dataset.removeprefix("synthetic-"), mean_text(accuracies, digits=2)
        cells.append((name, METHODS[method], plain, paper[0], mean_and_error(added, 2), paper[1]))
    up, surely, worse = count_gains([added for _, added in gained.values()], digits=2)
    text = (
        f"**{up} of {len(gained)} pairs improve**, {surely} by more than two standard errors; "
        f"{worse} get worse by more than two standard errors."
    )
    if gaps:
        text += (
            f" Of the {len(gaps)} accuracies, {sum(gap <= 1 for gap in gaps)} are within 1 point "
            f"of the paper's and {sum(gap <= 2 for gap in gaps)} within 2."
        )
    header = ("data", "method", "plain", "paper", "upcycled adds", "paper")
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
            before, after = _late_losses(plain), _late_losses(upcycled)
            line.append(f"{statistics.mean(before):.3f} → {statistics.mean(after):.3f}")
            gained.append([loss - lower for loss, lower in zip(before, after, strict=True)])
        if any(cell != "–" for cell in line[1:]):
            cells.append(line)
    names = [dataset.removeprefix("synthetic-") for dataset in SYNTHETIC]
    budgets = [
        ("ε̄, " + basis, *(_budgets(select_rows(rows, dataset=d), basis) for d in SYNTHETIC))
        for basis in ("published", "provable")
    ]
    lower, surely, worse = count_gains(gained, digits=3)
    text = (
        f"**The upcycled loss is lower in {lower} of {len(gained)} pairs.** The difference exceeds "
        f"two standard errors in {surely + worse} pairs: the upcycled loss is lower in {surely} of "
        f"them, and higher in {worse}."
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
