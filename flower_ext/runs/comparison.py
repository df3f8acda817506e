"""Comparison of several runs: one row per method, with its mean over seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flower_ext.metrics import Spread, summarize
from flower_ext.privacy import AdversaryView, Guarantee, epsilon_text
from flower_ext.runs.directory import NotARun, Rounds, RunDirectory
from flower_ext.runs.figures import Chart, Line, cumulative, draw_lines
from flower_ext.runs.page import write_page
from flower_ext.runs.settings import INCIDENTAL


@dataclass(frozen=True, kw_only=True)
class _MeasuredRun:
    """The parts of a run that a comparison needs."""

    settings: Mapping[str, Any]
    """The run's configuration, with the completed rounds in place of the planned ones."""
    method: str
    rounds: Rounds
    guarantees: Sequence[Guarantee]
    accuracy: float
    noise_error: float
    spread: Spread | None
    """None after a secure evaluation, which releases a mean and its error, but no single score."""


def _measured(run: RunDirectory) -> _MeasuredRun:
    """Return the parts of a run; refuse a run that has not ended or that lacks accuracy."""
    rounds, clients, settings = run.metrics(), run.client_metrics(), run.config
    spread, score = None, rounds.noised_scores().get("accuracy")
    if score is None and not all("accuracy" in row for row in clients or [{}]):
        raise NotARun(
            f"{run.path} lacks the accuracy of its clients (clients.csv), so there is nothing "
            "to compare; name a run that evaluated its clients"
        )
    if run.status not in ("completed", "budget-exhausted"):
        raise NotARun(
            f"run {run.path} is {run.status}: expected a run that has ended; leave it out, or "
            "resume it"
        )
    if score is None:
        spread = summarize([row["accuracy"] for row in clients])
        score = (int(rounds.last), spread.mean, 0.0)
    _, accuracy, noise_error = score
    method = str(settings.get("method", run.path.name))
    if "rounds" in settings:
        settings["rounds"] = int(rounds.last)
    return _MeasuredRun(
        settings=settings,
        method=f"{method}, upcycled" if settings.get("upcycled") else method,
        rounds=rounds,
        guarantees=run.guarantees(),
        accuracy=accuracy,
        noise_error=noise_error,
        spread=spread,
    )


def write_comparison(runs: Sequence[RunDirectory], folder: Path, *, title: str) -> Path:
    """Write ``comparison.md`` and ``.html``: a table, and figures against rounds and messages.

    Runs with the same settings except for the seed are repetitions and share one row. A run that
    is named twice counts once. A run without accuracy, or that has not ended, is refused as
    `NotARun`. The function returns the path of the HTML page.
    """
    # A run that counted twice would make the deviation over runs too small.
    runs = [*{run.path.resolve(): run for run in runs}.values()]
    measured = [_measured(run) for run in runs]
    groups = _grouped(measured)
    folder.mkdir(parents=True, exist_ok=True)
    first = next(iter(groups.values()))
    rows = [_row(name, members, first) for name, members in groups.items()]
    columns = [name for name in rows[0] if any(row[name] != "–" for row in rows)]
    return write_page(
        folder,
        "comparison",
        title=title,
        columns=columns,
        rows=[[row[name] for name in columns] for row in rows],
        runs=measured,
        stopped=[run.path.name for run in runs if run.status == "budget-exhausted"],
        figures=_figures(groups, folder / "figures"),
    )


NOT_COMPARED = INCIDENTAL | {"seed", "planned-rounds", "clients-per-node"}
"""Settings in which repetitions may differ."""


def _grouped(runs: Sequence[_MeasuredRun]) -> dict[str, list[_MeasuredRun]]:
    """Return groups of runs that differ only in `NOT_COMPARED`.

    A group's label consists of the method, and of the settings in which the method's runs differ.
    """
    groups: dict[str, list[_MeasuredRun]] = {}
    for run in runs:
        others = [other.settings for other in runs if other.method == run.method]
        names = dict.fromkeys(name for config in others for name in config)
        changes = [
            # The first sentence about the data suffices to tell them apart.
            f"{name}={str(run.settings.get(name, '–')).partition('. ')[0]}"
            for name in names
            if name not in NOT_COMPARED
            and any(config.get(name) != others[0].get(name) for config in others)
        ]
        groups.setdefault(", ".join([run.method, *changes]), []).append(run)
    return groups


def _row(
    name: str, runs: Sequence[_MeasuredRun], first: Sequence[_MeasuredRun]
) -> dict[str, object]:
    """Return a row of the table; ``first`` are the runs of the table's first row."""
    spreads = [run.spread for run in runs if run.spread is not None]
    noise_error = sum(run.noise_error**2 for run in runs) ** 0.5 / len(runs)
    by_noise = f" (± {noise_error:.2g} by noise)" if noise_error else ""

    def mean(*names: str) -> float:
        return sum(run.rounds.total(*names) for run in runs) / len(runs)

    return {
        "method": name,
        "runs": len(runs),
        "accuracy": mean_and_error([run.accuracy for run in runs]) + by_noise,
        "difference to the first row": "–" if runs is first else _paired_difference(runs, first),
        "ε provable": _epsilon(runs, "provable"),
        "ε published": _epsilon(runs, "published"),
        "worst tenth": mean_and_error([s.worst_decile for s in spreads]),
        "std over clients": mean_and_error([s.std for s in spreads]),
        "messages": f"{mean('messages'):.0f}",
        "MB": f"{mean('bytes_down', 'bytes_up') / 1e6:.2f}",
        "seconds": f"{mean('training_seconds'):.1f}",
    }


def _figures(groups: Mapping[str, Sequence[_MeasuredRun]], folder: Path) -> dict[str, Path]:
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


def _paired_difference(runs: Sequence[_MeasuredRun], first: Sequence[_MeasuredRun]) -> str:
    """Return the mean difference in accuracy between runs of the same seed; "–" if there are none.

    A seed of 0 stands for secret draws, which no two runs share.
    """
    accuracies = {run.settings.get("seed"): run.accuracy for run in first}
    differences = [
        run.accuracy - accuracies[seed]
        for run in runs
        if (seed := run.settings.get("seed")) and seed in accuracies
    ]
    seeds = f" ({len(differences)} seed{'s' if len(differences) > 1 else ''})"
    return mean_and_error(differences, sign="+") + seeds if differences else "–"


def mean_and_error(values: Sequence[float], *, sign: str = "") -> str:
    """Return ``mean ± standard error``; just the mean of one value, and "–" without values."""
    if not values:
        return "–"
    mean = f"{np.mean(values):{sign}.3f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {np.std(values, ddof=1) / len(values) ** 0.5:.3f}"


def _epsilon(runs: Sequence[_MeasuredRun], basis: str) -> str:
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
