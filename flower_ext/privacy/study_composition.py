"""Compose the spends of all runs of a study, from the entries of the study's account.

The module computes one ε for each adversary's view. For an adversary that sees the released models,
it composes the releases of all rounds. For an adversary that sees more, it composes the releases of
each run's most exposed unit, as the run's guarantee does. This unit is the one with the most
releases. `joint_loss` composes runs of which only (ε, δ) is known. If a run has no guarantee
against a view, ε is infinite for this view. The composition assumes that every run's plan was fixed
before the first run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flower_ext.privacy.account_entries import CHARGE, CLAIMS, DISCLOSURE, WITHOUT_NOISE, label_of
from flower_ext.privacy.accounting.accountant import joint_loss
from flower_ext.privacy.accounting.events import PrivacyLoss, Release
from flower_ext.privacy.guarantee import Guarantee
from flower_ext.privacy.theorems.claims import Claims
from flower_ext.privacy.units import AdversaryView, NeighboringRelation, PrivacyUnit

FIXED_PLANS = "the plan of every run was fixed before the first run"
_MODELS = AdversaryView.RELEASED_MODELS


@dataclass(frozen=True, kw_only=True)
class RunSpend:
    """The privacy that one run spent, as if it were the only run of the account."""

    label: str
    method: str
    rounds: int = 0
    epsilon: float | None = None
    """ε against an adversary that sees the released models; None if no ε covers the run."""
    delta: float | None = None
    what: str = ""
    epsilons: dict[AdversaryView, float] = field(default_factory=dict)
    """ε for each view against which the account has a guarantee of this run."""


def total_spent(entries: Sequence[dict[str, Any]], delta: float) -> float:
    """Return ε at ``delta`` of all charges, against an adversary that sees the released models.

    ε is infinite if a charge has no known ε, or if the δ's of the charges exceed ``delta``.
    """
    return _joint([run.against(_MODELS) for run in runs_of(entries)], delta).epsilon


def study_guarantees(
    entries: Sequence[dict[str, Any]], delta: float, *, study: str = "the study"
) -> list[Guarantee]:
    """Return one guarantee for each adversary's view, for all runs of an account together.

    Releases under different neighbouring relations do not compose. If the runs use several
    relations, the function returns one guarantee for each view and each relation. Its ``source``
    then names the runs that it covers. ``study`` names the account.
    """
    runs = runs_of(entries)
    views = {view for run in runs for view in run.views}
    guarantees = []
    for view in (view for view in AdversaryView if view in views):
        parts = [run.against(view) for run in runs]
        relations = list(dict.fromkeys(part.relation for part in parts if part.relation))
        relations = relations or [NeighboringRelation(runs[0].charges[0]["relation"])]
        for relation in relations:
            # A run without a guarantee is part of the total under every relation.
            members = [part for part in parts if part.relation in (relation, None)]
            source = f"{study}, all runs together"
            if len(relations) > 1:
                labels = ", ".join(part.run.label for part in members)
                source = f"{study}, the runs under {relation.value}: {labels}"
            guarantees.append(_joint_guarantee(entries, members, relation, delta, source))
    return guarantees


def _joint_guarantee(
    entries: Sequence[dict[str, Any]],
    members: Sequence[_Part],
    relation: NeighboringRelation,
    delta: float,
    source: str,
) -> Guarantee:
    """Return the joint guarantee of several runs against one view; ``members`` are their parts.

    Nothing is promised if a part is unbounded, or if any run in the account trained without noise.
    """
    unbounded_labels = sorted(
        {label_of(entry) for entry in entries if entry.get("what") == WITHOUT_NOISE}
    )
    unbounded_labels += [part.run.label for part in members if part.is_unbounded]
    loss = PrivacyLoss.unbounded(delta) if unbounded_labels else _joint(members, delta)
    if unbounded_labels:
        source += f"; against this adversary nothing is promised by {', '.join(unbounded_labels)}"
    disclosures = (
        f"{entry['what']} ({label_of(entry)})" for entry in entries if entry["kind"] == DISCLOSURE
    )
    claims = Claims(
        unit=members[0].run.unit,
        relation=relation,
        delta=delta,
        assumptions=(FIXED_PLANS, *_shared_texts(members, "assumptions")),
        not_covered=(*disclosures, *_shared_texts(members, "not_covered")),
    )
    return claims.provable(members[0].view, loss, source)


def spent_by_run(entries: Sequence[dict[str, Any]]) -> list[RunSpend]:
    """Return the spend of each run alone: one `RunSpend` for its training, and one for each query.

    After these come the disclosures that no ε covers, in the order of the account.
    """
    spends = []
    for run in runs_of(entries):
        for query, charges in run.by_query.items():
            # Against adversaries that see more than the released models, one ε covers training and
            # queries together. Only the `RunSpend` of the training has this ε.
            newest, views = charges[-1], set[AdversaryView]() if query else run.views
            part = replace(run, by_query={query: charges}).against(_MODELS)
            delta = newest["delta"]
            if part.spends and not part.releases:  # the δ's of rounds with unknown releases add up
                delta = sum(spend.delta for spend in part.spends)
            epsilons = {
                view: _joint([run.against(view)], newest["delta"]).epsilon
                for view in AdversaryView
                if view in views
            }
            spends.append(
                RunSpend(
                    label=label_of(newest),
                    method=f"{newest['method']}, {query}" if query else newest["method"],
                    rounds=len(charges),
                    epsilon=_joint([part], delta).epsilon,
                    delta=delta,
                    epsilons=epsilons,
                )
            )
    return spends + [
        RunSpend(label=label_of(entry), method=entry["method"], what=entry["what"])
        for entry in entries
        if entry["kind"] == DISCLOSURE
    ]


@dataclass(kw_only=True)
class _Part:
    """One run's contribution to the total privacy loss, for one adversary's view."""

    run: RunCharges
    view: AdversaryView
    relation: NeighboringRelation | None = None
    releases: Counter[Release] = field(default_factory=Counter)
    spends: list[PrivacyLoss] = field(default_factory=list)
    """(ε, δ) of rounds whose releases are not known."""
    is_unbounded: bool = False
    """True if the run has no guarantee against an adversary with this view."""


@dataclass(kw_only=True)
class RunCharges:
    """The entries of one run.

    The rounds form *stretches*. A new stretch begins when a round number occurs again: the run was
    then resumed from an earlier round, and repeated the round with new noise.
    """

    label: str
    by_query: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """The charges for each query, by its name; training rounds have the empty name."""
    stretches: list[dict[str, Any]] = field(default_factory=list)
    """For each stretch and view, the claim with the largest ε, which covers the whole stretch."""
    starts: list[set[str]] = field(default_factory=list)
    """For each stretch, the ids of the processes that charged its rounds."""
    guarantees: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, entry: dict[str, Any]) -> None:
        """Add the entry of a charge."""
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
        """Add an entry's guarantees, which cover the rounds that the entry's process charged."""
        charged = [index for index, starts in enumerate(self.starts) if entry["start"] in starts]
        self._cover(charged[-1] if charged else -1, entry["claims"])
        self.guarantees = {claim["view"]: claim["guarantee"] for claim in entry["claims"]}

    def _cover(self, index: int, claims: Sequence[dict[str, Any]]) -> None:
        stretch = self.stretches[index]
        for claim in claims:
            before = stretch.get(claim["view"], {"epsilon": 0.0})
            # Keep the larger ε, because another process of a copied run may have charged more. An
            # entry without ε stands for an infinite one.
            new, old = (math.inf if c["epsilon"] is None else c["epsilon"] for c in (claim, before))
            if new >= old:
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
        """The views against which the account has a guarantee of this run."""
        return {_MODELS, *(AdversaryView(view) for stretch in self.stretches for view in stretch)}

    def against(self, view: AdversaryView) -> _Part:
        """Return the run's contribution to the total privacy loss, for one adversary's view.

        The result has the releases that count for this view, or (ε, δ) of rounds with unknown
        releases.
        """
        part = _Part(run=self, view=view)
        if view is _MODELS and self.charges[0]["release"] is not None:
            part.relation = NeighboringRelation(self.charges[0]["relation"])
            part.releases.update(Release.from_dict(charge["release"]) for charge in self.charges)
            return part
        for stretch in self.stretches:
            claim = view.covering(stretch)
            if claim is None or claim["epsilon"] is None:
                return _Part(run=self, view=view, is_unbounded=True)
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

    def texts(self, view: AdversaryView, name: str) -> list[str]:
        """Return the texts in the field ``name`` of the run's `Guarantee` against a view.

        The list is empty if the account has no such guarantee.
        """
        return list((view.covering(self.guarantees) or {}).get(name, ()))


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
        return PrivacyLoss.unbounded(delta)
    releases = sum((part.releases for part in parts), Counter[Release]())
    return joint_loss(releases, [spend for part in parts for spend in part.spends], delta=delta)


def _shared_texts(members: Sequence[_Part], name: str) -> list[str]:
    """Return each text in the field ``name`` of the runs' guarantees against the parts' view.

    If only some runs have a text, the names of these runs follow the text.
    """
    by_text: dict[str, list[str]] = {}
    for part in members:
        for text in part.run.texts(part.view, name):
            by_text.setdefault(text, []).append(part.run.label)
    return [
        text if len(labels) == len(members) else f"{text} (of {', '.join(labels)})"
        for text, labels in by_text.items()
    ]
