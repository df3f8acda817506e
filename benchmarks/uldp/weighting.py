"""Figure 8: gain of weights by records over equal ones, by number of silos and distribution."""

from dataclasses import replace

from benchmarks.report.rows import Row, rows_of
from benchmarks.report.tables.uldp import weighting_table
from benchmarks.runs import Experiment
from benchmarks.uldp.experiment import Problem, Scale, choose, run_methods, search_text
from benchmarks.uldp.problems import CREDITCARD

LABELS = ("ULDP-AVG", "ULDP-AVG-w")
SILOS = (5, 20, 50)


def weighting(experiment: Experiment, scale: Scale) -> str:
    """Return a table of ULDP-AVG against ULDP-AVG-w on Creditcard with 1,000 users."""
    (settings,) = choose(experiment, scale, CREDITCARD, LABELS[:1]).values()
    rows: list[Row] = []
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
            rows += rows_of("uldp-fl", *runs.values())
            name = f"figure-8-{distribution}-{silos}"
            title = f"Loss, {distribution}, {silos} silos"
            lines = {
                label: [run.metrics().series("loss_pooled") for run in runs[label]]
                for label in LABELS
            }
            figures.append(experiment.draw(name, title, "loss", lines))
    notes = (
        f"Test loss after {scale.length(CREDITCARD)} rounds, {scale.seeds} seeds, "
        f"{CREDITCARD.users:,} users. {_rates(scale, CREDITCARD)}"
    )
    return "\n\n".join(["# Figure 8: weighting", weighting_table(rows), notes, *figures])


def _rates(scale: Scale, problem: Problem) -> str:
    if scale.full:
        return search_text(scale, problem)
    return "The settings of Figure 4's ULDP-AVG, for both, η_g in proportion to |S|."
