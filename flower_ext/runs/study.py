"""The part of a report about the whole study: all runs that share the run's account."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flower_ext.privacy import AdversaryView, Ledger, epsilon_text
from flower_ext.privacy.study_composition import (
    RunSpend,
    spent_by_run,
    study_guarantees,
    total_spent,
)
from flower_ext.runs.directory import RunDirectory

_VIEWS = {
    AdversaryView.RELEASED_MODELS: "released models",
    AdversaryView.MODELS_AND_COHORTS: "and cohorts",
    AdversaryView.SUM_ONLY: "sums",
    AdversaryView.EACH_UPLOAD: "each upload",
}
RUN_COLUMNS = ("run", "method", "rounds", "δ", *(f"ε: {words}" for words in _VIEWS.values()))
"""Header of a table of the runs, each with ε of the run alone, by what the adversary sees."""


def run_row(run: RunSpend) -> tuple[str, ...]:
    """Return the row of a run under `RUN_COLUMNS`."""
    if run.epsilon is None or run.delta is None:
        return run.label, run.method, "–", "–", "not covered", *["–"] * (len(_VIEWS) - 1)
    epsilons = {**run.epsilons, AdversaryView.RELEASED_MODELS: run.epsilon}
    shown = (epsilon_text(epsilons[view]) if view in epsilons else "–" for view in _VIEWS)
    return run.label, run.method, str(run.rounds), f"{run.delta:.3g}", *shown


def study_values(run: RunDirectory) -> dict[str, Any] | None:
    """Return what the report's template says about the study; None if the run is in no account.

    The setting ``budget-ledger`` names the account. The function reads it as it is now, so the
    report of the last run covers all runs.
    """
    path = Path(str(run.config.get("budget-ledger") or ""))
    if not path.is_file():
        return None
    entries = Ledger.read(path)
    budget = {"epsilon": run.config["population-epsilon"], "delta": run.config["population-delta"]}
    runs = spent_by_run(entries)
    spent = total_spent(entries, budget["delta"])
    return {
        "name": path.name,
        "budget": budget,
        "left": max(0.0, budget["epsilon"] - spent),
        "guarantees": study_guarantees(entries, budget["delta"], study=path.name),
        "columns": RUN_COLUMNS,
        "runs": [run_row(each) for each in runs],
        "uncovered": [f"{each.what} ({each.label})" for each in runs if each.epsilon is None],
    }
