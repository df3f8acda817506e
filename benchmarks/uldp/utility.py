"""Figures 4 to 7: utility and ε by round, for every method on four data sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.runs import APPS, Experiment, differences, last_value, last_values, mean_and_error
from benchmarks.uldp.experiment import (
    FIGURES,
    METHODS,
    NOISE_MULTIPLIER,
    Problem,
    Scale,
    choose,
    run_methods,
    search_text,
    settings_text,
)
from flower_ext.data import Examples
from flower_ext.federation.engines.run_app import load_app
from flower_ext.metrics import average_precision, roc_auc
from flower_ext.privacy import epsilon_text
from flower_ext.runs import RunDirectory
from flower_ext.runs.comparison import mean_and_std
from flower_ext.runs.page import table
from flower_ext.training.models import build

load_app(APPS / "uldp-fl")
silos = import_module("uldp_fl_app.silos")
CREDITCARD = Problem(
    dataset="creditcard",
    metric="accuracy_pooled",
    records=23_600,
    silos=5,
    users=1000,
    rounds=15,
    search_rounds=15,
    epochs=2,
)
MNIST = Problem(
    dataset="mnist",
    metric="accuracy_pooled",
    records=60_000,
    silos=5,
    users=100,
    rounds=6,
    search_rounds=2,
    epochs=1,
)
HEART_DISEASE = Problem(
    dataset="heart-disease",
    metric="accuracy_pooled",
    records=486,
    silos=4,
    users=50,
    learning_rates=(0.01, 0.05, 0.2, 0.8),
    search_seeds=2,
    rounds=15,
    search_rounds=15,
    epochs=5,
)
TCGA_BRCA = replace(
    HEART_DISEASE,
    dataset="tcga-brca",
    metric="concordance_mean",
    records=866,
    silos=6,
    learning_rates=(0.001, 0.003),
)
TCGA_BRCA_SCALED = replace(TCGA_BRCA, dataset="tcga-brca-scaled", learning_rates=(0.05, 0.2))
"""Age in decades: see ``tcga_brca`` in the app's ``tables.py``."""
RARE_CLASS = ("balanced accuracy", "ROC-AUC", "average precision")
"""Metrics if nearly all records are of one class. A constant score gives 0.5, 0.5 and its share."""
PROBLEMS = {4: (CREDITCARD,), 5: (MNIST,), 6: (HEART_DISEASE,), 7: (TCGA_BRCA, TCGA_BRCA_SCALED)}


def utility(problems: Sequence[Problem]) -> Callable[[Experiment, Scale], str]:
    """Return a function that draws a figure of data sets, with one or all of the paper's panels."""

    def draw(experiment: Experiment, scale: Scale) -> str:
        panels = [
            panel
            for problem in problems
            if problem.dataset in scale.datasets
            for panel in (_all_panels(problem) if scale.all_panels else [problem])
        ]
        return "\n\n".join(_panel(experiment, scale, panel) for panel in panels)

    return draw


def all_panels(problems: Sequence[Problem]) -> list[Problem]:
    """Return the paper's panels of a figure."""
    return [panel for problem in problems for panel in _all_panels(problem)]


def _all_panels(problem: Problem) -> list[Problem]:
    users = {"creditcard": (100, 1000), "mnist": (100, 10_000)}.get(problem.dataset, (50, 200))
    labels = (0, 2) if problem.dataset == "mnist" else (0,)
    return [
        replace(problem, users=count, distribution=distribution, labels_per_user=most)
        for count in users
        for distribution in ("uniform", "zipf")
        for most in labels
        if distribution == "zipf" or most == 0
    ]


def _panel(experiment: Experiment, scale: Scale, problem: Problem) -> str:
    number = FIGURES[problem.dataset]
    missing = {label: why for label in METHODS if (why := _why_not(problem, label))}
    labels = [label for label in METHODS if label not in missing and label in scale.methods]
    chosen = choose(experiment, scale, problem, labels)
    runs = run_methods(experiment, scale, problem, chosen, f"figure-{number}")
    figures = _draw(experiment, f"figure-{number}-{problem.name}", problem, runs)
    metric = problem.metric.partition("_")[0]
    unbalanced = problem.dataset == "creditcard"
    header = ("method", metric, *(RARE_CLASS if unbalanced else ()), "loss")
    header += ("ε provable", "ε published", "settings")
    rows: list[Sequence[object]] = []
    for label in METHODS:
        if label not in scale.methods:
            continue
        if label in missing:
            rows.append((label, missing[label], *[""] * (len(header) - 2)))
            continue
        members = runs[label]
        rows.append(
            (
                label,
                mean_and_std(last_values(members, problem.metric)),
                *(_rare_class_over_seeds(members) if unbalanced else ()),
                mean_and_std(last_values(members, "loss_pooled")),
                *(_epsilon(members, basis) for basis in ("provable", "published")),
                settings_text(chosen[label]),
            )
        )
    title = (
        f"# Figure {number}: {problem.dataset}, {problem.users} users, {problem.silos} silos, "
        f"{problem.distribution}"
    )
    title += f", {problem.labels_per_user} labels a user" if problem.labels_per_user else ""
    epochs = "the scripts' epochs" if scale.full else f"{problem.epochs} local epochs"
    notes = (
        f"{scale.length(problem)} rounds, {epochs}, {scale.seeds} seeds; σ = "
        f"{NOISE_MULTIPLIER:g}, δ = 1e-5, C = 0.1; ε is the largest over seeds. Provable is "
        "against released models for SGD and AVG, against a server that sees each upload for "
        f"NAIVE and GROUP. {search_text(scale, problem)}"
    )
    weighted, equal = runs.get("ULDP-AVG-w"), runs.get("ULDP-AVG")
    notes += "".join(
        f" AVG-w − AVG by seed, mean and standard error: {name} "
        f"{mean_and_error(differences(weighted, equal, series))}."
        for name, series in ((metric, problem.metric), ("loss", "loss_pooled"))
        if weighted and equal
    )
    return "\n\n".join([title, table(header, rows), notes, *figures])


def _why_not(problem: Problem, label: str) -> str:
    """Return the reason why a method does not run; empty if it runs."""
    if problem.dataset.startswith("tcga-brca") and "GROUP" in label:
        return "refused: Cox's loss compares patients, so no gradient is one patient's"
    return ""


def rare_class(run: RunDirectory) -> dict[str, float]:
    """Return `RARE_CLASS` of the last model on all silos' test records."""
    config = run.config
    test = _test_examples(str(config["dataset"]), str(config["data-folder"]), int(config["seed"]))
    model = build(silos.describe_silos(str(config["dataset"])).model, num_classes=2)
    model.load_state_dict(load_file(run.path / "model.safetensors"))
    model.eval()
    with torch.no_grad():
        outputs = model(test.features)
    right = outputs.argmax(1) == test.targets
    recalls = [float(right[test.targets == label].double().mean()) for label in (0, 1)]
    scores = (
        sum(recalls) / 2,
        roc_auc(outputs, test.targets),
        average_precision(outputs, test.targets),
    )
    return dict(zip(RARE_CLASS, scores, strict=True))


def _rare_class_over_seeds(runs: Sequence[RunDirectory]) -> list[str]:
    scores = [rare_class(run) for run in runs]
    return [mean_and_std([score[name] for score in scores]) for name in RARE_CLASS]


@cache
def _test_examples(dataset: str, folder: str, seed: int) -> Examples:
    tests = [
        silo.test for silo in silos.load_silos(dataset, Path(folder) if folder else None, seed=seed)
    ]
    return Examples(
        torch.cat([test.features for test in tests]), torch.cat([test.targets for test in tests])
    )


def _epsilon(runs: Sequence[RunDirectory], basis: str) -> str:
    values = [
        last_value(run, f"epsilon_{basis}")
        for run in runs
        if run.metrics().series(f"epsilon_{basis}")[0]
    ]
    return epsilon_text(max(values)) if values else "none"


def _draw(
    experiment: Experiment, name: str, problem: Problem, runs: dict[str, list[RunDirectory]]
) -> list[str]:
    """Draw utility, loss and both ε against rounds."""
    metric = problem.metric.partition("_")[0]
    figures = []
    for series, ylabel, log in (
        (problem.metric, metric, False),
        ("loss_pooled", "loss", True),
        ("epsilon_provable", "ε, provable", True),
        ("epsilon_published", "ε, as published", True),
    ):
        lines = {label: [run.metrics().series(series) for run in runs[label]] for label in runs}
        measured = {label: lines[label] for label in runs if all(x for x, _ in lines[label])}
        title = f"{ylabel}, {problem.dataset}, {problem.distribution}"
        figures.append(experiment.draw(f"{name}-{series}", title, ylabel, measured, log=log))
    return figures
