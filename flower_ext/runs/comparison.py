"""Comparison of several runs: one row per method, with its mean over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from flower_ext.metrics import summarize
from flower_ext.privacy import AdversaryView, Guarantee, epsilon_text
from flower_ext.runs.directory import NotARun, RunDirectory
from flower_ext.runs.figures import Chart, Line, cumulative, draw_lines
from flower_ext.runs.page import write_page
from flower_ext.runs.settings import INCIDENTAL


class _Measured:
    """The parts of a run that a comparison needs; each file is read once."""

    def __init__(self, run: RunDirectory) -> None:
        self.path, self.status, self.config = run.path, run.status, run.config
        self.rounds, self.clients = run.metrics(), run.client_metrics()
        self.guarantees = run.guarantees()
        # Completed rounds count, not planned ones.
        made = {"rounds": int(self.rounds.last)} if "rounds" in self.config else {}
        self.settings = {**self.config, **made}
        method = str(self.config.get("method", self.path.name))
        self.method = f"{method}, upcycled" if self.config.get("upcycled") else method
        # A secure evaluation released a mean and its error, and no client's score.
        self.noised: tuple[float, float] | None = None
        scores = self.rounds.noised_scores()
        if scores is not None and "accuracy" in scores.means:
            self.noised = scores.means["accuracy"], scores.errors["accuracy"]


def write_comparison(runs: Sequence[RunDirectory], folder: Path, *, title: str) -> Path:
    """Write ``comparison.md`` and ``.html``: a table, and figures against rounds and messages.

    Runs with the same settings except for the seed are repetitions and share one row. A run that
    is named twice counts once. A run without accuracy, or that has not ended, is refused as
    `NotARun`. The function returns the path of the HTML page.
    """
    # A run that counted twice would make the deviation over runs too small.
    measured = [_Measured(run) for run in {run.path.resolve(): run for run in runs}.values()]
    for run in measured:
        accurate = all("accuracy" in row for row in run.clients or [{}])
        if not accurate and run.noised is None:
            raise NotARun(
                f"{run.path} lacks the accuracy of its clients (clients.csv), so there is nothing "
                "to compare; name a run that evaluated its clients"
            )
        if run.status not in ("completed", "budget-exhausted"):
            raise NotARun(
                f"run {run.path} is {run.status}: expected a run that has ended; leave it out, or "
                f"resume it"
            )
    groups = _grouped(measured)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [_row(name, members) for name, members in groups.items()]
    return write_page(
        folder,
        "comparison",
        title=title,
        columns=list(rows[0]),
        rows=[list(row.values()) for row in rows],
        sources=sorted(
            {str(source) for run in measured if (source := run.config.get("data-source"))}
        ),
        has_noised_scores=any(run.noised is not None for run in measured),
        stopped_early=[run.path.name for run in measured if run.status == "budget-exhausted"],
        figures=_figures(groups, folder / "figures"),
    )


NOT_COMPARED = INCIDENTAL | {"seed", "planned-rounds", "clients-per-node"}
"""Settings in which repetitions may differ."""


def _grouped(runs: Sequence[_Measured]) -> dict[str, list[_Measured]]:
    """Return groups of runs that differ only in `NOT_COMPARED`.

    A group's label consists of the method, and of the settings in which the method's runs differ.
    """
    groups: dict[str, list[_Measured]] = {}
    for run in runs:
        others = [other.settings for other in runs if other.method == run.method]
        names = dict.fromkeys(name for config in others for name in config)
        changes = [
            f"{name}={run.settings.get(name, '–')}"
            for name in names
            if name not in NOT_COMPARED
            and any(config.get(name) != others[0].get(name) for config in others)
        ]
        groups.setdefault(", ".join([run.method, *changes]), []).append(run)
    return groups


def _row(name: str, runs: Sequence[_Measured]) -> dict[str, object]:
    noised = [scores for run in runs if (scores := run.noised) is not None]
    spreads = [
        summarize([row["accuracy"] for row in run.clients]) for run in runs if run.noised is None
    ]
    accuracy = mean_and_std([*(s.mean for s in spreads), *(mean for mean, _ in noised)])
    if noised:
        error = sum(error**2 for _, error in noised) ** 0.5 / len(runs)
        accuracy += f" (± {error:.2g} by noise)"

    def mean(*names: str) -> float:
        return sum(run.rounds.total(*names) for run in runs) / len(runs)

    return {
        "method": name,
        "runs": len(runs),
        "accuracy": accuracy,
        "ε provable": _epsilon(runs, "provable"),
        "ε published": _epsilon(runs, "published"),
        "worst tenth": "–" if noised else mean_and_std([s.worst_decile for s in spreads]),
        "std over clients": "–" if noised else mean_and_std([s.std for s in spreads]),
        "messages": f"{mean('messages'):.0f}",
        "MB": f"{mean('bytes_down', 'bytes_up') / 1e6:.2f}",
        "seconds": f"{mean('training_seconds'):.1f}",
    }


def _figures(groups: Mapping[str, Sequence[_Measured]], folder: Path) -> dict[str, Path]:
    """Draw each figure for which the runs have measurements; return the paths by title."""

    def lines(name: str) -> dict[str, list[Line]]:
        """Return the metric ``name`` of each group whose runs all have it."""
        series: dict[str, list[Line]] = {
            group: [run.rounds.series(name) for run in runs] for group, runs in groups.items()
        }
        return {group: lines for group, lines in series.items() if all(x for x, _ in lines)}

    def sums(name: str, scale: float = 1.0) -> dict[str, list[Line]]:
        return {
            g: [cumulative(x, scale=scale) for x in series] for g, series in lines(name).items()
        }

    accuracy, messages = lines("accuracy_mean"), sums("messages")
    charts = {
        name: Chart(title=title, ylabel=ylabel, lines=measured, labels=list(groups))
        for name, title, ylabel, measured in (
            ("accuracy", "Mean accuracy of the clients' models", "accuracy", accuracy),
            ("loss", "Mean loss of the clients' models", "loss", lines("loss_mean")),
            ("messages", "Training messages", "messages, cumulative", messages),
            ("upload", "Arrays uploaded", "megabytes, cumulative", sums("bytes_up", 1e-6)),
            ("time", "Training time", "seconds, cumulative", sums("training_seconds")),
            ("epsilon", "Privacy spent, provable", "ε", lines("epsilon_provable")),
            ("epsilon_published", "Privacy spent, as published", "ε", lines("epsilon_published")),
        )
        if measured
    }
    if len(messages) == len(groups):
        charts["accuracy_by_messages"] = Chart(
            title="Mean accuracy for the messages it took",
            xlabel="training messages",
            ylabel="accuracy",
            lines=accuracy,
            against=messages,
            labels=list(groups),
        )
    return {chart.title: draw_lines(folder, name, chart) for name, chart in charts.items()}


def mean_and_std(values: Sequence[float], *, digits: int = 3) -> str:
    """Return ``mean ± sample standard deviation``, or just the value if there is only one."""
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {np.std(values, ddof=1):.{digits}f}"


def _epsilon(runs: Sequence[_Measured], basis: str) -> str:
    """Return the largest ε among the runs as text, with its unit, its view and the runs' δ.

    The text is "none" if a run has no guarantee of this ``basis``. If a run has guarantees against
    an adversary that sees released models, this function ignores the run's other guarantees.
    """
    largest: list[Guarantee] = []
    for run in runs:
        guarantees = [g for g in run.guarantees if g.basis == basis]
        against_models = [g for g in guarantees if g.view is AdversaryView.RELEASED_MODELS]
        if not guarantees:
            return "none"
        largest.append(max(against_models or guarantees, key=lambda g: g.epsilon))
    worst = max(largest, key=lambda g: g.epsilon)
    deltas = ", ".join(f"{delta:.3g}" for delta in sorted({g.delta for g in largest}))
    return f"{epsilon_text(worst.epsilon)} ({worst.unit.value}, {worst.view.value}, δ = {deltas})"
