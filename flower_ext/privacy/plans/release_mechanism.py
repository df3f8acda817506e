"""The mechanism of a `ReleasePlan`: each round releases one noised sum of clients' uploads."""

from __future__ import annotations

from dataclasses import dataclass

from flower_ext.privacy.accounting.accountant import privacy_loss_of
from flower_ext.privacy.accounting.events import Release
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.guarantee import Guarantee
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.mechanisms.protections import (
    ClipAndNoise,
    ProtectedByServer,
    Protection,
)
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.privacy.theorems.client_level import client_level_guarantees


@dataclass(frozen=True, kw_only=True)
class ReleaseMechanism(NoisedSum):
    """A `NoisedSum` of clients' uploads, with its accounting."""

    @property
    def client_protects(self) -> bool:
        """True if clients add the noise."""
        return not self.noised_by_server

    def protection(self, run: RunSummary, cohort_size: int) -> Protection | None:
        """Return the protection that bounds an upload and adds one client's share of the noise.

        The share depends on ``cohort_size``. The protection is None if no client is asked.
        """
        if cohort_size == 0:  # nobody is asked; the server adds the whole noise
            return None
        if self.noised_by_server:
            return ProtectedByServer()
        return ClipAndNoise(
            of_units=run.method.bounds_units,
            clipping_norm=self.clipping_norm,
            noise_stddev=self.client_noise_stddev(cohort_size),
            noise_grid=self.noise_grid,
        )

    def releases(self, participations: Participations) -> dict[Release, int]:
        """Return all releases of the run so far, each with its count."""
        return {self.release: participations.rounds}

    def guarantees(self, run: RunSummary) -> list[Guarantee]:
        """Return the provable guarantee against each adversary. The units must be clients."""
        return client_level_guarantees(self, run, self.releases(run.participations))

    def spent(self, run: RunSummary) -> dict[str, float]:
        """Return ε against an adversary that sees the released models."""
        loss = privacy_loss_of(self.releases(run.participations), delta=self.delta)
        return {"epsilon_provable": loss.epsilon}
