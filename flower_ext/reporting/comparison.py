"""Several runs side by side: one line a method, over its seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from flower_ext.evaluation import summarize
from flower_ext.privacy import AdversaryView, Guarantee
from flower_ext.reporting.figures import draw_comparison
from flower_ext.reporting.report import epsilon_text, table, to_html
from flower_ext.reporting.run import NotARun, RunDirectory


def write_comparison(runs: Sequence[RunDirectory], folder: Path, *, title: str) -> Path:
    """Write ``comparison.md`` and ``.html`` with a table and an accuracy figure.

    Runs are grouped by their configured method; within a group they are repetitions (seeds).

    Raises
    ------
    NotARun
        A run has no final evaluation to compare.
    """
    groups: dict[str, list[RunDirectory]] = {}
    for run in runs:
        if not all("accuracy" in row for row in run.client_metrics() or [{}]):
            raise NotARun(
                f"{run.path} holds no accuracy of each client (clients.csv); nothing to compare"
            )
        if run.facts["status"] not in ("completed", "budget-exhausted"):
            raise NotARun(f"{run.path} is {run.facts['status']}; only finished runs are compared")
        groups.setdefault(str(run.config.get("method", run.path.name)), []).append(run)
    rows = []
    for method, members in groups.items():
        spreads = [summarize([row["accuracy"] for row in run.client_metrics()]) for run in members]
        rows.append(
            (
                method,
                len(members),
                mean_and_std([s.mean for s in spreads]),
                mean_and_std([s.worst_decile for s in spreads]),
                mean_and_std([s.std for s in spreads]),
                _epsilon(members, "provable"),
                _epsilon(members, "published"),
            )
        )
    header = ["method", "runs", "accuracy", "worst tenth", "std over clients"]
    header += ["ε provable (released models)", "ε published"]
    folder.mkdir(parents=True, exist_ok=True)
    draw_comparison(
        folder / "figures",
        "accuracy",
        "Mean accuracy of the clients' models",
        "accuracy",
        {
            name: [run.series("accuracy_mean") for run in members]
            for name, members in groups.items()
        },
    )
    short = [run.path.name for run in runs if run.facts["status"] == "budget-exhausted"]
    text = "\n\n".join(
        [
            f"# {title}",
            table(header, rows),
            "Accuracies: mean ± sample standard deviation over runs. A run's accuracy is the mean "
            "over all clients of the accuracy of the client's own model on its own test examples.",
            *([f"Stopped early by their budget: {', '.join(short)}."] if short else []),
            "![Accuracy](figures/accuracy.svg)",
        ]
    )
    (folder / "comparison.md").write_text(text + "\n")
    path = folder / "comparison.html"
    path.write_text(to_html(text, title=title, folder=folder))
    return path


def mean_and_std(values: Sequence[float]) -> str:
    """``mean ± sample standard deviation``, or the value alone."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.3f}"
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return f"{mean:.3f} ± {deviation:.3f}"


def _epsilon(runs: Sequence[RunDirectory], basis: str) -> str:
    """The largest ε of a group and its δ; "none" if any of its runs has none."""
    largest: list[Guarantee] = []
    for run in runs:
        found = [
            g
            for g in run.guarantees()
            if g.basis == basis
            and (basis == "published" or g.view is AdversaryView.RELEASED_MODELS)
        ]
        if not found:
            return "none"
        largest.append(max(found, key=lambda g: g.epsilon))
    worst = max(largest, key=lambda g: g.epsilon)
    deltas = ", ".join(f"{delta:.3g}" for delta in sorted({g.delta for g in largest}))
    return f"{epsilon_text(worst.epsilon)} (δ = {deltas})"
