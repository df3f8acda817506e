"""An account of the privacy that all runs of a study on one population spend together.

Statistics, trainings, evaluations, pilots and searches share one file, which is hash-chained as a
`Ledger` is. Before each round, a run writes a *charge* into the file: the privacy that the run will
have spent after this round. The run holds a lock while it composes all charges with the new charge
(`study_composition`) and checks the budget.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flower_ext.errors import InvalidValue
from flower_ext.json_record import NOT_WRITTEN, JsonRecord
from flower_ext.privacy.account_entries import CHARGE, CLAIMS, DISCLOSURE, REPEAT, WITHOUT_NOISE
from flower_ext.privacy.accounting.events import Release
from flower_ext.privacy.guarantee import Guarantee, epsilon_text
from flower_ext.privacy.ledger import Budget, BudgetExhausted, Ledger, LedgerFile
from flower_ext.privacy.study_composition import total_spent
from flower_ext.privacy.units import NeighboringRelation, PrivacyUnit


class DoesNotCompose(InvalidValue):
    """The charge's unit or relation differs from the account's, so no ε covers all charges."""


@dataclass(frozen=True, kw_only=True)
class Charge(JsonRecord):
    """The provable loss of one run alone, after its newest round or answer to a query."""

    run: str
    """The run's id, which stays the same when the run is resumed."""
    method: str
    name: str = ""
    """Name of the run directory, for readers."""
    query: str = ""
    """Name of the query whose answer is released; empty for a training round."""
    start: str = ""
    """Id of the process that computes the round; a resumed run has a new process."""
    training: int
    """Number of the round within the run, or number of the answer to the query, counted from 1."""
    repeatable: bool = False
    """True if a repeated round has the same result, bit for bit, and so reveals nothing new."""
    unit: PrivacyUnit
    population: int
    """Number of the run's users, or of its clients if the unit is a client or a record."""
    relation: NeighboringRelation
    epsilon: float
    """ε against an adversary that sees the released models."""
    delta: float
    release: Release | None = None
    """The round's noised sum, if released models depend on the round through this sum only."""
    claims: Sequence[Guarantee] = field(default=(), metadata=NOT_WRITTEN)
    """The run's guarantees, one for each adversary's view. The file has only their ε, δ and
    releases."""


def charge(path: Path, new: Charge, budget: Budget) -> list[dict[str, Any]]:
    """Write a round's spend durably, before anything of the round is released.

    Return all entries of the account, including the new one. If a run repeats a round, the account
    counts this round twice, because the noise is new. It counts a ``repeatable`` round only once.
    The function writes nothing if the round would exceed ``budget`` (`BudgetExhausted`), or if the
    account has another unit or relation (`DoesNotCompose`).
    """
    line = {**_charge_to_dict(new), "budget": {"epsilon": budget.epsilon, "delta": budget.delta}}
    same = {"run": new.run, "query": new.query, "training": new.training}
    with closing(LedgerFile(path, wait=True)) as account:
        _check_relation(path, account.entries, new)
        if new.repeatable and any(
            entry["kind"] == CHARGE and same.items() <= entry.items() for entry in account.entries
        ):
            account.append(REPEAT, same)
        else:
            # Under the lock, so that two simultaneous runs cannot both take the rest of the budget.
            _check_budget(path, account.entries, new, budget)
            account.append(CHARGE, line)
        return account.entries


def check_affordable(path: Path, new: Charge, budget: Budget) -> None:
    """Refuse a charge that `charge` would refuse now; write nothing."""
    entries = entries_of(path)
    _check_relation(path, entries, new)
    _check_budget(path, entries, new, budget)


def check_charged(path: Path, run: str, rounds: Mapping[str, int]) -> None:
    """Refuse an account that lacks some of the rounds that a run has made.

    ``rounds`` has the number of the run's answers to each query, by its name. Training rounds have
    the empty name. A run without noise has one entry for all its rounds, so give 1 at most.
    """
    charges = Counter(
        entry.get("query", "")
        for entry in entries_of(path)
        if entry.get("run") == run
        and (entry["kind"] == CHARGE or entry.get("what") == WITHOUT_NOISE)
    )
    for query, count in rounds.items():
        if charges[query] < count:
            what = f"answers to {query}" if query else "training rounds"
            raise InvalidValue(
                f"budget.ledger={str(path)!r} has {charges[query]} of at least {count} {what} that "
                "this run has made: expected the account with which the run began, which knows who "
                "withdrew and what was spent; restore the file from a copy, or begin a new run"
            )


def entries_of(path: Path) -> list[dict[str, Any]]:
    """Return an account's verified entries; an empty list if there is no file."""
    return Ledger.read(path) if path.exists() else []


def note_claims(path: Path, claims: Sequence[Guarantee], **identity: str) -> None:
    """Record the provable guarantees of a run so far, with their assumptions and conditions.

    A charge is written before its round, when nobody knows yet which clients will answer. The
    guarantees recorded here are computed after the round, from the clients that answered.
    ``identity`` has ``run``, ``method``, ``name`` and ``start``, as in `Charge`.
    """
    spends = [{**_spend_to_dict(claim), "guarantee": claim.to_dict()} for claim in claims]
    _note_once(path, CLAIMS, {**identity, "claims": spends})


def note_disclosure(path: Path, *, run: str, method: str, name: str = "", what: str) -> None:
    """Record, once per run, a disclosure that no ε covers, such as "a pilot without noise"."""
    _note_once(path, DISCLOSURE, {"run": run, "method": method, "name": name, "what": what})


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


def _check_relation(path: Path, entries: Sequence[dict[str, Any]], new: Charge) -> None:
    first = next((entry for entry in entries if entry["kind"] == CHARGE), None)
    if first is not None and (first["unit"], first["relation"]) != (new.unit, new.relation):
        raise DoesNotCompose(
            f"{path} has the privacy unit {first['unit']!r} and the relation "
            f"{first['relation']!r}, but this run has the unit {new.unit.value!r} and the relation "
            f"{new.relation.value!r}: no single ε covers both; keep a separate account for each, "
            "or plan the run with the unit and the relation of the account"
        )


def _check_budget(
    path: Path, entries: Sequence[dict[str, Any]], new: Charge, budget: Budget
) -> None:
    epsilon = total_spent([*entries, {**_charge_to_dict(new), "kind": CHARGE}], budget.delta)
    if epsilon <= budget.epsilon:
        return
    runs = {entry["run"] for entry in entries if entry["kind"] == CHARGE}
    if not runs:
        why = "the first round alone exceeds it; plan more noise"
    elif math.isinf(epsilon):
        why = (
            "the δ's of the runs add up to more than the budget's δ; plan runs with a smaller δ, "
            "or raise the budget's δ"
        )
    else:
        spent = epsilon_text(total_spent(entries, budget.delta))
        why = (
            f"{len(runs)} run{'s' if len(runs) > 1 else ''} spent {spent} so far; end the study, "
            "or raise the budget"
        )
    what = (
        f"answer {new.training} to {new.query}" if new.query else f"training round {new.training}"
    )
    raise BudgetExhausted(
        f"{what} would raise the total of {path} to ε = "
        f"{epsilon_text(epsilon)} at δ = {budget.delta:.3g}, above the budget of "
        f"{budget.epsilon:g}: {why}"
    )
