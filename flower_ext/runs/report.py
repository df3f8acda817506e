"""The report of a run: ``report.md``, and ``report.html`` with the figures inside.

The report begins with the results: the quality of the clients' models and the proved ε. Figures
follow, then the details of each guarantee: first the provable guarantees, then the papers' claims.
If the run charges an account that several runs share, one part of the report covers all these runs.

This module computes the values that the templates ``report.md.jinja`` and ``study.md.jinja`` show.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf, isinf
from pathlib import Path
from typing import Any

from flower_ext.errors import InvalidValue
from flower_ext.metrics import summarize
from flower_ext.metrics.reported import is_loss, reported_by_few
from flower_ext.privacy import (
    AdversaryView,
    Budget,
    Guarantee,
    Ledger,
    Release,
    epsilon_text,
    privacy_loss_of,
)
from flower_ext.privacy.account_entries import CHARGE, COMMIT, DISCARD, REPEAT, RESERVE
from flower_ext.privacy.study_composition import (
    RunSpend,
    spent_by_run,
    study_guarantees,
    total_spent,
)
from flower_ext.privacy.theorems.assumptions import NOT_PROVIDED
from flower_ext.privacy.units import BY_KNOWLEDGE
from flower_ext.runs.directory import Rounds, RunDirectory
from flower_ext.runs.figures import draw_figures, in_words, qualities
from flower_ext.runs.page import Markup, to_markdown, write_page

_RUN_COLUMNS = ("run", "method", "rounds", "δ", *(f"ε: {view.value}" for view in BY_KNOWLEDGE))
"""Header of the table of runs. A row has the ε of one run, in a column for each adversary view."""


def write_report(run: RunDirectory) -> Path:
    """Write ``report.md`` and ``report.html`` into the run directory; return the HTML's path."""
    rounds, config = run.metrics(), run.config
    method, on = config.get("method", "Run"), config.get("dataset")
    account, study = Path(str(config.get("budget-ledger") or "")), None
    if account.is_file():  # read now, so that the last run's report covers all runs
        study = _account_values(account, config["population-epsilon"], config["population-delta"])
    return write_page(
        run.path,
        "report",
        title=f"{method} on {on}" if on is not None else str(method),
        run=run,
        rounds=rounds,
        figures=draw_figures(run, run.path / "figures"),
        missing=[
            (
                *(row["round"], row["kind"], ", ".join(map(str, row["partitions"]))),
                "; ".join(text.strip().splitlines()[-1][:200] for text in row["refusals"]),
            )
            for row in run.missing()
        ],
        **_score_values(rounds, run.client_metrics()),
        **_privacy_values(run, rounds),
        study=study,
    )


def _score_values(rounds: Rounds, clients: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    noised = rounds.noised_scores()
    by_name = {
        in_words(name): scores
        for name in qualities(rounds, clients)
        if (scores := [row[name] for row in clients if name in row])
    }
    evaluated = rounds.series("evaluation_messages")[0]
    scored = [number for number, _, _ in noised.values()] or evaluated
    return {
        "num_clients": len(clients),
        "spreads": {
            name: summarize(scores, lower_is_better=is_loss(name))
            for name, scores in by_name.items()
        },
        "counts": {name: len(scores) for name, scores in by_name.items()},
        "noised": noised,
        "in_words": in_words,
        "is_loss": is_loss,
        "few": list(reported_by_few(clients).items())[:10],
        "scored_round": scored[-1] if scored and scored[-1] != rounds.last else None,
    }


def _privacy_values(run: RunDirectory, rounds: Rounds) -> dict[str, Any]:
    guarantees = sorted(run.guarantees(), key=lambda each: each.basis == "published")
    proved = [each for each in guarantees if each.basis == "provable" and each.epsilon < inf]
    entries = run.ledger()
    with_epsilon = (row for row in rounds if any(n.startswith("epsilon_") for n in row))
    return {
        "num_training_rounds": sum(row.get("messages", 0) > 0 for row in rounds),
        "guarantees": guarantees,
        "proved": proved,
        "only_if": _only_if,
        "lines": [_line(each) for each in guarantees],
        "accounted_round": max((row["round"] for row in with_epsilon), default=0),
        "spent_beyond": _spent_beyond(entries, guarantees),
        "entries": entries,
        "ledger_counts": _ledger_counts(entries),
    }


def account_text(path: Path, epsilon: float | None = None, delta: float | None = None) -> str:
    """Return the report on all runs of an account as Markdown (see `_account_values`)."""
    return to_markdown("study", only_if=_only_if, study=_account_values(path, epsilon, delta))


def _only_if(guarantee: Guarantee) -> str:
    lacking = [a.partition(",")[0] for a in guarantee.assumptions if NOT_PROVIDED in a]
    return f" (only with {' and '.join(lacking)}, {NOT_PROVIDED})" if lacking else ""


def _line(guarantee: Guarantee) -> tuple[str, ...]:
    failed = sum(not condition.holds for condition in guarantee.conditions)
    conditions = Markup(f"**✗ {failed} not met**") if failed else "✓ all met"
    return (
        Markup(f"**{epsilon_text(guarantee.epsilon)}**"),
        f"{guarantee.delta:.3g}",
        guarantee.basis,
        guarantee.unit.value,
        guarantee.relation.value,
        guarantee.view.value,
        guarantee.accountant,
        conditions if guarantee.conditions else "see assumptions",
    )


def _spent_beyond(entries: list[dict[str, Any]], guarantees: list[Guarantee]) -> float | None:
    """Return the ε of all releases in the ledger if the guarantee states a smaller ε; else None.

    The guarantee is the provable one against an adversary who sees released models.
    """
    releases = Counter(
        Release.from_dict(entry["release"]) for entry in entries if entry["kind"] == RESERVE
    )
    for guarantee in guarantees:
        against_models = guarantee.view is AdversaryView.RELEASED_MODELS
        if guarantee.basis == "provable" and against_models and releases:
            spent = privacy_loss_of(releases, delta=guarantee.delta).epsilon
            # Two computations of one ε may differ in their last digits.
            return spent if spent > guarantee.epsilon * (1 + 1e-6) else None
    return None


def _ledger_counts(entries: list[dict[str, Any]]) -> tuple[int, ...]:
    """Return how many releases were reserved, committed, discarded, left open and topped up.

    A release is left open if its round neither committed nor discarded it. It is topped up if the
    server added the noise that lost clients did not add.
    """
    kinds = [entry["kind"] for entry in entries]
    left_open = sum(
        kind in (RESERVE, REPEAT) and following in (RESERVE, "nothing")
        for kind, following in pairwise([*kinds, "nothing"])
    )
    topped_up = sum(entry.get("notes", {}).get("topped_up_stddev", 0) > 0 for entry in entries)
    counts = (kinds.count(kind) for kind in (RESERVE, COMMIT, DISCARD))
    return (*counts, left_open, topped_up)


def _run_row(run: RunSpend) -> tuple[str, ...]:
    """Return one run's row in the table of runs, under the header `_RUN_COLUMNS`."""
    if run.epsilon is None or run.delta is None:
        return run.label, run.method, "–", "–", "not covered", *["–"] * (len(BY_KNOWLEDGE) - 1)
    epsilons = {**run.epsilons, AdversaryView.RELEASED_MODELS: run.epsilon}
    shown = (epsilon_text(epsilons[view]) if view in epsilons else "–" for view in BY_KNOWLEDGE)
    return run.label, run.method, str(run.rounds), f"{run.delta:.3g}", *shown


def _account_values(path: Path, epsilon: float | None, delta: float | None) -> dict[str, Any]:
    """Return the values that the template ``study.md.jinja`` shows about all runs of an account.

    Where ``epsilon`` or ``delta`` is None, the last charge to the account gives the number.
    """
    entries = Ledger.read(path)
    if any(entry["kind"] == RESERVE for entry in entries):
        raise InvalidValue(
            f"path={path} is the ledger of one run: expected an account that runs share; to see "
            "one run, use flower-ext report"
        )
    runs = spent_by_run(entries)
    values: dict[str, Any] = {
        "name": path.name,
        "guarantees": [],
        "lines": [],
        "columns": _RUN_COLUMNS,
        "runs": [_run_row(each) for each in runs],
        "disclosures": [f"{each.what} ({each.label})" for each in runs if each.epsilon is None],
    }
    if charges := [entry for entry in entries if entry["kind"] == CHARGE]:
        budget = dict(charges[-1]["budget"])
        budget |= {} if epsilon is None else {"epsilon": epsilon}
        budget |= {} if delta is None else {"delta": delta}
        Budget(**budget)  # refuses numbers out of range
        spent = total_spent(entries, budget["delta"])
        guarantees = study_guarantees(entries, budget["delta"], study=path.name)
        values |= {
            "budget": budget,
            "left": max(0.0, budget["epsilon"] - spent),
            "is_infinite": isinf(spent),
            "guarantees": guarantees,
            "lines": [_line(each) for each in guarantees],
        }
    return values
