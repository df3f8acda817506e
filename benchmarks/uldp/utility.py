"""Figures 4 to 7: utility and ε by round, for every method on four data sets."""

from collections.abc import Callable, Sequence

from benchmarks.runs import (
    Experiment,
    differences,
    last_value,
    last_values,
    mean_and_error,
    mean_and_std,
)
from benchmarks.uldp.experiment import (
    DELTA,
    FIGURE_OF,
    METHODS,
    NOISE_MULTIPLIER,
    SETTINGS,
    Problem,
    Scale,
    choose,
    run_methods,
    search_text,
    settings_text,
)
from benchmarks.uldp.problems import panels_of
from benchmarks.uldp.rare_class import RARE_CLASS, rare_class_cells
from flower_ext.privacy import epsilon_text
from flower_ext.runs import RunDirectory
from flower_ext.runs.page import table


def utility(problems: Sequence[Problem]) -> Callable[[Experiment, Scale], str]:
    """Return a function that draws a figure of data sets, with one or all of the paper's panels."""

    def draw(experiment: Experiment, scale: Scale) -> str:
        panels = [
            panel
            for problem in problems
            if problem.dataset in scale.datasets
            for panel in (panels_of(problem) if scale.all_panels else [problem])
        ]
        return "\n\n".join(_panel(experiment, scale, panel) for panel in panels)

    return draw


def _panel(experiment: Experiment, scale: Scale, problem: Problem) -> str:
    number = FIGURE_OF[problem.dataset]
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
                *(rare_class_cells(members) if unbalanced else ()),
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
        f"{NOISE_MULTIPLIER:g}, δ = {DELTA:g}, C = {SETTINGS['clipping-norm']}; ε is the largest "
        "over seeds. Provable is against released models for SGD and AVG, against a server that "
        f"sees each upload for NAIVE and GROUP. {search_text(scale, problem)}"
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
