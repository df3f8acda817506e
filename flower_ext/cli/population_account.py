"""``flower-ext ledger``: show the ε that one population has spent in all its runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from flower_ext.cli.screen import console, titled_table
from flower_ext.errors import InvalidValue
from flower_ext.privacy import Ledger, epsilon_text
from flower_ext.privacy.shared_ledger import RunSpend, spent_by_run, total_spent

_COLUMNS = ("run", "method", "rounds", "ε alone", "δ")


def ledger(
    path: Annotated[
        Path, typer.Argument(help="Shared account of several runs: Budget(ledger=...).")
    ],
    epsilon: Annotated[
        float | None, typer.Option(min=0, help="Budget ε; by default that of the last run.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="δ of the total ε; by default that of the last run.")
    ] = None,
) -> None:
    """Show the ε that a population has spent in all its runs, the ε left, and what no ε covers.

    Example: flower-ext ledger hospital.jsonl
    """
    entries = Ledger.read(path)
    charges = [entry for entry in entries if entry["kind"] == "charge"]
    if any("run" not in entry for entry in entries):
        raise InvalidValue(
            f"path={path}: expected an account that runs share; this is the ledger of one run, "
            "which flower-ext report shows"
        )
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
        f"Total: ε = {epsilon_text(spent)} at δ = {at:.3g}, of one {last['unit']} under "
        f"{last['relation']}; budget {budget:g}, left {max(0.0, budget - spent):.4g}",
        soft_wrap=True,
    )
    if math.isinf(spent):
        console.print(
            "ε is infinite, because the plans differ in kind and the sum of their δ's exceeds this "
            "δ: give a larger --delta."
        )
    console.print(
        "The total assumes that the plan of every run was fixed in advance. If a plan draws its "
        "cohorts in secret, ε covers the released models only.",
        soft_wrap=True,
    )


def _row(run: RunSpend) -> tuple[str, str, str, str, str]:
    name = run.name or run.run[:8]
    if run.epsilon is None or run.delta is None:
        return name, run.method, "–", "not covered", "–"
    return name, run.method, str(run.rounds), epsilon_text(run.epsilon), f"{run.delta:.3g}"
