"""Guarantees: an ε with its unit, relation, view, δ, accountant and assumptions.

Published and provable guarantees have the same fields. If they differ, reports show both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from flower_ext.errors import InvalidValue
from flower_ext.json_record import NOT_WRITTEN, JsonRecord
from flower_ext.privacy.accounting.events import Counts
from flower_ext.privacy.units import AdversaryView, NeighboringRelation, PrivacyUnit

Basis = Literal["published", "provable"]


def epsilon_text(epsilon: float) -> str:
    """Return ε with three significant digits, rounded up so that a text does not understate ε.

    The function ignores an excess of less than a millionth of the last digit: it comes from
    rounding, and would turn 2 into 2.01. An ε of 0 becomes "0.001", because a 0 would read as if
    nothing could be revealed, although δ is above 0. An infinite ε becomes "inf".
    """
    return _rounded_up(epsilon or 1e-3)


def is_large(delta: float, units: float | None = None) -> bool:
    """Return True if δ is above 0.001, or is at least 1/``units``."""
    return delta > 1e-3 or delta * (units or 0) >= 1


def large_delta(delta: float, unit: PrivacyUnit, units: int | None = None) -> str | None:
    """Return a warning about ``delta`` if `is_large` holds for it; otherwise None.

    With δ = 1/N, a mechanism may publish all data of one unit, drawn at random from N units.
    """
    if not is_large(delta, units):
        return None
    if units and delta * units >= 1:
        return (
            f"δ = {_rounded_up(delta)} is large for {units} {unit.value}s: it permits publishing "
            f"all of one random {unit.value}'s data; choose δ far below 1/{units}."
        )
    return (
        f"δ = {_rounded_up(delta)} is large: with that probability all of one {unit.value}'s data "
        f"may be revealed; choose δ far below 1 / number of {unit.value}s."
    )


def _rounded_up(value: float) -> str:
    if value == 0 or math.isinf(value):
        return f"{value:g}"
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / step - 1e-6) * step:.3g}"


@dataclass(frozen=True)
class Condition(JsonRecord):
    """A precondition of a theorem, with a flag that is True if this run meets it."""

    text: str
    holds: bool


class PreconditionFailed(InvalidValue):
    """A theorem does not cover this setting; the message lists the conditions that fail."""


@dataclass(frozen=True, kw_only=True)
class Guarantee(JsonRecord):
    """An ε, and everything that a reader needs to interpret this ε.

    ``epsilon`` is infinite if nothing is guaranteed.
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
    units: int | None = None
    """Number of privacy units of the run; None if it is not known."""
    releases: Counts | None = field(default=None, compare=False, repr=False, metadata=NOT_WRITTEN)
    """Releases that together have this loss; None if only (ε, δ) is known. Not written to files."""

    @property
    def conditions_hold(self) -> bool:
        """True if the run meets every precondition."""
        return all(condition.holds for condition in self.conditions)

    @property
    def large_delta(self) -> str | None:
        """A warning if δ is large; otherwise None."""
        if math.isinf(self.epsilon):
            return None
        return large_delta(self.delta, self.unit, self.units)

    def statement(self) -> str:
        """Return the guarantee as one paragraph."""
        if math.isinf(self.epsilon):
            bound = "No (ε, δ) is promised"
        else:
            nothing_leaves = self.epsilon == self.delta == 0
            epsilon = "0" if nothing_leaves else epsilon_text(self.epsilon)
            bound = f"ε = {epsilon} at δ = {_rounded_up(self.delta)}"
        lists = {
            "Conditions NOT met": [each.text for each in self.conditions if not each.holds],
            "Assumes": self.assumptions,
            "Not covered": self.not_covered,
        }
        parts = [
            f"{bound} for one {self.unit.value} under the relation {self.relation.value}, "
            f"against an adversary who sees {self.view.sees} "
            f"({self.basis}; {self.accountant}; {self.source}).",
            self.large_delta or "",
            *(f"{name}: {'; '.join(texts)}." for name, texts in lists.items() if texts),
        ]
        return " ".join(filter(None, parts))


def claim_against(view: AdversaryView, claims: Sequence[Guarantee]) -> Guarantee | None:
    """Return the provable guarantee that covers a view, as `AdversaryView.covering` finds it."""
    by_view = {claim.view: claim for claim in reversed(claims) if claim.basis == "provable"}
    return view.covering(by_view)
