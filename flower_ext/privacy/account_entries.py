"""The entries of a study's account (`shared_ledger`), as its readers see them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from flower_ext.privacy.accounting.events import Counts, Release
from flower_ext.privacy.units import AdversaryView, NeighboringRelation, PrivacyUnit


class EntryKind(StrEnum):
    """The kinds of an account's entries."""

    CHARGE = "charge"
    """A round's spend."""
    REPEAT = "repeat"
    """A repeated round, which reveals nothing new."""
    CLAIMS = "claims"
    """A run's guarantees."""
    DISCLOSURE = "uncovered"
    """A disclosure that no ε covers."""
    WITHDRAWN = "withdrawn"
    """A user or client that withdrew."""
    FORGOTTEN = "forgotten"
    """A client whose memory is deleted."""


@dataclass(frozen=True, kw_only=True)
class SpendEntry:
    """The loss of a run against one adversary, as an entry gives it."""

    view: AdversaryView
    relation: NeighboringRelation
    epsilon: float
    """ε, which is infinite if nothing is guaranteed."""
    delta: float
    counts: Sequence[tuple[Mapping[str, Any], int]] | None = None
    """The `releases`, as in the file."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> SpendEntry:
        """Return the spend that an entry holds."""
        return cls(
            view=AdversaryView(values["view"]),
            relation=NeighboringRelation(values["relation"]),
            epsilon=_epsilon(values),
            delta=values["delta"],
            counts=values["releases"],
        )

    @property
    def releases(self) -> Counts | None:
        """Releases that together have this loss; None if only (ε, δ) is known."""
        if self.counts is None:
            return None
        return tuple((Release.from_dict(release), count) for release, count in self.counts)


@dataclass(frozen=True, kw_only=True)
class ChargeEntry:
    """A charge; see `shared_ledger.Charge`."""

    run: str
    label: str
    method: str
    query: str
    start: str
    training: int
    unit: PrivacyUnit
    relation: NeighboringRelation
    epsilon: float
    delta: float
    release: Release | None
    spends: Sequence[SpendEntry]
    """The run's loss against each adversary."""
    budget_delta: float
    """δ of the budget."""

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> ChargeEntry:
        """Return the charge that an entry of this kind holds."""
        release = entry["release"]
        return cls(
            run=entry["run"],
            label=_label(entry),
            method=entry["method"],
            query=entry["query"],
            start=entry["start"],
            training=entry["training"],
            unit=PrivacyUnit(entry["unit"]),
            relation=NeighboringRelation(entry["relation"]),
            epsilon=_epsilon(entry),
            delta=entry["delta"],
            release=None if release is None else Release.from_dict(release),
            spends=tuple(map(SpendEntry.read, entry["claims"])),
            budget_delta=entry["budget"]["delta"],
        )


@dataclass(frozen=True, kw_only=True)
class ClaimsEntry:
    """A run's guarantees, computed from the clients that answered."""

    run: str
    start: str
    spends: Sequence[SpendEntry]
    guarantees: Mapping[AdversaryView, Mapping[str, Any]]
    """The `Guarantee` against each adversary, as in the file."""

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> ClaimsEntry:
        """Return the guarantees that an entry of this kind holds."""
        claims = entry["claims"]
        return cls(
            run=entry["run"],
            start=entry["start"],
            spends=tuple(map(SpendEntry.read, claims)),
            guarantees={AdversaryView(claim["view"]): claim["guarantee"] for claim in claims},
        )


@dataclass(frozen=True, kw_only=True)
class DisclosureEntry:
    """A disclosure that no ε covers."""

    run: str
    label: str
    method: str
    what: str

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> DisclosureEntry:
        """Return the disclosure that an entry of this kind holds."""
        return cls(
            run=entry["run"], label=_label(entry), method=entry["method"], what=entry["what"]
        )


def charges_in(entries: Iterable[Mapping[str, Any]]) -> Iterator[ChargeEntry]:
    """Yield an account's charges."""
    for entry in entries:
        if entry["kind"] == EntryKind.CHARGE:
            yield ChargeEntry.read(entry)


def disclosures_in(entries: Iterable[Mapping[str, Any]]) -> list[DisclosureEntry]:
    """Return an account's disclosures that no ε covers."""
    return [
        DisclosureEntry.read(entry) for entry in entries if entry["kind"] == EntryKind.DISCLOSURE
    ]


def _label(entry: Mapping[str, Any]) -> str:
    """Return the name of an entry's run directory, or the beginning of the run's id."""
    return entry["name"] or str(entry["run"])[:8]


def _epsilon(values: Mapping[str, Any]) -> float:
    return math.inf if values["epsilon"] is None else values["epsilon"]
