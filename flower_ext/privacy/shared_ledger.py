"""An account of the privacy that all runs of a study on one population spend together.

Statistics, trainings, their evaluations, pilots and searches share one file. Before each round, a
run writes down its spend including that round. Like a `Ledger`, the file is append-only, fsynced
and hash-chained. The run holds a lock while it reads all charges, composes them with the round and
checks the budget. `study_composition` composes the charges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flower_ext.errors import InvalidValue
from flower_ext.json_record import NOT_WRITTEN, JsonRecord
from flower_ext.privacy.accounting.events import Release
from flower_ext.privacy.guarantee import Guarantee, epsilon_text
from flower_ext.privacy.ledger import Budget, BudgetExhausted, Ledger, LedgerFile
from flower_ext.privacy.study_composition import CHARGE, CLAIMS, REPEAT, UNCOVERED, total_spent
from flower_ext.privacy.units import NeighboringRelation, PrivacyUnit


class DoesNotCompose(InvalidValue):
    """The charge differs from the account in unit or relation; no single ε covers both."""


@dataclass(frozen=True, kw_only=True)
class Charge(JsonRecord):
    """The spend of one run after one more round.

    Parameters
    ----------
    run, method : str
        The run's id, the same after each restart, and the method that it trains.
    name : str
        Name of the run directory, for people; empty without one.
    query : str
        Name of the query whose answer is released; empty for a training round.
    start : str
        Identifies the process that makes the round.
    training : int
        Number of the round within the run, or of the answer to the query, from 1.
    repeatable : bool
        A repetition of the round is the same, bit for bit, and reveals nothing new.
    unit : PrivacyUnit
    relation : NeighboringRelation
    epsilon, delta : float
        Provable spend of this run alone, including this round, against the released models.
    release : Release, optional
        The release of the round, if it alone determines what the released models show of the round.
    claims : Sequence[Guarantee]
        Provable guarantees of this run alone, including this round, against each adversary. The
        JSON of the charge leaves them out; the account has their spends.
    """

    run: str
    method: str
    name: str = ""
    query: str = ""
    start: str = ""
    training: int
    repeatable: bool = False
    unit: PrivacyUnit
    relation: NeighboringRelation
    epsilon: float
    delta: float
    release: Release | None = None
    claims: Sequence[Guarantee] = field(default=(), metadata=NOT_WRITTEN)


def charge(path: Path, new: Charge, budget: Budget) -> list[dict[str, Any]]:
    """Write a round's spend durably, before anything of the round is released.

    A round that is charged twice counts twice, because its noise is new each time. A
    ``repeatable`` round counts once.

    Returns
    -------
    list of dict
        All entries of the account, including the new one.

    Raises
    ------
    BudgetExhausted
        The account and this round together exceed ``budget``; nothing was written.
    DoesNotCompose
        The account has a different unit or relation.
    LedgerCorrupt
        The hash chain is broken; the message names the line.
    """
    line = {**_charge_to_dict(new), "budget": {"epsilon": budget.epsilon, "delta": budget.delta}}
    with closing(LedgerFile(path, wait=True)) as account:
        charges = [entry for entry in account.entries if entry["kind"] == CHARGE]
        _check_relation(path, charges, new)
        if new.repeatable and any(
            (entry["run"], entry["query"], entry["training"]) == (new.run, new.query, new.training)
            for entry in charges
        ):
            same = {"run": new.run, "query": new.query, "training": new.training}
            account.append(REPEAT, same)
            return account.entries
        # Under the lock, so that two simultaneous runs cannot both take the rest of the budget.
        _check_budget(path, account.entries, new, budget)
        account.append(CHARGE, line)
        return account.entries


def check_affordable(path: Path, new: Charge, budget: Budget) -> None:
    """Refuse a charge that `charge` would refuse now; write nothing.

    Raises
    ------
    BudgetExhausted, DoesNotCompose, LedgerCorrupt
        As `charge`.
    """
    entries = entries_of(path)
    _check_relation(path, [entry for entry in entries if entry["kind"] == CHARGE], new)
    _check_budget(path, entries, new, budget)


def entries_of(path: Path) -> list[dict[str, Any]]:
    """Return an account's verified entries; none if there is no file."""
    return Ledger.read(path) if path.exists() else []


def note_claims(path: Path, claims: Sequence[Guarantee], **identity: str) -> None:
    """Record the provable guarantees of a run so far, with their assumptions and conditions.

    A charge is written before its round, when nobody knows which clients will answer. These
    guarantees count the answers.

    Parameters
    ----------
    claims : Sequence[Guarantee]
    **identity
        ``run``, ``method``, ``name`` and ``start``, as in `Charge`.
    """
    spends = [{**_spend_to_dict(claim), "guarantee": claim.to_dict()} for claim in claims]
    _note_once(path, CLAIMS, {**identity, "claims": spends})


def note_uncovered(path: Path, *, run: str, method: str, name: str = "", what: str) -> None:
    """Record, once per run, that the run reveals something about people's data that no ε covers.

    Parameters
    ----------
    what : str
        Description in one line, such as "a pilot of 20 rounds without noise".
    """
    _note_once(path, UNCOVERED, {"run": run, "method": method, "name": name, "what": what})


def _note_once(path: Path, kind: str, line: Mapping[str, Any]) -> None:
    with closing(LedgerFile(path, wait=True)) as account:
        if not any(line.items() <= entry.items() for entry in account.entries):
            account.append(kind, line)


def _charge_to_dict(new: Charge) -> dict[str, Any]:
    return {**new.to_dict(), "claims": [_spend_to_dict(claim) for claim in new.claims]}


def _spend_to_dict(claim: Guarantee) -> dict[str, Any]:
    releases = claim.releases
    counts = None if releases is None else [[one.to_dict(), count] for one, count in releases]
    is_bounded = claim.conditions_hold and claim.epsilon < math.inf
    return {
        "view": claim.view,
        "relation": claim.relation,
        "epsilon": claim.epsilon if is_bounded else None,
        "delta": claim.delta,
        "releases": counts,
    }


def _why(charges: Sequence[dict[str, Any]], epsilon: float, delta: float) -> str:
    if not charges:
        return "the first round alone exceeds it; plan more noise"
    if math.isinf(epsilon):
        return "the account adds up each run's δ: plan runs with a smaller δ, or raise the budget's"
    runs = len({entry["run"] for entry in charges})
    return (
        f"{runs} run{'s' if runs > 1 else ''} spent {epsilon_text(total_spent(charges, delta))} "
        "so far"
    )


def _check_relation(path: Path, charges: Sequence[dict[str, Any]], new: Charge) -> None:
    for entry in charges[:1]:
        of = (entry["unit"], entry["relation"])
        if of != (new.unit, new.relation):
            raise DoesNotCompose(
                f"{path} counts units {of[0]!r} under {of[1]!r}, this run {new.unit.value!r} "
                f"under {new.relation.value!r}: no single ε covers both; keep an account for "
                "each, or plan the run for the account's"
            )


def _check_budget(
    path: Path, entries: Sequence[dict[str, Any]], new: Charge, budget: Budget
) -> None:
    epsilon = total_spent([*entries, {**_charge_to_dict(new), "kind": CHARGE}], budget.delta)
    if epsilon > budget.epsilon:
        charges = [entry for entry in entries if entry["kind"] == CHARGE]
        raise BudgetExhausted(
            f"training round {new.training} would raise the total of {path} to ε = "
            f"{epsilon_text(epsilon)} at δ = {budget.delta:.3g}, above the budget of "
            f"{budget.epsilon:g}: {_why(charges, epsilon, budget.delta)}"
        )
