"""Figures 2 to 7 of DP-Ditto and its planner, each a function that returns a Markdown table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.ditto.closed_form import line_below
from benchmarks.ditto.experiment import (
    BEST_WEIGHT,
    METHODS,
    WORLDS,
    Experiment,
    at_the_end,
    learning_rate,
)
from benchmarks.runs import Config, over_seeds
from flower_ext.planning import DittoProblem, Outcome, alternating_search, convergence_bound
from flower_ext.privacy.theorems.dp_ditto_theorem import dp_ditto_noise_stddev
from flower_ext.runs import RunDirectory
from flower_ext.runs.comparison import mean_and_std
from flower_ext.runs.figures import Line, draw_lines
from flower_ext.runs.page import table

ACCURACY, LOSS, SPREAD = "accuracy_mean", "training_loss_mean", "training_loss_std"
WORST, JAIN = "accuracy_worst_decile", "accuracy_jain"
Runs = list[RunDirectory]


def figure_2(experiment: Experiment) -> str:
    """Draw h(T, λ) and the line below it, softmax regression, ε = 10; nothing is trained."""
    problem = DittoProblem(
        strong_convexity=1.0,
        smoothness=2.0,
        initial_gap=1.0,
        initial_distance=4.0,
        dimension=7_850,
        num_clients=20,
        learning_rate=0.005,
        personal_learning_rate=0.005,
        gradient_bound=1.0,
        model_spread=0.5,
    )
    stddev = dp_ditto_noise_stddev(
        epsilon=10.0, delta=0.01, rounds=1, num_clients=20, num_examples=3000, clipping_norm=20.0
    )
    candidates = np.arange(1, 1001)
    lines: dict[str, list[Line]] = {}
    rows = []
    for weight in (0.1, 1.0):
        bound = convergence_bound(
            problem, global_weight=weight, variance_per_round=stddev**2, basis="provable"
        )
        intercept, slope = line_below(bound)
        best = bound.best_rounds(1000)
        lines[f"h, λ = {weight:g}"] = [(candidates.tolist(), bound.after(candidates).tolist())]
        below = (intercept + slope * candidates).tolist()
        lines[f"line below, λ = {weight:g}"] = [(candidates.tolist(), below)]
        rows.append((f"{weight:g}", best, f"{float(bound.after(best)):.4f}", f"{slope:.3g}"))
    draw_lines(_folder(experiment), "figure2", "h(T, λ)", "h", lines, xlabel="T")
    return "# Figure 2\n\n" + table(("λ", "T*", "h(T*, λ)", "slope of the line"), rows)


def figure_3(experiment: Experiment) -> str:
    """Compare all methods at ε = 10."""
    return _methods(experiment, "figure3", 10.0)


def figure_4(experiment: Experiment) -> str:
    """Compare all methods at ε = 100."""
    return _methods(experiment, "figure4", 100.0)


def figure_5(experiment: Experiment) -> str:
    """Draw the training loss of personal models against T for each ε, λ = 0.1."""
    parts = ["# Figure 5"]
    for world in experiment.scale.training_worlds:
        budgets: dict[str, Config] = {
            f"ε = {e:g}": {"epsilon": e} for e in (1.0, 10.0, 20.0, 100.0)
        }
        budgets["Ditto"] = {"method": "ditto"}
        changes = {
            (label, T): {**WORLDS[world], **budget, "global-weight": 0.1, **_length(T)}
            for label, budget in budgets.items()
            for T in experiment.scale.rounds
        }
        runs = _runs(experiment, changes, f"Figure 5, {world}")
        parts.append(_against_rounds(experiment, f"figure5-{world}", runs, (LOSS, SPREAD)))
    return "\n\n".join(parts)


def figure_6(experiment: Experiment) -> str:
    """Draw accuracy and fairness after each round for each λ, T = 30, ε = 10."""
    parts = ["# Figure 6"]
    for world in experiment.scale.worlds:
        changes: dict[str, Config] = {
            f"λ = {weight:g}": {
                **WORLDS[world],
                "epsilon": 10.0,
                "global-weight": weight,
                "rounds": 30,
                "evaluate-every": 3,
            }
            for weight in (0.0, 0.1, 0.5, 1.0, 2.0)
        }
        groups = experiment.grouped(changes, f"Figure 6, {world}")
        for metric in (ACCURACY, SPREAD):
            lines = {
                label: [run.series(metric) for run in found] for label, found in groups.items()
            }
            draw_lines(
                _folder(experiment),
                f"figure6-{world}-{metric}",
                f"{metric}, {world}",
                metric,
                lines,
            )
        rows = [_row(label, found) for label, found in groups.items()]
        parts += [f"{world}, T = 30, ε = 10", table(_HEADER, rows)]
    return "\n\n".join(parts)


def figure_7(experiment: Experiment) -> str:
    """Draw fairness against λ and training loss against T, ε = 100, C = 10; search both."""
    weights, every = (0.0, 0.1, 0.5, 1.0, 2.0), experiment.scale.planned_rounds
    changes = {
        (f"λ = {weight:g}", T): {
            **WORLDS["mnist-dnn"],
            "epsilon": 100.0,
            "clipping-norm": 10.0,
            "global-weight": weight,
            **_length(T),
        }
        for weight in weights
        for T in every
    }
    runs = _runs(experiment, changes, "Figure 7")
    text = _against_rounds(experiment, "figure7", runs, (LOSS, SPREAD))
    by_weight: dict[str, list[Line]] = {}
    for T in every:
        found = [over_seeds(runs[f"λ = {weight:g}"][T], SPREAD) for weight in weights]
        by_weight[f"T = {T}"] = [(weights, values) for values in zip(*found, strict=True)]
    title = "Standard deviation of training losses"
    draw_lines(_folder(experiment), "figure7-weights", title, "fairness", by_weight, xlabel="λ")

    def outcome(T: int, weight: float) -> Outcome:
        found = experiment.run([changes[f"λ = {weight:g}", T]], f"T = {T}, λ = {weight:g}")
        loss, spread = (float(np.mean(over_seeds(found, name))) for name in (LOSS, SPREAD))
        return Outcome(loss=loss, unfairness=spread)

    plan = alternating_search(outcome, rounds=every, global_weights=weights, start=1.0)
    best = (
        f"(T*, λ*) = ({plan.rounds}, {plan.global_weight:g}) by turns, from {len(plan.outcomes)} "
        f"of {len(changes)} pairs, settled: {plan.settled}; the paper has (80, 0.1)."
    )
    return "\n\n".join(["# Figure 7", text, _best_weights(runs, weights, every), best])


def _best_weights(
    runs: Mapping[str, Mapping[int, Runs]], weights: Sequence[float], every: Sequence[int]
) -> str:
    """Return λ*(T) by three measures: for the mean over seeds, then for each seed."""
    measures = (("std of training loss", SPREAD, min), ("training loss", LOSS, min))
    rows = []
    for name, metric, pick in (*measures, ("accuracy", ACCURACY, max)):
        cells = []
        for T in every:
            found = [over_seeds(runs[f"λ = {weight:g}"][T], metric) for weight in weights]
            by_seed = np.array([np.mean(found, axis=1), *np.transpose(found)])
            best, *each = by_seed.argmin(axis=1) if pick is min else by_seed.argmax(axis=1)
            cells.append(f"{weights[best]:g} ({', '.join(f'{weights[w]:g}' for w in each)})")
        rows.append((name, *cells))
    return table(("λ*(T) by", *(f"T = {T}" for T in every)), rows)


def _methods(experiment: Experiment, name: str, epsilon: float) -> str:
    parts = [f"# {name.capitalize()}: ε = {epsilon:g}, λ = {BEST_WEIGHT[epsilon]:g}"]
    every = experiment.scale.rounds
    for world in experiment.scale.worlds:
        methods: dict[str, Config] = {
            label: {
                **WORLDS[world],
                "method": method,
                "epsilon": epsilon,
                "global-weight": BEST_WEIGHT[epsilon],
            }
            for method, label in METHODS.items()
        }
        rates: dict[str, float] = {}
        if experiment.scale.learning_rates:
            short = {label: {**change, **_length(every[0])} for label, change in methods.items()}
            rates = experiment.best_learning_rates(short, f"{name}, {world}")
            methods = {
                label: {**change, **learning_rate(rates[label])}
                for label, change in methods.items()
            }
        changes = {
            (label, T): {**change, **_length(T)} for label, change in methods.items() for T in every
        }
        runs = _runs(experiment, changes, f"{name}, {world}")
        parts.append(_against_rounds(experiment, f"{name}-{world}", runs, (ACCURACY, SPREAD)))
        if rates:
            found = ", ".join(f"{label} {rate:g}" for label, rate in rates.items())
            parts.append(
                f"Learning rates: of {len(experiment.scale.learning_rates)} for each method, the "
                f"one with the best accuracy after {every[0]} rounds under another seed: {found}."
            )
    return "\n\n".join(parts)


def planner(experiment: Experiment) -> str:
    """Compare T* of Theorem 1, after a pilot run, with a sweep: softmax regression, full steps."""
    rows = []
    every = (1, 5, 20, 80)
    for epsilon, weight in ((10.0, 0.1), (100.0, 0.1)):
        base: Config = {
            **WORLDS["mnist-mlr"],
            "examples-per-client": 300,
            "epsilon": epsilon,
            "global-weight": weight,
            "batch-size": 0,
            **learning_rate(0.1),
        }
        stars = [
            ", ".join(map(str, experiment.planned_rounds(base, basis, every[-1])))
            for basis in ("published", "provable")
        ]
        sweep = {(f"ε = {epsilon:g}", T): {**base, **_length(T)} for T in every}
        (found,) = _runs(experiment, sweep, f"planner, ε = {epsilon:g}").values()
        for name, metric, pick in (("training loss", LOSS, min), ("accuracy", ACCURACY, max)):
            means = {T: float(np.mean(over_seeds(found[T], metric))) for T in every}
            best = pick(every, key=lambda T: means[T])
            cells = (f"{means[T]:.4f}" for T in every)
            rows.append((f"{epsilon:g}", f"{weight:g}", *stars, name, best, *cells))
    bounds = ("T*, bound as published", "T*, bound corrected")
    header = ("ε", "λ", *bounds, "by", "best T", *(f"T = {T}" for T in every))
    return f"# Planner against a sweep\n\n{table(header, rows)}"


def provable(experiment: Experiment) -> str:
    """Compare DP-Ditto with noise in its steps, at a provable ε of 10, with Ditto without privacy.

    At λ = 0 every client trains alone, so its model does not depend on anything shared.
    """
    on_mnist: Config = {"examples-per-client": 1000, "batch-size": 32, "delta": 1e-5, **_length(10)}
    worlds: dict[str, Config] = {
        "digits": {"examples-per-client": 75, "batch-size": 16, "delta": 1e-4, **_length(30)},
        "MNIST": WORLDS["mnist-dnn"] | on_mnist,
        "Fashion-MNIST": WORLDS["fashion-mnist-dnn"] | on_mnist,
    }
    methods: dict[str, Config] = {
        "ditto": {},
        "dp-ditto": {"epsilon": 10.0, "noise": "steps", "calibration": "provable"},
    }
    cases = [*product(worlds, ("pathological", "iid"), (0.0, 0.1, 0.5))]
    changes: list[Config] = [
        {
            **worlds[world],
            **private,
            **learning_rate(0.1),
            "partition": partition,
            "global-weight": weight,
            "method": method,
        }
        for world, partition, weight in cases
        for method, private in methods.items()
    ]
    runs = iter(experiment.run(changes, "DP-Ditto, provable"))
    rows = []
    for world, partition, weight in cases:
        row = [world, "two" if partition == "pathological" else "all", f"{weight:g}"]
        for _ in methods:
            last = [next(runs).metrics()[-1] for _ in experiment.scale.seeds]
            row += [mean_and_std([line[metric] for line in last]) for metric in (ACCURACY, WORST)]
        rows.append(row)
    header = ("data", "classes a client", "λ", "no privacy", "worst tenth", "ε = 10", "worst tenth")
    return "# DP-Ditto at a provable ε\n\n" + table(header, rows)


def _runs(
    experiment: Experiment, changes: Mapping[tuple[str, int], Config], title: str
) -> dict[str, dict[int, Runs]]:
    """Return the runs over seeds, by label and T."""
    names = {f"{label}, T = {T}": (label, T) for label, T in changes}
    groups = experiment.grouped(dict(zip(names, changes.values(), strict=True)), title)
    found: dict[str, dict[int, Runs]] = {}
    for name, members in groups.items():
        label, T = names[name]
        found.setdefault(label, {})[T] = members
    return found


def _against_rounds(
    experiment: Experiment,
    name: str,
    runs: Mapping[str, Mapping[int, Runs]],
    metrics: Sequence[str],
) -> str:
    """Draw a figure of each metric against T, and return one table."""
    for metric in metrics:
        lines = {label: at_the_end(by_rounds, metric) for label, by_rounds in runs.items()}
        draw_lines(
            _folder(experiment), f"{name}-{metric}", f"{metric}, {name}", metric, lines, xlabel="T"
        )
    rows = [
        _row(f"{label}, T = {T}", found)
        for label, by_rounds in runs.items()
        for T, found in by_rounds.items()
    ]
    return f"{name}\n\n{table(_HEADER, rows)}"


_HEADER = ("", "accuracy", "worst tenth", "Jain", "training loss", "std of training loss")


def _row(label: str, runs: Sequence[RunDirectory]) -> tuple[str, ...]:
    numbers = (mean_and_std(over_seeds(runs, m)) for m in (ACCURACY, WORST, JAIN))
    losses = (mean_and_std(over_seeds(runs, m), digits=4) for m in (LOSS, SPREAD))
    return (label, *numbers, *losses)


def _length(rounds: int) -> Config:
    return {"rounds": rounds, "evaluate-every": rounds}


def _folder(experiment: Experiment) -> Path:
    return experiment.folder / "figures"


FIGURES: dict[str, Callable[[Experiment], str]] = {
    "2": figure_2,
    "3": figure_3,
    "4": figure_4,
    "5": figure_5,
    "6": figure_6,
    "7": figure_7,
    "planner": planner,
    "provable": provable,
}
