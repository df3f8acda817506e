"""An account of the privacy that all runs on one population spend together.

Runs, pilots and searches share one file. Before each round, a run writes down its spend including
that round. Like a `Ledger`, the file is append-only, fsynced and hash-chained. The run holds a lock
while it reads all charges, composes them with the round and checks the budget.

Releases of Gaussian sums compose exactly, also those of different runs. If a run's spend is known
only as (ε, δ), both are added up (basic composition). Rounds are composed as if every run's plan
had been fixed beforehand. Data that no ε covers are listed, never counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting.accountant import privacy_loss_of
from flower_ext.privacy.accounting.events import Release
from flower_ext.privacy.guarantee import epsilon_text
from flower_ext.privacy.ledger import Budget, BudgetExhausted, Ledger, LedgerFile
from flower_ext.privacy.units import NeighboringRelation, PrivacyUnit

CHARGE, REPEAT, UNCOVERED = "charge", "repeat", "uncovered"


class DoesNotCompose(InvalidValue):
    """The charge has another unit or relation than the account; no single ε covers both."""


@dataclass(frozen=True, kw_only=True)
class Charge:
    """The spend of one run after one more training round.

    Parameters
    ----------
    run, method : str
        The run's id, the same after each restart, and the method that it trains.
    name : str
        Name of the run directory, for people; empty without one.
    training : int
        Number of the round within the run, from 1.
    repeatable : bool
        A repetition of the round is the same, bit for bit, and reveals nothing new.
    unit : PrivacyUnit
    relation : NeighboringRelation
    epsilon, delta : float
        Provable spend of this run alone, including this round.
    release : Release, optional
        The release of the round, if it alone determines the round's spend.
    """

    run: str
    method: str
    name: str = ""
    training: int
    repeatable: bool = False
    unit: PrivacyUnit
    relation: NeighboringRelation
    epsilon: float
    delta: float
    release: Release | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {**vars(self), "release": None if self.release is None else self.release.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Charge:
        """Undo `to_dict`."""
        release = values["release"]
        return cls(
            **{
                **values,
                "unit": PrivacyUnit(values["unit"]),
                "relation": NeighboringRelation(values["relation"]),
                "release": None if release is None else Release.from_dict(release),
            }
        )


@dataclass(frozen=True, kw_only=True)
class RunSpend:
    """The privacy that one run of the account spent, without the account's other runs.

    ``epsilon`` is None if no ε covers the run.
    """

    run: str
    name: str
    method: str
    rounds: int = 0
    epsilon: float | None = None
    delta: float | None = None
    what: str = ""


def charge(path: Path, new: Charge, budget: Budget) -> None:
    """Write a round's spend durably, before anything of the round is released.

    A round that is charged twice counts twice, because its noise is new each time. A
    ``repeatable`` round counts once.

    Raises
    ------
    BudgetExhausted
        The account and this round together exceed ``budget``; nothing was written.
    DoesNotCompose
        The account has another unit or relation.
    LedgerCorrupt
        The hash chain is broken; the message names the line.
    """
    line = {**new.to_dict(), "budget": {"epsilon": budget.epsilon, "delta": budget.delta}}
    with closing(LedgerFile(path, wait=True)) as account:
        charges = [entry for entry in account.entries if entry["kind"] == CHARGE]
        _check_relation(path, charges, new)
        if new.repeatable and any(
            (entry["run"], entry["training"]) == (new.run, new.training) for entry in charges
        ):
            account.append(REPEAT, {"run": new.run, "training": new.training})
            return
        # Under the lock, so that two simultaneous runs cannot both take the rest of the budget.
        _check_budget(path, charges, new, budget)
        account.append(CHARGE, line)


def check_affordable(path: Path, new: Charge, budget: Budget) -> None:
    """Refuse a charge that `charge` would refuse now; write nothing.

    Raises
    ------
    BudgetExhausted, DoesNotCompose, LedgerCorrupt
        As `charge`.
    """
    charges = [entry for entry in entries_of(path) if entry["kind"] == CHARGE]
    _check_relation(path, charges, new)
    _check_budget(path, charges, new, budget)


def entries_of(path: Path) -> list[dict[str, Any]]:
    """Return an account's verified entries; none if there is no file."""
    return Ledger.read(path) if path.exists() else []


def note_uncovered(path: Path, *, run: str, method: str, name: str = "", what: str) -> None:
    """Record, once per run, that the run reveals something about people's data that no ε covers.

    Parameters
    ----------
    what : str
        Description in one line, such as "a pilot of 20 rounds without noise".
    """
    line = {"run": run, "method": method, "name": name, "what": what}
    with closing(LedgerFile(path, wait=True)) as account:
        if not any(line.items() <= entry.items() for entry in account.entries):
            account.append(UNCOVERED, line)


def total_spent(entries: Sequence[dict[str, Any]], delta: float) -> float:
    """Return ε at ``delta`` of all charges; infinite if their δ's add up to more than ``delta``."""
    return _composed([entry for entry in entries if entry["kind"] == CHARGE], delta)


def spent_by_run(entries: Sequence[dict[str, Any]]) -> list[RunSpend]:
    """Return each run's own spend, then the entries that no ε covers, in order."""
    by_run: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        if entry["kind"] == CHARGE:
            by_run.setdefault(entry["run"], []).append(entry)
    spends = []
    for charges in by_run.values():
        exact, added = _parts(charges)
        delta = charges[-1]["delta"] if exact else sum(each for _, each in added)
        spends.append(
            RunSpend(
                **_identity(charges[-1]),
                rounds=len(charges),
                epsilon=_composed(charges, delta),
                delta=delta,
            )
        )
    uncovered = [entry for entry in entries if entry["kind"] == UNCOVERED]
    return spends + [RunSpend(**_identity(entry), what=entry["what"]) for entry in uncovered]


def _check_relation(path: Path, charges: Sequence[dict[str, Any]], new: Charge) -> None:
    for entry in charges[:1]:
        of = (entry["unit"], entry["relation"])
        if of != (new.unit, new.relation):
            raise DoesNotCompose(
                f"{path} counts units {of[0]!r} under {of[1]!r}, this run {new.unit.value!r} "
                f"under {new.relation.value!r}: no single ε covers both; keep an account for "
                "each, or plan the run for that unit and relation"
            )


def _check_budget(
    path: Path, charges: Sequence[dict[str, Any]], new: Charge, budget: Budget
) -> None:
    epsilon = _composed([*charges, new.to_dict()], budget.delta)
    if epsilon > budget.epsilon:
        raise BudgetExhausted(
            f"training round {new.training} would raise the total of {path} to ε = "
            f"{epsilon_text(epsilon)} at δ = {budget.delta:.3g}, above the budget of "
            f"{budget.epsilon:g}: {_why(charges, epsilon, budget.delta)}"
        )


def _identity(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in ("run", "name", "method")}


def _composed(charges: Sequence[dict[str, Any]], delta: float) -> float:
    exact, spends = _parts(charges)
    # Basic composition of spends without a release; the exact part gets the rest of δ.
    added = math.fsum(epsilon for epsilon, _ in spends)
    left = delta - math.fsum(spent for _, spent in spends)
    if not exact:  # the runs' δ may add up to this δ, but for rounding
        return added if left >= -1e-12 * delta else math.inf
    return added + privacy_loss_of(exact, delta=left).epsilon if left > 0 else math.inf


def _parts(
    charges: Sequence[dict[str, Any]],
) -> tuple[Counter[Release], list[tuple[float, float]]]:
    """Return releases with their counts, and (ε, δ) of all charges without a release.

    The last charge of such a run covers all its rounds. If a round number comes again, the run
    was resumed from before that round, under new noise; the earlier charges then count separately.
    """
    exact: Counter[Release] = Counter()
    stretches: list[list[dict[str, Any]]] = []
    last: dict[str, list[dict[str, Any]]] = {}
    for entry in charges:
        if entry["release"] is not None:
            exact[Release.from_dict(entry["release"])] += 1
            continue
        stretch = last.get(entry["run"])
        # A repeated round number means new noise, so the earlier rounds are a separate spend.
        if stretch is None or entry["training"] <= stretch[-1]["training"]:
            stretches.append(stretch := [])
            last[entry["run"]] = stretch
        stretch.append(entry)
    return exact, [
        (max(entry["epsilon"] for entry in each), max(entry["delta"] for entry in each))
        for each in stretches
    ]


def _why(charges: Sequence[dict[str, Any]], epsilon: float, delta: float) -> str:
    if not charges:
        return "the first round alone exceeds it; plan more noise"
    if math.isinf(epsilon):
        return "the account adds up each run's δ: plan runs with a smaller δ, or raise the budget's"
    runs = len({entry["run"] for entry in charges})
    spent = _composed(charges, delta)
    return f"{runs} run{'s' if runs > 1 else ''} spent {epsilon_text(spent)} so far"
