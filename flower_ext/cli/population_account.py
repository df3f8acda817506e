"""``flower-ext ledger``: show the ε that one population has spent in all its runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from flower_ext.cli.screen import console, titled_table
from flower_ext.errors import InvalidValue
from flower_ext.privacy import Ledger, epsilon_text
from flower_ext.privacy.study_composition import spent_by_run, study_guarantees, total_spent
from flower_ext.runs.study import RUN_COLUMNS, run_row


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
    if any(entry["kind"] == "reserve" for entry in entries):
        raise InvalidValue(
            f"path={path}: expected an account that runs share; this is the ledger of one run, "
            "which flower-ext report shows"
        )
    runs = spent_by_run(entries)
    table = titled_table(f"Runs on {path.name}", RUN_COLUMNS)
    for run in runs:
        table.add_row(*run_row(run))
    console.print(table)
    for run in runs:
        if run.epsilon is None:
            console.print(f"Not covered by any ε: {run.what} ({run.label})", soft_wrap=True)
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
        f"{last['relation']}, against the released models; budget {budget:g}, left "
        f"{max(0.0, budget - spent):.4g}",
        soft_wrap=True,
    )
    if math.isinf(spent):
        console.print(
            "ε is infinite, because the plans differ in kind and the sum of their δ's exceeds this "
            "δ: give a larger --delta."
        )
    for guarantee in study_guarantees(entries, at, study=path.name):
        console.print(
            f"ε = {epsilon_text(guarantee.epsilon)} against an adversary who sees "
            f"{guarantee.view.sees}, under {guarantee.relation.value} ({guarantee.accountant}; "
            f"{guarantee.source})",
            soft_wrap=True,
        )
    console.print(
        "These ε assume that the plan of every run was fixed in advance. The report of each run of "
        "the study has all assumptions.",
        soft_wrap=True,
    )
