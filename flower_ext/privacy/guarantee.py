"""What ε means: every guarantee names its unit, relation, view, δ, accountant and assumptions.

Published claims and provable ones have one form; where they disagree, reports print both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from flower_ext.errors import InvalidValue
from flower_ext.privacy.units import AdversaryView, NeighboringRelation, PrivacyUnit

Basis = Literal["published", "provable"]


def epsilon_text(epsilon: float) -> str:
    """ε with three significant digits, rounded up: what is printed is never less than was spent."""
    if math.isinf(epsilon):
        return "none"
    return _rounded_up(epsilon)


LARGE_DELTA = 1e-3
"""Above it a guarantee says that δ is large, as 1/N is for few clients."""


def large_delta(delta: float, unit: PrivacyUnit) -> str | None:
    """Return what to think of a δ that is large; None of others."""
    if delta <= LARGE_DELTA:
        return None
    return (
        f"δ = {_rounded_up(delta)} is large: with that probability all of one {unit.value} may "
        f"show; usual is far below 1 / number of {unit.value}s."
    )


def _rounded_up(value: float) -> str:
    if value == 0:
        return "0"
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    # The guard keeps 2.0000000000000004 from becoming 2.01.
    return f"{math.ceil(value / step - 1e-6) * step:.3g}"


@dataclass(frozen=True)
class Condition:
    """A precondition of a theorem and whether this run meets it."""

    text: str
    holds: bool


class PreconditionFailed(InvalidValue):
    """A theorem says nothing about this setting; the message lists what would have to change."""


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """An ε with everything it needs to mean something.

    ``epsilon`` is infinite where nothing is promised.
    """

    unit: PrivacyUnit
    relation: NeighboringRelation
    view: AdversaryView
    epsilon: float
    delta: float
    basis: Basis
    accountant: str
    source: str
    assumptions: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()

    @property
    def conditions_hold(self) -> bool:
        """Whether every precondition is met."""
        return all(condition.holds for condition in self.conditions)

    @property
    def large_delta(self) -> str | None:
        """What to think of δ, where it is large."""
        return None if math.isinf(self.epsilon) else large_delta(self.delta, self.unit)

    def statement(self) -> str:
        """The guarantee as one paragraph."""
        if math.isinf(self.epsilon):
            promise = "No (ε, δ) is promised"
        else:
            promise = f"ε = {epsilon_text(self.epsilon)} at δ = {_rounded_up(self.delta)}"
        parts = [
            f"{promise} for one {self.unit.value} under the relation {self.relation.value}, "
            f"against an adversary who sees {self.view.sees} "
            f"({self.basis}; {self.accountant}; {self.source})."
        ]
        if warning := self.large_delta:
            parts.append(warning)
        failed = [condition.text for condition in self.conditions if not condition.holds]
        if failed:
            parts.append("Conditions NOT met: " + "; ".join(failed) + ".")
        if self.assumptions:
            parts.append("Assumes: " + "; ".join(self.assumptions) + ".")
        if self.not_covered:
            parts.append("Not covered: " + "; ".join(self.not_covered) + ".")
        return " ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; an infinite ε becomes null."""
        facts = asdict(self)
        facts["epsilon"] = None if math.isinf(self.epsilon) else self.epsilon
        return {name: list(v) if isinstance(v, tuple) else v for name, v in facts.items()}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Guarantee:
        """A guarantee from its JSON form."""
        known = {field.name for field in fields(cls)}
        if unknown := set(facts) - known:
            raise InvalidValue(f"unknown fields {sorted(unknown)} in a guarantee")
        values = dict(facts)
        return cls(
            **{
                **values,
                "unit": PrivacyUnit(values["unit"]),
                "relation": NeighboringRelation(values["relation"]),
                "view": AdversaryView(values["view"]),
                "epsilon": math.inf if values["epsilon"] is None else float(values["epsilon"]),
                "assumptions": tuple(values.get("assumptions", ())),
                "not_covered": tuple(values.get("not_covered", ())),
                "conditions": tuple(Condition(**c) for c in values.get("conditions", ())),
            }
        )
