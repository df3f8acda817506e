"""The mechanism of a `ReleasePlan`: each round releases one noised sum of clients' uploads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

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
from flower_ext.privacy.queries.vector_query import VectorQuery
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
        if self.secure_sum is not None:
            return replace(self.cells_protection, of_units=run.method.bounds_units)
        return ClipAndNoise(
            of_units=run.method.bounds_units,
            clipping_norm=self.clipping_norm,
            noise_stddev=self.client_noise_stddev(cohort_size),
            noise_grid=self.noise_grid,
        )

    def releases(self, participations: Participations) -> dict[Release, int]:
        """Return all releases of the run so far, each with its count.

        A release is the noised sum of a training round, or of an answer to a query.
        """
        counts = Counter({self.release: participations.rounds})
        for query in self.queries:
            counts[self.of_query(query).release] += participations.answers[query.name]
        return dict(counts)

    def count_answer(self, query: VectorQuery, participations: Participations) -> None:
        """Count one released answer to a query, for views of sums and for views of uploads.

        A count of 1 is a training round with noise multiplier σ. An answer with noise multiplier
        σ_q reveals as much as (σ/σ_q)² training rounds, and counts as that many.
        """
        parameters = self.of_query(query).sum_parameters
        worth = (self.noise_multiplier / query.noise_multiplier) ** 2
        participations.record_answer(
            query.name,
            range(self.sampling.population),
            in_sum=worth * parameters.least_answers / parameters.honest_answers,
            in_upload=worth * parameters.least_answers,
        )

    def guarantees(self, run: RunSummary) -> list[Guarantee]:
        """Return the provable guarantee against each adversary. The units must be clients."""
        return client_level_guarantees(self, run, self.releases(run.participations))

    def spent(self, run: RunSummary) -> dict[str, float]:
        """Return ε against an adversary that sees the released models."""
        loss = privacy_loss_of(self.releases(run.participations), delta=self.delta)
        return {"epsilon_provable": loss.epsilon}
