"""A builder of the guarantees of one run, which share unit, relation, δ and assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flower_ext.privacy.accounting.events import PrivacyLoss
from flower_ext.privacy.guarantee import Condition, Guarantee
from flower_ext.privacy.units import AdversaryView, NeighboringRelation, PrivacyUnit


@dataclass(frozen=True, kw_only=True)
class Claims:
    """The facts that all guarantees of a run have in common.

    Parameters
    ----------
    unit, relation, delta
        As in `Guarantee`.
    assumptions : tuple of str
        Assumptions of every provable guarantee. A published one has its theorem's alone.
    not_covered : Sequence[str]
        Values that leave the clients without being covered by any provable guarantee.
    """

    unit: PrivacyUnit
    relation: NeighboringRelation
    delta: float
    assumptions: tuple[str, ...] = ()
    not_covered: Sequence[str] = ()

    def published(self, view: AdversaryView, epsilon: float, **details: Any) -> Guarantee:
        """Return the guarantee of a theorem as its paper states it.

        ``details`` are other fields of `Guarantee`.
        """
        return Guarantee(
            unit=self.unit,
            relation=self.relation,
            view=view,
            epsilon=epsilon,
            delta=self.delta,
            basis="published",
            **details,
        )

    def provable(
        self,
        view: AdversaryView,
        loss: PrivacyLoss,
        source: str,
        *assumptions: str,
        relation: NeighboringRelation | None = None,
        conditions: tuple[Condition, ...] = (),
    ) -> Guarantee:
        """Return a provable guarantee, which rests on further ``assumptions`` as well.

        ``relation`` is by default that of the run.
        """
        return Guarantee(
            unit=self.unit,
            relation=relation or self.relation,
            view=view,
            epsilon=loss.epsilon,
            delta=self.delta,
            basis="provable",
            accountant=loss.accountant,
            source=source,
            assumptions=(*self.assumptions, *assumptions),
            conditions=conditions,
            not_covered=tuple(self.not_covered),
        )
