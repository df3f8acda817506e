"""Tables 1 and 3: accuracy, plain against upcycled, for equal work of the clients."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.runs import Config, Experiment
from benchmarks.upcycled.experiment import (
    DEVICES,
    METHODS,
    SYNTHETIC,
    Scale,
    choice_name,
    in_rounds,
    method_config,
    search,
)
from flower_ext.runs import RunDirectory, write_comparison
from flower_ext.runs.comparison import mean_and_std
from flower_ext.runs.page import table

PAPER = {  # Table 1: plain and upcycled accuracy in per cent on the four synthetic sets
    "fedavg": ((98.06, 98.83), (79.28, 81.46), (81.58, 82.89), (80.40, 81.49)),
    "fedavgm": ((98.43, 98.72), (80.29, 81.74), (82.60, 83.13), (80.59, 81.37)),
    "fedprox": ((96.52, 97.62), (80.72, 80.88), (81.99, 83.10), (81.19, 81.94)),
    "scaffold": ((97.51, 98.68), (80.26, 81.10), (82.44, 82.64), (74.91, 76.14)),
    "feddyn": ((97.00, 98.32), (81.62, 82.41), (80.64, 82.89), (77.27, 80.03)),
    "pfedme": ((96.30, 96.77), (89.15, 89.08), (89.43, 89.55), (93.06, 93.12)),
    "fedyogi": ((99.30, 99.41), (81.20, 81.65), (79.49, 80.84), (78.95, 80.17)),
}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One method on one data set: accuracies over the same seeds, plain and upcycled."""

    dataset: str
    method: str
    plain: list[float]
    upcycled: list[float]
    learning_rates: tuple[float, ...]
    coefficient: float

    @property
    def differences(self) -> list[float]:
        """Upcycled minus plain, seed by seed."""
        return [b - a for a, b in zip(self.plain, self.upcycled, strict=True)]

    @property
    def mean(self) -> float:
        """Mean difference."""
        return statistics.mean(self.differences)

    @property
    def error(self) -> float:
        """Standard error of the mean difference."""
        if len(self.differences) < 2:
            return math.inf
        return statistics.stdev(self.differences) / math.sqrt(len(self.differences))


def accuracies(experiment: Experiment, scale: Scale, straggler_ratio: float) -> str:
    """Search, run every pair under every seed, write tables and figures; return the summary."""
    rounds = (scale.training_rounds, 2 * scale.training_rounds)
    name = f"stragglers-{straggler_ratio:g}"
    pairs: dict[str, Config] = {
        f"{name}/{dataset}-{method}": {
            "dataset": dataset,
            **method_config(method),
            "straggler-ratio": straggler_ratio,
            "clients": DEVICES[dataset],
        }
        for dataset in scale.datasets
        for method in METHODS
    }
    best = search(
        experiment,
        pairs,
        rounds=(scale.search_rounds, 2 * scale.search_rounds),
        learning_rates=scale.learning_rates,
        coefficients=scale.coefficients,
        jointly=scale.joint_search,
        metric="accuracy_pooled",
    )
    keys = [(pair, up, seed) for pair in pairs for up in (False, True) for seed in scale.seeds]
    configs = [
        experiment.config(
            f"{pair}-{choice_name(choice)}-{seed}", pairs[pair], choice, {"seed": seed}
        )
        for pair, up, seed in keys
        for choice in [in_rounds(best[pair][up], rounds[up])]
    ]
    runs = dict(zip(keys, experiment.run(configs, f"accuracies, {name}"), strict=True))
    measured = [
        Pair(
            dataset=str(facts["dataset"]),
            method=str(facts["method"]),
            plain=[accuracy(runs[pair, False, seed]) for seed in scale.seeds],
            upcycled=[accuracy(runs[pair, True, seed]) for seed in scale.seeds],
            learning_rates=tuple(float(best[pair][up]["learning-rate"]) for up in (False, True)),
            coefficient=float(best[pair][True]["coefficient"]),
        )
        for pair, facts in pairs.items()
    ]
    folder = experiment.folder / name
    folder.mkdir(parents=True, exist_ok=True)
    for dataset in scale.datasets:  # plain methods first: the figures' upcycled lines are dashed
        own = [
            runs[pair, up, seed]
            for up in (False, True)
            for pair, facts in pairs.items()
            if facts["dataset"] == dataset
            for seed in scale.seeds
            if runs[pair, up, seed].client_metrics()  # none where training diverged
        ]
        write_comparison(
            own, folder / dataset, title=f"{dataset}, {straggler_ratio:.0%} stragglers"
        )
    draw(folder / "differences.svg", measured)
    text = f"# {straggler_ratio:.0%} stragglers, {rounds[0]} training rounds\n\n" + written(
        measured
    )
    (folder / "table.md").write_text(text + "\n")
    return text


def accuracy(run: RunDirectory) -> float:
    """Return the accuracy over all test examples after the last round, in per cent (as the paper).

    It is 0 if training diverged so far that no client could be scored.
    """
    return 100 * run.series("accuracy_pooled")[1][-1]


def written(pairs: Sequence[Pair]) -> str:
    """Return the table, and the number of pairs that improve."""
    rows = []
    for pair in pairs:
        theirs = "–"
        if pair.dataset in SYNTHETIC:
            before, after = PAPER[pair.method][SYNTHETIC.index(pair.dataset)]
            theirs = f"{before:.2f} → {after:.2f} ({after - before:+.2f})"
        rows.append(
            (
                pair.dataset,
                METHODS[pair.method],
                mean_and_std(pair.plain, digits=2),
                mean_and_std(pair.upcycled, digits=2),
                f"{pair.mean:+.2f} ± {pair.error:.2f}",
                " → ".join(f"{rate:g}" for rate in pair.learning_rates),
                f"{pair.coefficient:g}",
                theirs,
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
        "paper, Table 1",
    )
    up = sum(pair.mean > 0 for pair in pairs)
    surely = sum(pair.mean > 2 * pair.error for pair in pairs)
    worse = sum(pair.mean < -2 * pair.error for pair in pairs)
    return (
        table(header, rows) + f"\n\n**{up} of {len(pairs)} pairs improve**; {surely} by more than "
        f"two standard errors; {worse} are worse by more than two. Accuracy in per cent, over all "
        "test examples in the last round; mean ± sample standard deviation over "
        f"{len(pairs[0].plain)} seeds."
    )


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
