"""Noised sums that are secure sums of whole numbers: the server sees no single upload."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting.events import Release
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.accounting.sampling import FullParticipation, PoissonSampling
from flower_ext.privacy.mechanisms.discrete_gaussian import share_stddev
from flower_ext.privacy.mechanisms.noise import NoiseSource
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.mechanisms.protections import ClipAndNoise, Protection
from flower_ext.privacy.mechanisms.quantization import Cells, cell_of, check_cell, out_of_cells
from flower_ext.privacy.mechanisms.round_mechanism import Aggregate, divided
from flower_ext.privacy.mechanisms.secure_sum import SecureSum, SumParameters, ring_bits
from flower_ext.privacy.mechanisms.updates import NamedArrays, RunningSum
from flower_ext.privacy.queries.vector_query import VectorQuery
from flower_ext.privacy.run_summary import RunSummary


@dataclass(frozen=True, kw_only=True)
class MaskedNoisedSum(NoisedSum):
    """A `NoisedSum` that a protocol computes, so that the server sees no single upload.

    An upload is an array of whole numbers of *cells*, with a client's share of discrete Gaussian
    noise. The silos, if there are any, are the members of the sum. `SecureSum` has the settings.

    Parameters
    ----------
    **options
        Fields of `NoisedSum`. ``noise_placement`` is a `SecureSum`. ``queries`` are answered in
        addition to training, and ε covers the answers as well.
    """

    is_masked: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_cell(self.cell, self.clipping_norm)
        if self.silos is None and isinstance(self.sampling, PoissonSampling):
            raise InvalidValue(
                "noise_placement=SecureSum(…) with Poisson sampling: expected cohorts of a "
                "fixed size (FixedSizeSampling), because a sum's noise would reveal how many "
                "clients were drawn, and amplification needs that number to be secret"
            )
        _ = self.sum_bits  # refuses a cohort for which there is no secure sum
        if self.queries and self.silos is not None:
            raise InvalidValue(
                f"queries={[query.name for query in self.queries]} with users in silos: expected "
                "none, because nothing bounds what one user contributes to a silo's answer. Leave "
                "the queries out; silos then report scores without noise, unless evaluate_every=0"
            )
        _ = self.query_sums  # refuses a query for whose noise there is no secure sum

    @property
    def secure_sum(self) -> SecureSum:
        """Settings of the secure sums that hide single uploads."""
        assert isinstance(self.noise_placement, SecureSum)
        return self.noise_placement

    @property
    def cell(self) -> float:
        """Step (cell) of the grid on which secure sums are computed, the same in every round."""
        return cell_of(self.noise_stddev)

    @property
    def cohort_size(self) -> int:
        """Number of clients in each secure sum, the same in every round.

        With ``silos``, this is the number of all silos. The server then asks the same clients,
        however many users are drawn, and the noise of each silo and of the sum is the same. Users
        may therefore be drawn by Poisson sampling, whose amplification needs the number of drawn
        users to be secret.
        """
        return round(self.sampling.expected_cohort_size) if self.silos is None else self.silos

    @property
    def num_clients(self) -> int:
        """Number of clients from which the members of secure sums are drawn."""
        return self.sampling.population if self.silos is None else self.silos

    @property
    def sum_parameters(self) -> SumParameters:
        """Parameters of the secure sums of all rounds, whose members are drawn from all clients."""
        return self.secure_sum.for_cohort(
            self.cohort_size, population=self.num_clients, rounds=self.rounds
        )

    @property
    def honest_noise(self) -> float:
        """Fraction of the noise variance from honest clients, if a sum has the fewest answers."""
        return self.sum_parameters.honest_answers / self.sum_parameters.least_answers

    @property
    def cells_protection(self) -> ClipAndNoise:
        """Protection that a client applies to its upload to a secure sum."""
        least = self.sum_parameters.least_answers
        share = share_stddev(self.noise_stddev / self.cell, least)
        return ClipAndNoise(
            clipping_norm=self.clipping_norm, noise_stddev=share * self.cell, cell=self.cell
        )

    @property
    def sum_bits(self) -> int:
        """Number of bits of the ring of secure sums: enough for a sum over the whole population."""
        noise = self.cells_protection.noise_stddev / self.cell * math.sqrt(self.cohort_size)
        return ring_bits(self.largest_sum / self.cell, noise)

    @property
    def largest_sum(self) -> float:
        """Largest norm of a secure sum before noise, if every unit contributes a norm of C."""
        units = self.cohort_size if self.silos is None else self.sampling.population
        return units * self.clipping_norm

    def aggregate_sum(
        self, cells: Cells, *, answered: int, noise: NoiseSource, like: NamedArrays
    ) -> Aggregate:
        """Return the average of a round, from the result of its secure sum.

        The server adds the noise shares of the clients that did not answer. The noise of the
        release thus does not depend on the number of answers.

        Parameters
        ----------
        cells : Mapping[str, ndarray]
            Sum of the answers' noised updates, in whole numbers of cells.
        answered : int
            Number of answers in the sum. It is at least ``sum_parameters.least_answers``, so the
            sum carries noise of stddev σC or more.
        noise : NoiseSource
            The server's source of noise.
        like : NamedArrays
            Names, shapes and types of the result.

        Raises
        ------
        RoundDiscarded
            The sum is larger than honest members' answers could make it.
        """
        # Shares are sized for the least number of answers, so more answers carry more noise.
        share = self.cells_protection.noise_stddev
        missing = share * math.sqrt(self.cohort_size - answered)
        # Discrete noise has a smallest stddev above 0, so the case without missing shares is apart.
        noised = noise.add_discrete_gaussian(cells, missing / self.cell) if missing else cells
        value = out_of_cells(noised, self.cell, like)
        stddev = share * math.sqrt(self.cohort_size)
        self.refuse_spoiled(value, bound=self.largest_sum, stddev=stddev)
        mean = divided(value, self.sampling.expected_cohort_size, like)
        return Aggregate(value=mean, answered=answered, topped_up_stddev=missing)

    def begin_sum(self, like: NamedArrays) -> RunningSum:
        """Raise `InvalidValue`, because the protocol computes the sum; use `aggregate_sum`."""
        raise InvalidValue(
            "begin_sum: expected a plan without noise_placement=SecureSum(…), because the "
            "protocol of a secure sum adds up the uploads; pass its result to aggregate_sum"
        )

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
        """Return all rounds and all answers to queries so far, as releases with their counts."""
        counts = Counter(super().releases(participations))
        for sums in self.query_sums:
            counts[sums.release] += participations.answers[sums.query.name]
        return dict(counts)


@dataclass(frozen=True, kw_only=True)
class QuerySum(MaskedNoisedSum):
    """Mechanism of one answer to a query: a secure sum, to which each client adds one vector."""

    query: VectorQuery
    worth: float
    """Number of training rounds that reveal as much as one answer. With the noise multipliers σ of
    a round and σ_q of an answer, it is (σ/σ_q)²."""

    def count_answer(self, participations: Participations) -> None:
        """Count one released answer as participations of every client.

        An answer counts differently for adversaries that see sums and that see single uploads.
        """
        parameters = self.sum_parameters
        participations.record_answer(
            self.query.name,
            range(self.num_clients),
            in_sum=self.worth * parameters.least_answers / parameters.honest_answers,
            in_upload=self.worth * parameters.least_answers,
        )
