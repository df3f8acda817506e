"""Figure 8: gain of weights by records over equal ones, by number of silos and distribution."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.runs import Experiment, differences, last_values
from benchmarks.uldp.experiment import Problem, Scale, choose, run_methods, search_text
from benchmarks.uldp.problems import CREDITCARD
from flower_ext.runs.comparison import mean_and_std
from flower_ext.runs.page import table

LABELS = ("ULDP-AVG", "ULDP-AVG-w")
SILOS = (5, 20, 50)


def weighting(experiment: Experiment, scale: Scale) -> str:
    """Return a table of ULDP-AVG against ULDP-AVG-w on Creditcard with 1,000 users."""
    (settings,) = choose(experiment, scale, CREDITCARD, LABELS[:1]).values()
    rows = []
    figures = []
    for distribution in ("uniform", "zipf"):
        for silos in SILOS:
            problem = replace(CREDITCARD, silos=silos, distribution=distribution)
            # The normaliser is 1/(|U||S|). A server rate in proportion to |S| cancels |S|.
            rate = float(settings["server-learning-rate"]) * silos / CREDITCARD.silos
            grown = settings if scale.full else {**settings, "server-learning-rate": rate}
            chosen = dict.fromkeys(LABELS, grown)
            # At full scale the runs with 5 silos are Figure 4's.
            shared = scale.full and silos == CREDITCARD.silos
            place = "figure-4" if shared else f"figure-8/{silos}-silos"
            runs = run_methods(experiment, scale, problem, chosen, place)
            losses = {label: last_values(runs[label], "loss_pooled") for label in LABELS}
            gaps = differences(runs["ULDP-AVG"], runs["ULDP-AVG-w"], "loss_pooled")
            rows.append(
                (
                    distribution,
                    silos,
                    *(mean_and_std(values, digits=4) for values in losses.values()),
                    mean_and_std(gaps, digits=4),
                )
            )
            name = f"figure-8-{distribution}-{silos}"
            title = f"Loss, {distribution}, {silos} silos"
            lines = {
                label: [run.metrics().series("loss_pooled") for run in runs[label]]
                for label in LABELS
            }
            figures.append(experiment.draw(name, title, "loss", lines))
    header = ("records", "silos", *(f"loss, {label}" for label in LABELS), "AVG − AVG-w, by seed")
    notes = (
        f"Test loss after {scale.length(CREDITCARD)} rounds, {scale.seeds} seeds, "
        f"{CREDITCARD.users:,} users. {_rates(scale, CREDITCARD)}"
    )
    return "\n\n".join(["# Figure 8: weighting", table(header, rows), notes, *figures])


def _rates(scale: Scale, problem: Problem) -> str:
    if scale.full:
        return search_text(scale, problem)
    return "The settings of Figure 4's ULDP-AVG, for both, η_g in proportion to |S|."
