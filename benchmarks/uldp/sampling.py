"""Figure 10: utility and ε with sampled users."""

from dataclasses import replace

from benchmarks.report.rows import rows_of
from benchmarks.report.tables.uldp import sampling_table
from benchmarks.runs import Config, Experiment
from benchmarks.uldp.experiment import (
    Problem,
    Scale,
    choose,
    method_settings,
    problem_settings,
    settings_text,
)
from benchmarks.uldp.problems import CREDITCARD, MNIST

LABEL = "ULDP-AVG-w"


def sampling_rates(experiment: Experiment, scale: Scale) -> str:
    """Run ULDP-AVG-w on Creditcard at five rates; with ``--full`` also on MNIST at four."""
    parts = []
    if "creditcard" in scale.datasets:
        parts.append(_panel(experiment, scale, CREDITCARD, (0.1, 0.3, 0.5, 0.7, 1.0)))
    if scale.full and "mnist" in scale.datasets:
        many = replace(MNIST, users=10_000)
        parts.append(_panel(experiment, scale, many, (0.1, 0.3, 0.5, 1.0)))
    return "\n\n".join(["# Figure 10: sampled users", *parts])


def _panel(experiment: Experiment, scale: Scale, problem: Problem, rates: tuple[float, ...]) -> str:
    chosen = choose(experiment, scale, problem, [LABEL])[LABEL]
    fixed = {
        **problem_settings(problem, scale.length(problem)),
        **method_settings(problem, LABEL),
        **chosen,
    }
    # At full scale Figure 4 has the runs of all 1,000 users.
    shared = scale.full and problem.dataset == "creditcard"
    cases: dict[str, Config] = {
        f"figure-4/{problem.name}-{LABEL}"
        if shared and rate == 1
        else f"figure-10/{problem.name}-{rate:g}": {**fixed, "user-sampling-rate": rate}
        for rate in rates
    }
    runs_of = experiment.grouped(cases, range(1, scale.seeds + 1), "sampled users").values()
    groups = dict(zip(rates, runs_of, strict=True))
    figures = []
    for series, ylabel in (("loss_pooled", "loss"), ("epsilon_provable", "ε, provable")):
        lines = {
            f"q = {rate:g}": [run.metrics().series(series) for run in runs]
            for rate, runs in groups.items()
        }
        name, title = f"figure-10-{problem.dataset}-{series}", f"{ylabel}, {problem.dataset}"
        figures.append(experiment.draw(name, title, ylabel, lines))
    notes = (
        f"{problem.dataset}, {problem.users:,} users, {problem.distribution}; "
        f"{scale.length(problem)} rounds, {scale.seeds} seeds; {settings_text(chosen)}; ε against "
        "released models."
    )
    return "\n\n".join([sampling_table(rows_of("uldp-fl", *groups.values())), notes, *figures])
