"""One account for people, not for folders: what all runs on one population spend together.

Runs, pilots and searches share a file. Before a round is asked for, its run writes down what it
will have spent after it, in the form of `Ledger`: append-only, fsynced, hash-chained, under a lock
that is held while all that was spent is read, composed with the round, and held to the budget.

Releases compose exactly, whichever runs they are of; what is known by its ε alone is added up, with
its δ (basic composition). Rounds are composed as if every run's plan had been fixed beforehand.
What no ε covers is listed, never counted.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting import Release, privacy_loss_of
from flower_ext.privacy.ledger import (
    GENESIS,
    Budget,
    BudgetExhausted,
    chained,
    parse_chain,
    sync_directory,
    write_durably,
)
from flower_ext.privacy.units import NeighboringRelation, PrivacyUnit

CHARGE, REPEAT, UNCOVERED = "charge", "repeat", "uncovered"


class DoesNotCompose(InvalidValue):
    """Another unit or relation than the account's: no one ε speaks of both."""


@dataclass(frozen=True, kw_only=True)
class Charge:
    """What one run will have spent after one more training round.

    Parameters
    ----------
    run, method : str
        The run's id over all its starts, and what it trains with.
    name : str
        The run directory's, for people; empty where there is none.
    training : int
        Number of the round in the run, from 1.
    repeatable : bool
        Done again, the round is the same, bit for bit, and tells nothing new.
    unit : PrivacyUnit
    relation : NeighboringRelation
    epsilon, delta : float
        Provable, of the whole run with this round, for itself.
    release : Release, optional
        What the round releases, where that is all that its ε comes from.
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
        """JSON-ready form."""
        release = None if self.release is None else self.release.to_dict()
        kinds = {"unit": self.unit.value, "relation": self.relation.value}
        return {**vars(self), **kinds, "release": release}


@dataclass(frozen=True, kw_only=True)
class RunSpend:
    """What one run has spent for itself; ``epsilon`` is None where no ε covers it."""

    run: str
    name: str
    method: str
    rounds: int = 0
    epsilon: float | None = None
    delta: float | None = None
    what: str = ""


def charge(path: Path, new: Charge, budget: Budget) -> None:
    """Make a round's spend durable, before anything of it is released.

    A round that is charged again counts again, as its noise is new, unless it is ``repeatable``.

    Raises
    ------
    BudgetExhausted
        All that was spent and this round exceed ``budget``; nothing was written.
    DoesNotCompose
        The account is of another unit or relation.
    LedgerCorrupt
        The hash chain is broken; the message names the line.
    """
    with _locked(path) as (file, entries):
        facts = {**new.to_dict(), "budget": {"epsilon": budget.epsilon, "delta": budget.delta}}
        charges = [entry for entry in entries if entry["kind"] == CHARGE]
        for entry in charges[:1]:
            of = (entry["unit"], entry["relation"])
            if of != (new.unit, new.relation):
                raise DoesNotCompose(
                    f"{path} counts units {of[0]!r} under {of[1]!r}, this run {new.unit.value!r} "
                    f"under {new.relation.value!r}: no one ε speaks of both; keep an account for "
                    "each, or plan the run for that unit and relation"
                )
        again = new.repeatable and any(
            (entry["run"], entry["training"]) == (new.run, new.training) for entry in charges
        )
        if again:
            _append(file, entries, REPEAT, {"run": new.run, "training": new.training})
            return
        epsilon = _composed([*charges, facts], budget.delta)
        if epsilon > budget.epsilon:
            raise BudgetExhausted(
                f"training round {new.training} would bring what {path} counts to ε = "
                f"{epsilon:.4g} at δ = {budget.delta:.3g}, above the budget of {budget.epsilon:g}: "
                f"{_why(charges, epsilon, budget.delta)}"
            )
        _append(file, entries, CHARGE, facts)


def note_uncovered(path: Path, *, run: str, method: str, name: str = "", what: str) -> None:
    """Write down, once a run, that it shows something of people's data that no ε covers.

    Parameters
    ----------
    what : str
        In a line, as "a pilot of 20 rounds without noise".
    """
    facts = {"run": run, "method": method, "name": name, "what": what}
    with _locked(path) as (file, entries):
        if not any(facts.items() <= entry.items() for entry in entries):
            _append(file, entries, UNCOVERED, facts)


def total_spent(entries: Sequence[dict[str, Any]], delta: float) -> float:
    """ε at ``delta`` of all charges of an account; infinite where their δ's exceed it."""
    return _composed([entry for entry in entries if entry["kind"] == CHARGE], delta)


def spent_by_run(entries: Sequence[dict[str, Any]]) -> list[RunSpend]:
    """What each run on an account spent for itself, then what no ε covers, in order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        if entry["kind"] == CHARGE:
            found.setdefault(entry["run"], []).append(entry)
    covered = []
    for run, charges in found.items():
        last = charges[-1]
        exact, spends = _parts(charges)
        delta = last["delta"] if exact else sum(each for _, each in spends)
        covered.append(
            RunSpend(
                run=run,
                name=last["name"],
                method=last["method"],
                rounds=len(charges),
                epsilon=_composed(charges, delta),
                delta=delta,
            )
        )
    bare = [
        RunSpend(
            run=entry["run"],
            name=entry["name"],
            method=entry["method"],
            what=entry["what"],
        )
        for entry in entries
        if entry["kind"] == UNCOVERED
    ]
    return [*covered, *bare]


def _composed(charges: Sequence[dict[str, Any]], delta: float) -> float:
    exact, spends = _parts(charges)
    added = math.fsum(epsilon for epsilon, _ in spends)
    left = delta - math.fsum(own for _, own in spends)
    if not exact:
        return added if left >= -1e-12 * delta else math.inf
    return added + privacy_loss_of(exact, delta=left).epsilon if left > 0 else math.inf


def _parts(
    charges: Sequence[dict[str, Any]],
) -> tuple[Counter[Release], list[tuple[float, float]]]:
    """Releases with their numbers, and (ε, δ) of all else.

    Such a run's last charge stands for all its rounds. Where a number comes again, the run went on
    from before it, under new noise: what was charged until then counts for itself.
    """
    exact: Counter[Release] = Counter()
    stretches: list[list[dict[str, Any]]] = []
    last: dict[str, list[dict[str, Any]]] = {}
    for entry in charges:
        if entry["release"] is not None:
            exact[Release.from_dict(entry["release"])] += 1
            continue
        stretch = last.get(entry["run"])
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
        return "the first round alone is too much; plan more noise"
    if math.isinf(epsilon):
        return "each run's δ is added up here: plan runs with smaller ones, or allow a larger sum"
    runs = len({entry["run"] for entry in charges})
    spent = _composed(charges, delta)
    return f"{runs} run{'s' if runs > 1 else ''} spent {spent:.4g} so far"


@contextmanager
def _locked(path: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The file under its lock, which other runs wait for, and its verified entries."""
    path = Path(path)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        entries, whole = parse_chain(path.read_bytes(), path)
        if os.fstat(file).st_size > whole:  # torn by a crash: its round never began
            os.ftruncate(file, whole)
        yield file, entries
        sync_directory(path.parent)
    finally:
        os.close(file)


def _append(file: int, entries: Sequence[dict[str, Any]], kind: str, facts: dict[str, Any]) -> None:
    """Raise before anything is released where the line cannot be made durable."""
    previous = entries[-1]["hash"] if entries else GENESIS
    _, line = chained(len(entries), kind, facts, previous)
    write_durably(file, line)
