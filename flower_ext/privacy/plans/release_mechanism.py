"""The mechanism of a `ReleasePlan`: each round releases one noised sum of clients' uploads."""

from __future__ import annotations

from dataclasses import dataclass

from flower_ext.privacy.guarantee import Guarantee
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.privacy.theorems.client_level import client_level_guarantees


@dataclass(frozen=True, kw_only=True)
class ReleaseMechanism(NoisedSum):
    """A `NoisedSum` with its guarantees."""

    def guarantees(self, run: RunSummary) -> list[Guarantee]:
        """Return the provable guarantee against each adversary. The units must be clients."""
        return client_level_guarantees(self, run)
