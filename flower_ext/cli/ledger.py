"""``flower-ext ledger``: what the people of one population have spent, and what is left."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from flower_ext.cli.screen import console, titled_table
from flower_ext.errors import InvalidValue
from flower_ext.privacy import Ledger
from flower_ext.privacy.shared_ledger import RunSpend, spent_by_run, total_spent

_COLUMNS = ("run", "method", "rounds", "ε alone", "δ")


def ledger(
    path: Annotated[Path, typer.Argument(help="An account that runs share: Budget(ledger=...).")],
    epsilon: Annotated[
        float | None, typer.Option(min=0, help="Budget; by default the last run's.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="At which all is added up; by default the last run's.")
    ] = None,
) -> None:
    """Show what a population has spent in all its runs, what is left, and what no ε covers.

    Example: flower-ext ledger hospital.jsonl
    """
    entries = Ledger.read(path)
    charges = [entry for entry in entries if entry["kind"] == "charge"]
    if any("run" not in entry for entry in entries):
        raise InvalidValue(f"{path} is the ledger of one run, whose report shows it")
    runs = spent_by_run(entries)
    table = titled_table(f"Runs on {path.name}", _COLUMNS)
    for run in runs:
        table.add_row(*_row(run))
    console.print(table)
    for run in runs:
        if run.epsilon is None:
            console.print(
                f"Not covered by any ε: {run.what} ({run.name or run.run[:8]})", soft_wrap=True
            )
    if not charges:
        console.print("No round with noise was charged.")
        return
    last = charges[-1]
    budget = last["budget"]["epsilon"] if epsilon is None else epsilon
    at = last["budget"]["delta"] if delta is None else delta
    if not 0 < at < 1:
        raise typer.BadParameter(f"delta={at!r}: expected a number in (0, 1)")
    spent = total_spent(entries, at)
    console.print(
        f"Total: ε = {spent:.4g} at δ = {at:.3g}, of one {last['unit']} under {last['relation']}; "
        f"budget {budget:g}, left {max(0.0, budget - spent):.4g}",
        soft_wrap=True,
    )
    if math.isinf(spent):
        console.print("Plans of several kinds add their δ's up: ask with a larger --delta.")
    console.print(
        "Rounds are composed as if every run's plan had been fixed beforehand. ε is that of "
        "released models, where plans draw who takes part in secret.",
        soft_wrap=True,
    )


def _row(run: RunSpend) -> tuple[str, str, str, str, str]:
    name = run.name or run.run[:8]
    if run.epsilon is None or run.delta is None:
        return name, run.method, "–", "not covered", "–"
    return name, run.method, str(run.rounds), f"{run.epsilon:.4g}", f"{run.delta:.3g}"
