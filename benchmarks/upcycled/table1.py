"""Tables 1 and 3: accuracy, plain against upcycled, for equal work of the clients."""

import math
import statistics
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.report.rows import rows_of, store_rows
from benchmarks.report.tables.upcycled import Gains, accuracy_gains, accuracy_table
from benchmarks.runs import Experiment, standard_error
from benchmarks.upcycled.experiment import (
    ACCURACY,
    METHODS,
    PARAMETERS,
    SYNTHETIC,
    Scale,
    in_rounds,
    mean_of_last_evaluations,
    search,
    table_config,
)
from flower_ext.files import write_rows
from flower_ext.runs import RunDirectory, write_comparison


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
    rows = rows_of("upcycled-fl", *groups.values())
    folder = experiment.folder / name
    for dataset in scale.datasets:
        # Plain methods come first: the figures' upcycled lines are dashed by their order.
        runs = [run for case in cases if cases[case]["dataset"] == dataset for run in groups[case]]
        scored = [run for run in runs if run.client_metrics()]  # none where training diverged
        title = f"{dataset}, {straggler_ratio:.0%} stragglers"
        write_comparison(scored, folder / dataset, title=title)
    draw(folder / "differences.svg", accuracy_gains(rows))
    if scale.joint_search:  # else upcycled methods ran at one learning rate alone
        searched = experiment.folder / "runs" / "search" / name
        file = f"upcycled-fl-by-rate-{straggler_ratio:g}"
        store_rows(file, *gains_by_rate(searched), folder=experiment.folder)
    title = f"# {straggler_ratio:.0%} stragglers, {rounds[0]} training rounds"
    experiment.write(name, title, accuracy_table(rows, straggler_ratio))


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


def draw(path: Path, gained: Gains) -> None:
    """Draw each pair's gain with two standard errors, and write the numbers as CSV."""
    rows = [
        (dataset, METHODS[method], statistics.mean(added), standard_error(added))
        for (dataset, method), (_, added) in gained.items()
    ]
    figure = Figure(figsize=(7.0, 0.9 + 0.2 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for number, (*_, mean, error) in enumerate(rows):
        colour = "#009E73" if mean > 0 else "#D55E00"
        axes.errorbar(mean, number, xerr=2 * error, fmt="o", color=colour, markersize=4)
    labels = [f"{dataset} · {method}" for dataset, method, *_ in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("accuracy, upcycled minus plain, in percentage points (± 2 standard errors)")
    axes.set_title("What upcycling adds at equal work of the clients", loc="left", fontsize=11)
    figure.savefig(path)
    header = ("dataset", "method", "mean difference", "standard error")
    write_rows(path.with_suffix(".csv"), header, rows)
