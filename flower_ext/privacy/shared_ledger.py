"""An account of the privacy that all runs of a study on one population spend together.

Statistics, trainings, their evaluations, pilots and searches share one file. Before each round, a
run writes down its spend including that round. Like a `Ledger`, the file is append-only, fsynced
and hash-chained. The run holds a lock while it reads all charges, composes them with the round and
checks the budget.

The account answers for each view of an adversary alone. Against the released models, releases
compose round by round. Against an adversary that sees more, a run counts with the releases of its
most exposed unit, as its guarantee does. If a run's spend is known only as (ε, δ), it composes by
`joint_loss`. A run that promises nothing against a view makes the sum infinite there. Rounds are
composed as if every run's plan had been fixed beforehand.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting.accountant import joint_loss
from flower_ext.privacy.accounting.events import PrivacyLoss, Release
from flower_ext.privacy.guarantee import Guarantee, epsilon_text
from flower_ext.privacy.ledger import Budget, BudgetExhausted, Ledger, LedgerFile
from flower_ext.privacy.units import AdversaryView, NeighboringRelation, PrivacyUnit

CHARGE, REPEAT, UNCOVERED, CLAIMS = "charge", "repeat", "uncovered", "claims"
WITHOUT_NOISE = "training without noise"
"""Entry of a run that promises nothing, against any adversary."""
FIXED_PLANS = "the plan of every run was fixed before the first run"
_MODELS = AdversaryView.RELEASED_MODELS


class DoesNotCompose(InvalidValue):
    """The charge has another unit or relation than the account; no single ε covers both."""


@dataclass(frozen=True, kw_only=True)
class Charge:
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
        Provable guarantees of this run alone, including this round, against each adversary.
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
    claims: Sequence[Guarantee] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {
            **vars(self),
            "release": None if self.release is None else self.release.to_dict(),
            "claims": [_spend_to_dict(claim) for claim in self.claims],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Charge:
        """Return the charge, without claims, of which `to_dict` made ``values``."""
        release = values["release"]
        return cls(
            **{
                **values,
                "unit": PrivacyUnit(values["unit"]),
                "relation": NeighboringRelation(values["relation"]),
                "release": None if release is None else Release.from_dict(release),
                "claims": (),
            }
        )


@dataclass(frozen=True, kw_only=True)
class RunSpend:
    """The privacy that one run of the account spent, without the account's other runs.

    ``epsilons`` has ε for each view in which the account knows the run; `epsilon` is that against
    the released models. It is None if no ε covers the run.
    """

    run: str
    name: str
    method: str
    rounds: int = 0
    epsilon: float | None = None
    delta: float | None = None
    what: str = ""
    epsilons: dict[AdversaryView, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name of the run directory, or the beginning of the run's id."""
        return self.name or self.run[:8]


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
        The account has another unit or relation.
    LedgerCorrupt
        The hash chain is broken; the message names the line.
    """
    line = {**new.to_dict(), "budget": {"epsilon": budget.epsilon, "delta": budget.delta}}
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
    """Record the provable guarantees of a run so far, with everything on which they rest.

    A charge is written before its round, so it does not know who will answer. These guarantees do.

    Parameters
    ----------
    claims : Sequence[Guarantee]
    **identity
        ``run``, ``method``, ``name`` and ``start``, as in `Charge`.
    """
    line = {
        **identity,
        "claims": [{**_spend_to_dict(claim), "guarantee": claim.to_dict()} for claim in claims],
    }
    with closing(LedgerFile(path, wait=True)) as account:
        if not any(line.items() <= entry.items() for entry in account.entries):
            account.append(CLAIMS, line)


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


def claim_against(view: AdversaryView, claims: Sequence[Guarantee]) -> Guarantee | None:
    """Return the provable guarantee that holds against a view; None if there is none.

    Without a guarantee against the view itself, it is the one against the next adversary that sees
    more.
    """
    provable = [claim for claim in claims if claim.basis == "provable"]
    for other in view.at_least:
        for claim in provable:
            if claim.view is other:
                return claim
    return None


def total_spent(entries: Sequence[dict[str, Any]], delta: float) -> float:
    """Return ε at ``delta`` of all charges, against the released models.

    It is infinite if no ε is known for a charge, or if δ's add up to more than ``delta``.
    """
    return _joint([run.against(_MODELS) for run in runs_of(entries)], delta).epsilon


def study_guarantees(
    entries: Sequence[dict[str, Any]], delta: float, *, study: str = "the study"
) -> list[Guarantee]:
    """Return the guarantees of all runs of an account together, against each adversary.

    Runs under different relations do not compose. Each relation then has a guarantee of its own,
    whose source names its runs.

    Parameters
    ----------
    entries : Sequence[dict]
        The account's entries.
    delta : float
        δ of the result.
    study : str
        Name of the account.
    """
    runs = runs_of(entries)
    bare = sorted({label_of(entry) for entry in entries if entry.get("what") == WITHOUT_NOISE})
    uncovered = [
        f"{entry['what']} ({label_of(entry)})" for entry in entries if entry["kind"] == UNCOVERED
    ]
    views = {view for run in runs for view in run.views}
    guarantees = []
    for view in (view for view in AdversaryView if view in views):
        parts = [(run, run.against(view)) for run in runs]
        relations = list(dict.fromkeys(part.relation for _, part in parts if part.relation))
        relations = relations or [NeighboringRelation(runs[0].charges[0]["relation"])]
        for relation in relations:
            # A run that promises nothing counts under every relation.
            members = [(run, part) for run, part in parts if part.relation in (relation, None)]
            known = [run for run, _ in members]
            loss = _joint([part for _, part in members], delta)
            nothing = bare + [run.label for run, part in members if part.is_unbounded]
            if nothing:
                loss = PrivacyLoss(epsilon=math.inf, delta=delta, accountant="none")
            source = f"{study}, all runs together"
            if len(relations) > 1:
                labels = ", ".join(run.label for run in known)
                source = f"{study}, the runs under {relation.value}: {labels}"
            if nothing:
                source += f"; against this adversary nothing is promised by {', '.join(nothing)}"
            guarantees.append(
                Guarantee(
                    unit=runs[0].unit,
                    relation=relation,
                    view=view,
                    epsilon=loss.epsilon,
                    delta=delta,
                    basis="provable",
                    accountant=loss.accountant,
                    source=source,
                    assumptions=(FIXED_PLANS, *_shared_texts(known, view, "assumptions")),
                    not_covered=(*uncovered, *_shared_texts(known, view, "not_covered")),
                )
            )
    return guarantees


def spent_by_run(entries: Sequence[dict[str, Any]]) -> list[RunSpend]:
    """Return each run's own spend, then the entries that no ε covers, in order."""
    spends = []
    for run in runs_of(entries):
        for query, charges in run.by_query.items():
            # What an adversary that sees more learns from answers is in the run's own line.
            alone = replace(run, by_query={query: charges})
            part = alone.against(_MODELS)
            delta = charges[-1]["delta"] if part.releases else sum(s.delta for s in part.spends)
            identity = _identity(charges[-1])
            if query:
                identity["method"] += f", {query}"
            spends.append(
                RunSpend(
                    **identity,
                    rounds=len(charges),
                    epsilon=_joint([part], delta).epsilon,
                    delta=delta,
                    epsilons={} if query else run.epsilons(charges[-1]["delta"]),
                )
            )
    uncovered = [entry for entry in entries if entry["kind"] == UNCOVERED]
    return spends + [RunSpend(**_identity(entry), what=entry["what"]) for entry in uncovered]


@dataclass(kw_only=True)
class _Part:
    """The part of one run in a sum against one view."""

    relation: NeighboringRelation | None
    releases: Counter[Release] = field(default_factory=Counter)
    spends: list[PrivacyLoss] = field(default_factory=list)
    is_unbounded: bool = False


@dataclass(kw_only=True)
class RunCharges:
    """The entries of one run.

    Parameters
    ----------
    by_query : dict
        Charges by query; those of training rounds under the empty name.
    stretches : list of dict
        For each stretch of rounds, the last spend by view. The last charge of a stretch covers all
        its rounds. A round number that comes again begins a stretch, because the run was resumed
        from before that round, under new noise.
    """

    label: str
    by_query: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    stretches: list[dict[str, Any]] = field(default_factory=list)
    starts: list[set[str]] = field(default_factory=list)
    guarantees: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, entry: dict[str, Any]) -> None:
        """Add a charge."""
        charges = self.by_query.setdefault(entry["query"], [])
        if not self.stretches or (charges and entry["training"] <= charges[-1]["training"]):
            self.stretches.append({})
            self.starts.append(set())
        charges.append(entry)
        self.starts[-1].add(entry["start"])
        claims = entry["claims"]
        if not claims and entry["release"] is None:
            claims = [{**entry, "view": _MODELS, "releases": None}]
        self._cover(len(self.stretches) - 1, claims)

    def note(self, entry: dict[str, Any]) -> None:
        """Take the guarantees that a process noted for the rounds that it charged."""
        charged = [place for place, starts in enumerate(self.starts) if entry["start"] in starts]
        if self.stretches:
            self._cover(charged[-1] if charged else -1, entry["claims"])
        self.guarantees = {claim["view"]: claim["guarantee"] for claim in entry["claims"]}

    def _cover(self, place: int, claims: Sequence[dict[str, Any]]) -> None:
        stretch = self.stretches[place]
        for claim in claims:
            before = stretch.get(claim["view"])
            # Another process of a copied run may have charged more.
            if before is None or _epsilon(claim) >= _epsilon(before):
                stretch[claim["view"]] = claim

    @property
    def charges(self) -> list[dict[str, Any]]:
        """All charges."""
        return [charge for charges in self.by_query.values() for charge in charges]

    @property
    def unit(self) -> PrivacyUnit:
        """The privacy unit."""
        return PrivacyUnit(self.charges[0]["unit"])

    @property
    def views(self) -> set[AdversaryView]:
        """The views against which the run has guarantees of its own."""
        return {_MODELS, *(AdversaryView(view) for stretch in self.stretches for view in stretch)}

    def against(self, view: AdversaryView) -> _Part:
        """Return the run's part in a sum against a view."""
        if view is _MODELS and self.charges[0]["release"] is not None:
            made = Counter(Release.from_dict(charge["release"]) for charge in self.charges)
            return _Part(relation=NeighboringRelation(self.charges[0]["relation"]), releases=made)
        part = _Part(relation=None)
        for stretch in self.stretches:
            claim = next((stretch[other] for other in view.at_least if other in stretch), None)
            if claim is None or claim["epsilon"] is None:
                return _Part(relation=None, is_unbounded=True)
            part.relation = NeighboringRelation(claim["relation"])
            if claim["releases"] is None:
                loss = PrivacyLoss(
                    epsilon=claim["epsilon"], delta=claim["delta"], accountant="one run alone"
                )
                part.spends.append(loss)
            else:
                for release, count in claim["releases"]:
                    part.releases[Release.from_dict(release)] += count
        return part

    def epsilons(self, delta: float) -> dict[AdversaryView, float]:
        """Return ε of the run alone, for each view."""
        return {
            view: _joint([self.against(view)], delta).epsilon
            for view in AdversaryView
            if view in self.views
        }

    def texts(self, view: AdversaryView, name: str) -> list[str]:
        """Return the lines ``name`` of the guarantee that holds against a view."""
        kept = (self.guarantees[other] for other in view.at_least if other in self.guarantees)
        return list(next(kept, {}).get(name, ()))


def runs_of(entries: Sequence[dict[str, Any]]) -> list[RunCharges]:
    """Return the runs that charged an account, in the order of their first charges."""
    runs: dict[str, RunCharges] = {}
    for entry in entries:
        if entry["kind"] == CHARGE:
            runs.setdefault(entry["run"], RunCharges(label=label_of(entry))).add(entry)
        elif entry["kind"] == CLAIMS and entry["run"] in runs:
            runs[entry["run"]].note(entry)
    return [*runs.values()]


def _joint(parts: Sequence[_Part], delta: float) -> PrivacyLoss:
    if any(part.is_unbounded for part in parts):
        return PrivacyLoss(epsilon=math.inf, delta=delta, accountant="none")
    releases = sum((part.releases for part in parts), Counter[Release]())
    return joint_loss(releases, [spend for part in parts for spend in part.spends], delta=delta)


def _shared_texts(runs: Sequence[RunCharges], view: AdversaryView, name: str) -> list[str]:
    """Return the lines of all runs once, with the names of the runs if they are not of all."""
    by_text: dict[str, list[str]] = {}
    for run in runs:
        for text in run.texts(view, name):
            by_text.setdefault(text, []).append(run.label)
    return [
        text if len(labels) == len(runs) else f"{text} (of {', '.join(labels)})"
        for text, labels in by_text.items()
    ]


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


def _epsilon(claim: dict[str, Any]) -> float:
    return math.inf if claim["epsilon"] is None else float(claim["epsilon"])


def label_of(entry: dict[str, Any]) -> str:
    """Return the name of an entry's run directory, or the beginning of the run's id."""
    return entry["name"] or str(entry["run"])[:8]


def _identity(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in ("run", "name", "method")}


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
                "each, or plan the run for that unit and relation"
            )


def _check_budget(
    path: Path, entries: Sequence[dict[str, Any]], new: Charge, budget: Budget
) -> None:
    epsilon = total_spent([*entries, {**new.to_dict(), "kind": CHARGE}], budget.delta)
    if epsilon > budget.epsilon:
        charges = [entry for entry in entries if entry["kind"] == CHARGE]
        raise BudgetExhausted(
            f"training round {new.training} would raise the total of {path} to ε = "
            f"{epsilon_text(epsilon)} at δ = {budget.delta:.3g}, above the budget of "
            f"{budget.epsilon:g}: {_why(charges, epsilon, budget.delta)}"
        )
