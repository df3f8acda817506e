"""Figures 2 to 7 of DP-Ditto and its planner, each a function that returns a Markdown table."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import numpy as np

from benchmarks.ditto.closed_form import line_below
from benchmarks.ditto.experiment import (
    BEST_WEIGHT,
    METHODS,
    WORLDS,
    Scale,
    length_settings,
    pilot,
    planned_rounds,
    rate_settings,
)
from benchmarks.report.rows import rows_of, store_rows
from benchmarks.report.tables.ditto import rounds_table, series_table
from benchmarks.runs import Config, Experiment, last_value, last_values, mean_and_std
from flower_ext.runs import RunDirectory
from flower_ext.runs.figures import Line
from flower_ext.runs.page import table
from flower_ext_planner.convergence import convergence_bound
from flower_ext_planner.search import Outcome, alternating_search

ACCURACY, LOSS, SPREAD = "accuracy_mean", "training_loss_mean", "training_loss_std"
WORST, JAIN = "accuracy_worst_decile", "accuracy_jain"
CURVES = dict.fromkeys((ACCURACY, LOSS, SPREAD), 3)
"""Digits that tables show of the metrics of every evaluation."""
Sweep = Mapping[str, Mapping[int, Sequence[RunDirectory]]]
"""Runs over seeds, by label and T."""


def figure_2(experiment: Experiment, scale: Scale) -> str:
    """Draw h(T, λ) and the line below it: softmax regression on MNIST, ε = 100, λ = 0.1.

    The paper does not print the constants of its losses, so they come from a pilot run. The figure
    has the paper's learning rate of 0.005 and 0.1, because the bound falls only at larger rates.
    """
    weight, most = 0.1, 1000
    candidates = np.arange(1, most + 1)
    lines: dict[str, list[Line]] = {}
    rows = []
    for rate in (0.005, 0.1):
        case: Config = {
            **WORLDS["mnist-mlr"],
            "epsilon": 100.0,
            "global-weight": weight,
            "batch-size": 0,
            **rate_settings(rate),
        }
        for seed in scale.seeds:
            problem, variance = pilot(experiment, case, seed)
            for basis in ("published", "provable"):
                bound = convergence_bound(
                    problem, global_weight=weight, variance_per_round=variance, basis=basis
                )
                best = bound.best_rounds(most)
                values = bound.after(candidates)
                shown = [f"{float(bound.after(T)):.4g}" for T in (0, 1, 80, most)]
                below = "–"
                if 0 < bound.personal_rate < 1 and 0 <= bound.global_rate < 1:
                    intercept, slope = line_below(bound)
                    line = intercept + slope * candidates
                    below = f"{float((values - line).min()):.3g}"
                    if seed == scale.seeds[0]:
                        lines[f"line, {basis}, η = {rate:g}"] = [
                            (candidates.tolist(), line.tolist())
                        ]
                if seed == scale.seeds[0]:
                    lines[f"h, {basis}, η = {rate:g}"] = [(candidates.tolist(), values.tolist())]
                rates = f"{bound.personal_rate:.5f}, {bound.global_rate:.5f}"
                rows.append((f"{rate:g}", basis, seed, rates, best, *shown, below))
    experiment.draw("figure-2", "h(T, λ)", "h", lines, xlabel="T", log=True)
    header = ["η", "bound", "seed", "ε_L, ε_G", "T*", "h(0)", "h(1)", "h(80)", f"h({most})"]
    header.append("least distance to the line")
    store_rows("dp-ditto-figure-2", header, rows, folder=experiment.folder)
    return f"# Figure 2\n\n{table(header, rows)}"


def figure_3(experiment: Experiment, scale: Scale) -> str:
    """Compare all methods at ε = 10."""
    return _methods(experiment, scale, "figure-3", 10.0)


def figure_4(experiment: Experiment, scale: Scale) -> str:
    """Compare all methods at ε = 100."""
    return _methods(experiment, scale, "figure-4", 100.0)


def figure_5(experiment: Experiment, scale: Scale) -> str:
    """Draw the training loss of personal models against T for each ε, λ = 0.1."""
    budgets: dict[str, Config] = {f"ε = {e:g}": {"epsilon": e} for e in (1.0, 10.0, 20.0, 100.0)}
    budgets["Ditto"] = {"method": "ditto"}
    parts = ["# Figure 5"]
    for world in scale.training_worlds:
        cases = {
            label: {**WORLDS[world], **budget, "global-weight": 0.1}
            for label, budget in budgets.items()
        }
        name = f"figure-5-{world}"
        sweep = _sweep(experiment, scale, name, cases, scale.rounds)
        parts.append(_against_rounds(experiment, name, sweep, (LOSS, SPREAD)))
    return "\n\n".join(parts)


def figure_6(experiment: Experiment, scale: Scale) -> str:
    """Draw accuracy and fairness after each round for each λ, T = 30, ε = 10."""
    parts = ["# Figure 6"]
    for world in scale.worlds:
        name = f"figure-6-{world}"
        cases: dict[str, Config] = {
            f"{name}/λ = {weight:g}": {
                **WORLDS[world],
                "epsilon": 10.0,
                "global-weight": weight,
                "rounds": 30,
                "evaluate-every": 3,
            }
            for weight in (0.0, 0.1, 0.5, 1.0, 2.0)
        }
        groups = {
            case.partition("/")[2]: runs
            for case, runs in experiment.grouped(cases, scale.seeds, name).items()
        }
        for metric in (ACCURACY, SPREAD):
            lines = {
                label: [run.metrics().series(metric) for run in runs]
                for label, runs in groups.items()
            }
            experiment.draw(f"{name}-{metric}", f"{metric}, {world}", metric, lines)
        rows = rows_of("dp-ditto", *groups.values())
        parts += [f"{world}, T = 30, ε = 10", series_table(rows, CURVES)]
    return "\n\n".join(parts)


def figure_7(experiment: Experiment, scale: Scale) -> str:
    """Draw fairness against λ and training loss against T, ε = 100, C = 10; search both."""
    weights, round_counts = (0.0, 0.1, 0.5, 1.0, 2.0), scale.planned_rounds
    fixed: Config = {**WORLDS["mnist-dnn"], "epsilon": 100.0, "clipping-norm": 10.0}
    cases: dict[str, Config] = {f"λ = {w:g}": {**fixed, "global-weight": w} for w in weights}
    sweep = _sweep(experiment, scale, "figure-7", cases, round_counts)
    text = _against_rounds(experiment, "figure-7", sweep, (LOSS, SPREAD))
    by_weight: dict[str, list[Line]] = {}
    for T in round_counts:
        spreads = [last_values(sweep[label][T], SPREAD) for label in cases]
        by_weight[f"T = {T}"] = [(weights, values) for values in zip(*spreads, strict=True)]
    title = "Standard deviation of training losses"
    experiment.draw("figure-7-weights", title, "fairness", by_weight, xlabel="λ")

    def outcome(T: int, weight: float) -> Outcome:
        runs = sweep[f"λ = {weight:g}"][T]
        loss, spread = (float(np.mean(last_values(runs, metric))) for metric in (LOSS, SPREAD))
        return Outcome(loss=loss, unfairness=spread)

    schedule = alternating_search(outcome, rounds=round_counts, global_weights=weights, start=1.0)
    best = (
        f"(T*, λ*) = ({schedule.rounds}, {schedule.global_weight:g}) by turns, from "
        f"{len(schedule.outcomes)} of {len(weights) * len(round_counts)} pairs, settled: "
        f"{schedule.settled}; the paper has (80, 0.1)."
    )
    return "\n\n".join(["# Figure 7", text, _best_weights(sweep, weights, round_counts), best])


def _best_weights(sweep: Sweep, weights: Sequence[float], round_counts: Sequence[int]) -> str:
    """Return λ*(T) by three measures: for the mean over seeds, then for each seed."""
    measures = (
        ("std of training loss", SPREAD, np.argmin),
        ("training loss", LOSS, np.argmin),
        ("accuracy", ACCURACY, np.argmax),
    )
    rows = []
    for name, metric, place_of_best in measures:
        cells = []
        for T in round_counts:
            values = [last_values(sweep[f"λ = {weight:g}"][T], metric) for weight in weights]
            by_seed = np.array([np.mean(values, axis=1), *np.transpose(values)])
            over_seeds, *per_seed = (weights[at] for at in place_of_best(by_seed, axis=1))
            cells.append(f"{over_seeds:g} ({', '.join(f'{weight:g}' for weight in per_seed)})")
        rows.append((name, *cells))
    return table(("λ*(T) by", *(f"T = {T}" for T in round_counts)), rows)


def _methods(experiment: Experiment, scale: Scale, name: str, epsilon: float) -> str:
    parts = [f"# {name.capitalize()}: ε = {epsilon:g}, λ = {BEST_WEIGHT[epsilon]:g}"]
    for world in scale.worlds:
        fixed: Config = {
            **WORLDS[world],
            "epsilon": epsilon,
            "global-weight": BEST_WEIGHT[epsilon],
        }
        cases: dict[str, Config] = {
            label: {**fixed, "method": method} for method, label in METHODS.items()
        }
        place = f"{name}-{world}"
        rates: dict[str, Config] = {}
        if scale.learning_rates:
            short = {
                label: {**case, **length_settings(scale.rounds[0])} for label, case in cases.items()
            }
            trials = [rate_settings(rate) for rate in scale.learning_rates]
            rates = experiment.best(
                {f"{place}/{label}": trials for label in cases},
                lambda run: last_value(run, ACCURACY),
                place,
                fixed={f"{place}/{label}": case for label, case in short.items()},
            )
        cases = {
            label: {**case, **rates.get(f"{place}/{label}", {})} for label, case in cases.items()
        }
        sweep = _sweep(experiment, scale, place, cases, scale.rounds)
        parts.append(_against_rounds(experiment, place, sweep, (ACCURACY, SPREAD)))
        if rates:
            chosen = ", ".join(
                f"{label} {case['learning-rate']:g}" for label, case in cases.items()
            )
            parts.append(
                f"Learning rates: of {len(scale.learning_rates)} for each method, the one with the "
                f"best accuracy after {scale.rounds[0]} rounds under another seed: {chosen}."
            )
    return "\n\n".join(parts)


def planner(experiment: Experiment, scale: Scale) -> str:
    """Compare T* of Theorem 1, after a pilot run, with a sweep: softmax regression, full steps."""
    rows = []
    round_counts, weight = (1, 5, 20, 80), 0.1
    for epsilon in (10.0, 100.0):
        case: Config = {
            **WORLDS["mnist-mlr"],
            "examples-per-client": 300,
            "epsilon": epsilon,
            "global-weight": weight,
            "batch-size": 0,
            **rate_settings(0.1),
        }
        stars = [
            ", ".join(
                map(str, planned_rounds(experiment, case, basis, round_counts[-1], scale.seeds))
            )
            for basis in ("published", "provable")
        ]
        label = f"ε = {epsilon:g}"
        runs = _sweep(experiment, scale, "planner", {label: case}, round_counts)[label]
        for name, metric, pick in (("training loss", LOSS, min), ("accuracy", ACCURACY, max)):
            means = {T: float(np.mean(last_values(runs[T], metric))) for T in round_counts}
            best = pick(round_counts, key=lambda T: means[T])
            cells = (f"{means[T]:.4f}" for T in round_counts)
            rows.append((f"{epsilon:g}", f"{weight:g}", *stars, name, best, *cells))
    bounds = ("T*, bound as published", "T*, bound corrected")
    header = ("ε", "λ", *bounds, "by", "best T", *(f"T = {T}" for T in round_counts))
    return f"# Planner against a sweep\n\n{table(header, rows)}"


def provable(experiment: Experiment, scale: Scale) -> str:
    """Compare DP-Ditto with noise in its steps, at a provable ε of 10, with Ditto without privacy.

    At λ = 0 every client trains alone, so its model does not depend on anything shared.
    """
    on_mnist: Config = {
        "examples-per-client": 1000,
        "batch-size": 32,
        "delta": 1e-5,
        **length_settings(10),
    }
    worlds: dict[str, Config] = {
        "digits": WORLDS["digits"] | length_settings(30),
        "MNIST": WORLDS["mnist-dnn"] | on_mnist,
        "Fashion-MNIST": WORLDS["fashion-mnist-dnn"] | on_mnist,
    }
    methods: dict[str, Config] = {
        "ditto": {"method": "ditto"},
        "dp-ditto": {
            "method": "dp-ditto",
            "epsilon": 10.0,
            "noise": "steps",
            "calibration": "provable",
        },
    }
    classes = {"two": "pathological", "all": "iid"}
    keys = [*product(worlds, classes, (0.0, 0.1, 0.5))]
    cases: dict[str, Config] = {
        f"provable/{world}-{count}-{weight:g}-{method}": {
            **worlds[world],
            **method_changes,
            **rate_settings(0.1),
            "partition": classes[count],
            "global-weight": weight,
        }
        for world, count, weight in keys
        for method, method_changes in methods.items()
    }
    groups = iter(experiment.grouped(cases, scale.seeds, "DP-Ditto, provable").values())
    rows = []
    for world, count, weight in keys:
        row = [world, count, f"{weight:g}"]
        for _ in methods:
            runs = next(groups)
            row += [mean_and_std(last_values(runs, metric)) for metric in (ACCURACY, WORST)]
        rows.append(row)
    header = ("data", "classes a client", "λ", "no privacy", "worst tenth", "ε = 10", "worst tenth")
    return "# DP-Ditto at a provable ε\n\n" + table(header, rows)


def _sweep(
    experiment: Experiment,
    scale: Scale,
    name: str,
    cases: Mapping[str, Config],
    round_counts: Sequence[int],
) -> dict[str, dict[int, list[RunDirectory]]]:
    """Run each case with every T, under every seed."""
    keys = [(label, T) for label in cases for T in round_counts]
    changes = {
        f"{name}/{label}, T = {T}": {**cases[label], **length_settings(T)} for label, T in keys
    }
    groups = experiment.grouped(changes, scale.seeds, name).values()
    sweep: dict[str, dict[int, list[RunDirectory]]] = {label: {} for label in cases}
    for (label, T), runs in zip(keys, groups, strict=True):
        sweep[label][T] = runs
    return sweep


def _against_rounds(experiment: Experiment, name: str, sweep: Sweep, metrics: Sequence[str]) -> str:
    """Draw a figure of some metrics against T, and return the tables of all."""
    for metric in metrics:
        lines: dict[str, list[Line]] = {}
        for label, by_rounds in sweep.items():
            values = [last_values(runs, metric) for runs in by_rounds.values()]
            lines[label] = [(list(by_rounds), list(line)) for line in zip(*values, strict=True)]
        experiment.draw(f"{name}-{metric}", f"{metric}, {name}", metric, lines, xlabel="T")
    rows = rows_of(
        "dp-ditto", *(runs for by_rounds in sweep.values() for runs in by_rounds.values())
    )
    return f"{name}\n\n{rounds_table(rows, CURVES | dict.fromkeys((WORST, JAIN), 3))}"


FIGURES: dict[str, Callable[[Experiment, Scale], str]] = {
    "2": figure_2,
    "3": figure_3,
    "4": figure_4,
    "5": figure_5,
    "6": figure_6,
    "7": figure_7,
    "planner": planner,
    "provable": provable,
}
