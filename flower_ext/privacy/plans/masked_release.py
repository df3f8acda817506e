"""The mechanism of a `ReleasePlan` with secure sums, which also answers queries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting.events import Release
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.accounting.sampling import FullParticipation
from flower_ext.privacy.mechanisms.masked_noised_sum import MaskedNoisedSum
from flower_ext.privacy.mechanisms.protections import Protection
from flower_ext.privacy.plans.release_mechanism import ReleaseMechanism
from flower_ext.privacy.queries.vector_query import VectorQuery
from flower_ext.privacy.run_summary import RunSummary


@dataclass(frozen=True, kw_only=True)
class QuerySum(MaskedNoisedSum):
    """Mechanism of one answer to a query: a secure sum of one vector of every client.

    Parameters
    ----------
    query : VectorQuery
    worth : float
        Number of training rounds that reveal as much as one answer. With the noise multipliers σ of
        a round and σ_q of an answer, it is (σ/σ_q)².
    **options
        Fields of `MaskedNoisedSum`.
    """

    query: VectorQuery
    worth: float

    def count_answer(self, participations: Participations) -> None:
        """Count one released answer, for views of sums and for views of uploads."""
        parameters = self.sum_parameters
        participations.record_answer(
            self.query.name,
            range(self.num_clients),
            in_sum=self.worth * parameters.least_answers / parameters.honest_answers,
            in_upload=self.worth * parameters.least_answers,
        )


@dataclass(frozen=True, kw_only=True)
class MaskedRelease(MaskedNoisedSum, ReleaseMechanism):
    """A `ReleaseMechanism` whose sums are secure sums.

    Parameters
    ----------
    **options
        Fields of `MaskedNoisedSum`. ``queries`` are answered in addition to training, and ε covers
        the answers as well.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.queries and self.silos is not None:
            raise InvalidValue(
                f"queries={[query.name for query in self.queries]} with users in silos: expected "
                "none, because nothing bounds what one user contributes to a silo's answer. Leave "
                "the queries out; silos then report scores without noise, unless evaluate_every=0"
            )
        _ = self.query_sums  # refuses a query for whose noise there is no secure sum

    @property
    def query_sums(self) -> Sequence[QuerySum]:
        """The queries, each with the mechanism of its answers."""
        return [
            QuerySum(
                query=query,
                worth=(self.noise_multiplier / query.noise_multiplier) ** 2,
                sampling=FullParticipation(self.sampling.population),
                clipping_norm=query.norm,
                noise_multiplier=query.noise_multiplier,
                rounds=query.times,
                delta=self.delta,
                relation=self.relation,
                noise_placement=self.noise_placement,
            )
            for query in self.queries
        ]

    def protection(self, run: RunSummary, cohort_size: int) -> Protection | None:
        """Return the protection of an upload in cells; None if no client is asked."""
        if cohort_size == 0:
            return None
        return replace(self.cells_protection, of_units=run.method.bounds_units)

    def releases(self, participations: Participations) -> dict[Release, int]:
        """Return all releases of the run so far, with their counts: rounds and answers."""
        counts = Counter(super().releases(participations))
        for sums in self.query_sums:
            counts[sums.release] += participations.answers[sums.query.name]
        return dict(counts)
