"""Figure 10: utility and ε with sampled users."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.runs import Experiment, last, over_seeds
from benchmarks.uldp.experiment import (
    Problem,
    Scale,
    choose,
    of_method,
    of_problem,
    settings_text,
)
from benchmarks.uldp.utility import CREDITCARD, MNIST
from flower_ext.privacy import epsilon_text
from flower_ext.runs import RunDirectory
from flower_ext.runs.comparison import mean_and_std
from flower_ext.runs.figures import draw_lines
from flower_ext.runs.page import table

LABEL = "ULDP-AVG-w"
BASES = ("provable", "published")


def sampling_rates(experiment: Experiment, scale: Scale) -> str:
    """Run ULDP-AVG-w on Creditcard at five rates; with ``--full`` also on MNIST at four."""
    parts = [_panel(experiment, scale, CREDITCARD, (0.1, 0.3, 0.5, 0.7, 1.0))]
    if scale.full:
        many = replace(MNIST, users=10_000, averaging_rate=100.0)
        parts.append(_panel(experiment, scale, many, (0.1, 0.3, 0.5, 1.0)))
    return "\n\n".join(["# Figure 10: sampled users", *parts])


def _panel(experiment: Experiment, scale: Scale, problem: Problem, rates: tuple[float, ...]) -> str:
    chosen = choose(experiment, scale, problem, [LABEL])[LABEL]
    keys = [(rate, seed) for rate in rates for seed in range(1, scale.seeds + 1)]
    configs = [
        experiment.config(
            f"figure-10/{problem.name}-{rate:g}-{seed}",
            of_problem(problem, scale.length(problem)),
            of_method(problem, LABEL),
            chosen,
            {"seed": seed, "user-sampling-rate": rate},
        )
        for rate, seed in keys
    ]
    groups: dict[float, list[RunDirectory]] = {}
    for (rate, _), run in zip(keys, experiment.run(configs, "sampled users"), strict=True):
        groups.setdefault(rate, []).append(run)
    rows = [
        (
            f"{rate:g}",
            mean_and_std(over_seeds(runs, problem.metric)),
            mean_and_std(over_seeds(runs, "loss_pooled")),
            *(epsilon_text(last(runs[0], f"epsilon_{basis}")) for basis in BASES),
        )
        for rate, runs in groups.items()
    ]
    figures = []
    for series, ylabel in (("loss_pooled", "loss"), ("epsilon_provable", "ε, provable")):
        lines = {
            f"q = {rate:g}": [run.series(series) for run in runs] for rate, runs in groups.items()
        }
        name, title = f"figure-10-{problem.dataset}-{series}", f"{ylabel}, {problem.dataset}"
        path = draw_lines(experiment.folder / "figures", name, title, ylabel, lines)
        figures.append(f"![{title}](figures/{path.name})")
    header = ("q", problem.metric.partition("_")[0], "loss", "ε provable", "ε published")
    notes = (
        f"{problem.dataset}, {problem.users:,} users, {problem.distribution}; "
        f"{scale.length(problem)} rounds, {scale.seeds} seeds; {settings_text(chosen)}; ε against "
        "released models."
    )
    return "\n\n".join([table(header, rows), notes, *figures])
