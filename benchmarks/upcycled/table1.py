"""Tables 1 and 3: accuracy, plain against upcycled, for equal work of the clients."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.report.rows import store_rows
from benchmarks.runs import Experiment, differences, last_values, standard_error
from benchmarks.upcycled.experiment import (
    METHODS,
    PARAMETERS,
    SYNTHETIC,
    Scale,
    in_rounds,
    mean_of_last_evaluations,
    search,
    table_config,
)
from flower_ext.runs import RunDirectory, write_comparison
from flower_ext.runs.comparison import mean_and_std
from flower_ext.runs.page import table

ACCURACY = "accuracy_pooled"
"""Accuracy over all test examples, as in the paper."""
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


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Runs of one method on one data set under the same seeds, plain and upcycled."""

    dataset: str
    method: str
    plain: list[RunDirectory]
    upcycled: list[RunDirectory]

    @property
    def gains(self) -> list[float]:
        """Upcycled minus plain, seed by seed, in percentage points."""
        return [100 * gain for gain in differences(self.upcycled, self.plain, ACCURACY)]

    @property
    def mean(self) -> float:
        """Mean gain."""
        return statistics.mean(self.gains)

    @property
    def error(self) -> float:
        """Standard error of the mean gain; infinite under one seed."""
        error = standard_error(self.gains)
        return math.inf if math.isnan(error) else error


def accuracies(experiment: Experiment, scale: Scale, straggler_ratio: float) -> None:
    """Search, run every pair under every seed, and write tables and figures."""
    rounds = (scale.training_rounds, 2 * scale.training_rounds)
    name = f"stragglers-{straggler_ratio:g}"
    settings = {
        f"{name}/{dataset}-{method}": table_config(dataset, method, straggler_ratio)
        for dataset in scale.datasets
        for method in scale.methods
    }
    best = search(
        experiment,
        settings,
        rounds=(scale.search_rounds, 2 * scale.search_rounds),
        learning_rates=scale.learning_rates,
        coefficients=scale.coefficients,
        jointly=scale.joint_search,
        metric=ACCURACY,
        parameters=PARAMETERS if scale.method_parameters else {},
    )
    cases = {
        f"{pair}-{upcycled:d}": {**settings[pair], **in_rounds(best[pair][upcycled], length)}
        for upcycled, length in enumerate(rounds)
        for pair in settings
    }
    groups = experiment.grouped(cases, scale.seeds, f"accuracies, {name}")
    pairs = [
        Pair(
            dataset=str(chosen["dataset"]),
            method=str(chosen["method"]),
            plain=groups[f"{pair}-0"],
            upcycled=groups[f"{pair}-1"],
        )
        for pair, chosen in settings.items()
    ]
    folder = experiment.folder / name
    for dataset in scale.datasets:
        dataset_pairs = [pair for pair in pairs if pair.dataset == dataset]
        # Plain methods come first: the figures' upcycled lines are dashed by their order.
        runs = [run for pair in dataset_pairs for run in pair.plain]
        runs += [run for pair in dataset_pairs for run in pair.upcycled]
        scored = [run for run in runs if run.client_metrics()]  # none where training diverged
        title = f"{dataset}, {straggler_ratio:.0%} stragglers"
        write_comparison(scored, folder / dataset, title=title)
    draw(folder / "differences.svg", pairs)
    if scale.joint_search:  # else upcycled methods ran at one learning rate alone
        searched = experiment.folder / "runs" / "search" / name
        store_rows(f"upcycled-fl-by-rate-{straggler_ratio:g}", *gains_by_rate(searched))
    title = f"# {straggler_ratio:.0%} stragglers, {rounds[0]} training rounds"
    experiment.write(name, title, *accuracy_table(pairs))


def gains_by_rate(searched: Path) -> tuple[list[str], list[list[str]]]:
    """Return what upcycling adds at each learning rate of a search, by data set.

    A cell is the mean over methods of the best upcycled accuracy minus the best plain one, in
    points, at one learning rate and under the search's seed. Runs that diverged do not count.
    """
    scores: dict[tuple[float, str, str, bool], list[float]] = {}
    for path in searched.glob("*/run.json"):
        run = RunDirectory.open(path.parent)
        score = mean_of_last_evaluations(run, ACCURACY) if run.status == "completed" else math.nan
        if math.isfinite(score):
            config = run.config
            rate, upcycled = float(config["learning-rate"]), bool(config["upcycled"])
            key = (rate, config["dataset"], config["method"], upcycled)
            scores.setdefault(key, []).append(100 * score)
    rows = []
    for rate in sorted({rate for rate, *_ in scores}):
        row = [f"{rate:g}"]
        for dataset in SYNTHETIC:
            both = [
                tuple(scores.get((rate, dataset, method, up), []) for up in (False, True))
                for method in METHODS
            ]
            added = [max(after) - max(before) for before, after in both if before and after]
            row.append(f"{statistics.mean(added):+.2f}" if added else "–")
        rows.append(row)
    return ["learning rate", *(name.removeprefix("synthetic-") for name in SYNTHETIC)], rows


def accuracy_table(pairs: Sequence[Pair]) -> tuple[str, str]:
    """Return the table, and the number of pairs that improve."""
    rows = []
    for pair in pairs:
        paper_text, ratio = "–", float(str(pair.plain[0].config["straggler-ratio"]))
        if pair.dataset in SYNTHETIC and ratio in PAPER:
            before, after = PAPER[ratio][pair.method][list(SYNTHETIC).index(pair.dataset)]
            paper_text = f"{before:.2f} → {after:.2f} ({after - before:+.2f})"
        rates = (f"{runs[0].config['learning-rate']:g}" for runs in (pair.plain, pair.upcycled))
        rows.append(
            (
                pair.dataset,
                METHODS[pair.method],
                *(percent(runs) for runs in (pair.plain, pair.upcycled)),
                f"{pair.mean:+.2f} ± {pair.error:.2f}",
                " → ".join(rates),
                f"{pair.upcycled[0].config['coefficient']:g}",
                paper_text,
            )
        )
    header = (
        "data",
        "method",
        "plain",
        "upcycled",
        "difference by seed (mean ± standard error)",
        "learning rate",
        "coefficient",
        "paper",
    )
    # Of equal accuracies, the difference of two means may be 1e-17.
    up = sum(round(pair.mean, 2) > 0 for pair in pairs)
    surely = sum(pair.mean > 2 * pair.error for pair in pairs)
    worse = sum(pair.mean < -2 * pair.error for pair in pairs)
    verdict = (
        f"**{up} of {len(pairs)} pairs improve**; {surely} by more than two standard errors; "
        f"{worse} are worse by more than two. Accuracy in per cent, over all test examples in the "
        f"last round; mean ± sample standard deviation over {len(pairs[0].plain)} seeds."
    )
    return table(header, rows), verdict


def percent(runs: Sequence[RunDirectory]) -> str:
    """Return accuracies in per cent, as the paper has them."""
    return mean_and_std([100 * value for value in last_values(runs, ACCURACY)], digits=2)


def draw(path: Path, pairs: Sequence[Pair]) -> None:
    """Draw each pair's difference with two standard errors, and write the numbers as CSV."""
    figure = Figure(figsize=(7.0, 0.9 + 0.2 * len(pairs)), layout="constrained")
    axes = figure.add_subplot()
    labels = [f"{pair.dataset} · {METHODS[pair.method]}" for pair in pairs]
    for number, pair in enumerate(pairs):
        colour = "#009E73" if pair.mean > 0 else "#D55E00"
        error = 2 * pair.error if math.isfinite(pair.error) else 0.0
        axes.errorbar(pair.mean, number, xerr=error, fmt="o", color=colour, markersize=4)
    axes.set_yticks(range(len(pairs)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("accuracy, upcycled minus plain, in percentage points (± 2 standard errors)")
    axes.set_title("What upcycling adds at equal work of the clients", loc="left", fontsize=11)
    figure.savefig(path)
    with path.with_suffix(".csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(("dataset", "method", "mean difference", "standard error"))
        writer.writerows((p.dataset, p.method, p.mean, p.error) for p in pairs)
