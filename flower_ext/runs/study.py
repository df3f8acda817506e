"""The part of a report about the whole study: all runs that share the run's account."""

from __future__ import annotations

from math import isinf
from pathlib import Path
from typing import Any

from flower_ext.checks import require_delta
from flower_ext.errors import InvalidValue
from flower_ext.privacy import AdversaryView, Ledger, epsilon_text
from flower_ext.privacy.study_composition import (
    CHARGE,
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
_RUN_COLUMNS = ("run", "method", "rounds", "δ", *(f"ε: {words}" for words in _VIEWS.values()))
"""Header of the table of runs: a row has ε of one run alone, with one column per adversary view."""


def _run_row(run: RunSpend) -> tuple[str, ...]:
    """Return the row of a run under `_RUN_COLUMNS`."""
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
    path, config = Path(str(run.config.get("budget-ledger") or "")), run.config
    if not path.is_file():
        return None
    return account_values(path, config["population-epsilon"], config["population-delta"])


def account_values(
    path: Path, epsilon: float | None = None, delta: float | None = None
) -> dict[str, Any]:
    """Return what the template ``study.md.jinja`` says about all runs of an account.

    Parameters
    ----------
    path : Path
    epsilon, delta : float, optional
        The budget; by default that of the last charge.

    Raises
    ------
    InvalidValue
        The file is the ledger of one run, or the δ is not in (0, 1).
    LedgerCorrupt
        The hash chain is broken; the message names the file and the line.
    """
    entries = Ledger.read(path)
    if any(entry["kind"] == "reserve" for entry in entries):
        raise InvalidValue(
            f"path={path}: expected an account that runs share; this is the ledger of one run, "
            "which flower-ext report shows"
        )
    given = {"epsilon": epsilon, "delta": delta}
    chosen = {name: value for name, value in given.items() if value is not None}
    runs = spent_by_run(entries)
    values: dict[str, Any] = {
        "name": path.name,
        "guarantees": [],
        "columns": _RUN_COLUMNS,
        "runs": [_run_row(each) for each in runs],
        "uncovered": [f"{each.what} ({each.label})" for each in runs if each.epsilon is None],
    }
    if charges := [entry for entry in entries if entry["kind"] == CHARGE]:
        budget = {**charges[-1]["budget"], **chosen}
        require_delta(budget["delta"])
        spent = total_spent(entries, budget["delta"])
        values |= {
            "budget": budget,
            "left": max(0.0, budget["epsilon"] - spent),
            "is_infinite": isinf(spent),
            "guarantees": study_guarantees(entries, budget["delta"], study=path.name),
        }
    return values
