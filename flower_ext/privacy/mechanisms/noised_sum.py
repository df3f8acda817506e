"""One noised sum per round: its sampler, clipping norm, noise and aggregation in one object."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from flower_ext.checks import (
    Checked,
    Count,
    NotNegative,
    ProperFraction,
    Scale,
    is_number,
    require_at_least_one,
    require_scale,
)
from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting.accountant import privacy_loss_of
from flower_ext.privacy.accounting.events import Release
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.accounting.sampling import FullParticipation, PoissonSampling, Sampling
from flower_ext.privacy.mechanisms.adaptive_clipping import AdaptiveClipping
from flower_ext.privacy.mechanisms.bounds import ClippedSum
from flower_ext.privacy.mechanisms.discrete_gaussian import share_stddev
from flower_ext.privacy.mechanisms.noise import NoiseSource, largest_noised_norm, noise_grid
from flower_ext.privacy.mechanisms.protections import ClipAndNoise, ProtectedByServer, Protection
from flower_ext.privacy.mechanisms.quantization import CellSum, cell_of, check_cell
from flower_ext.privacy.mechanisms.round_mechanism import Aggregate, RoundDiscarded, RoundMechanism
from flower_ext.privacy.mechanisms.secure_sum import SecureSum, SumParameters, ring_bits
from flower_ext.privacy.mechanisms.updates import NamedArrays, RunningSum, divided, l2_norm
from flower_ext.privacy.queries.vector_query import VectorQuery
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.privacy.units import NeighboringRelation, PrivacyUnit

NoisePlacement = Literal["client", "server"]


@dataclass(frozen=True, kw_only=True)
class ReleaseTerms(Checked):
    """The fields that `ReleasePlan` and `NoisedSum` share; `ReleasePlan` explains them."""

    sampling: Sampling
    clipping_norm: float | AdaptiveClipping
    noise_multiplier: Scale
    rounds: Count
    delta: ProperFraction
    relation: NeighboringRelation | None = None
    noise_placement: NoisePlacement | SecureSum = "client"
    queries: tuple[VectorQuery, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(norm := self.clipping_norm, AdaptiveClipping):
            norm.count_noise(self.noise_multiplier, self.sampling.expected_cohort_size)
        else:
            require_scale("clipping_norm", norm)
            object.__setattr__(self, "clipping_norm", float(norm))
        if self.secure_sum is None and self.noise_placement not in ("client", "server"):
            raise InvalidValue(
                f"noise_placement={self.noise_placement!r}: expected 'client', 'server' or "
                "SecureSum()"
            )
        if self.relation is None:
            object.__setattr__(self, "relation", self.sampling.default_relation)
        self._check_queries()

    def _check_queries(self) -> None:
        object.__setattr__(self, "queries", tuple(self.queries))
        names = [query.name for query in self.queries]
        if len({*names}) < len(names):
            raise InvalidValue(f"queries={names}: expected each kind of query at most once")
        evaluated = [query.name for query in self.queries if query.schedule == "in evaluations"]
        if len(evaluated) > 1:
            raise InvalidValue(
                f"queries={evaluated}: expected at most one query with schedule='in evaluations'"
            )
        if names and self.secure_sum is None:
            raise InvalidValue(
                f"queries={names} with noise_placement={self.noise_placement!r}: expected "
                "noise_placement=SecureSum(…), because clients answer queries in secure sums only, "
                "even if the server may see their updates"
            )

    def terms(self) -> dict[str, Any]:
        """Return the values of the fields of `ReleaseTerms`, by name."""
        return {field.name: getattr(self, field.name) for field in fields(ReleaseTerms)}

    @property
    def secure_sum(self) -> SecureSum | None:
        """Settings of the secure sums that hide single uploads; None without secure sums."""
        return self.noise_placement if isinstance(self.noise_placement, SecureSum) else None

    @property
    def noised_by_server(self) -> bool:
        """True if the server adds the noise, after it has seen the uploads."""
        return self.noise_placement == "server"


@dataclass(frozen=True, kw_only=True)
class MaskedSums:
    """The secure sum of a round: its members, its grid and its noise."""

    parameters: SumParameters
    cell: float
    """Step (cell) of the grid on which the sum is computed."""
    share_stddev: float
    """Standard deviation of one client's share of the discrete Gaussian noise."""
    bits: int
    """Number of bits of the ring: enough for a sum over the largest possible cohort."""


@dataclass(frozen=True, kw_only=True)
class NoisedSum(ReleaseTerms, RoundMechanism):
    """Mechanism of a round that releases one noised average.

    With a `SecureSum`, a protocol adds up the uploads, and the server sees no single upload. An
    upload then counts *cells*, the steps of a public grid, in whole numbers, and includes a
    client's share of discrete Gaussian noise. The silos, if there are any, are the members of the
    sum.

    Guarantees
    ----------
    Whatever the number of answers, the average that `aggregate` returns is a noised sum, divided by
    a public constant. If `aggregate` raises an error, it releases nothing. The sum has Gaussian
    noise of standard deviation ``noise_multiplier * clipping_norm`` or more.

    Parameters
    ----------
    sampling, clipping_norm, noise_multiplier, …
        As for `ReleasePlan`.
    silos : int, optional
        Number of silos, among which each user's data may be divided. The server asks all of them
        in every round. None if each unit is a client.
    sensitivity : float
        Largest L2 distance by which one unit moves a sum, in clipping norms. It is at least 1, and
        more if a unit contributes to several uploads.
    approximation_error : float
        Bound on each of two errors, in clipping norms: the L2 distance of a sum from the exact sum,
        and the L2 distance by which a unit that was not drawn moves a sum. Above 0 if a protocol
        computes sums under encryption.
    """

    clipping_norm: float
    silos: Count | None = None
    sensitivity: float = 1.0
    approximation_error: NotNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (is_number(self.sensitivity) and 1 <= self.sensitivity < math.inf):
            raise InvalidValue(
                f"sensitivity={self.sensitivity!r}: expected 1 or more, because one unit can move "
                "a sum by a whole clipping norm"
            )
        _ = self.release  # refuses a relation that does not fit the sampling
        if self.secure_sum is None:
            return
        check_cell(cell_of(self.noise_stddev), self.clipping_norm)
        if self.silos is None and isinstance(self.sampling, PoissonSampling):
            raise InvalidValue(
                "noise_placement=SecureSum(…) with Poisson sampling: expected cohorts of a "
                "fixed size (FixedSizeSampling), because a sum's noise would reveal how many "
                "clients were drawn, and amplification needs that number to be secret"
            )
        _ = self.masked  # refuses a cohort for which there is no secure sum
        if self.queries and self.silos is not None:
            raise InvalidValue(
                f"queries={[query.name for query in self.queries]} with users in silos: expected "
                "none, because nothing bounds what one user contributes to a silo's answer. Remove "
                "the queries from the plan. Silos then report scores without noise; set "
                "evaluate_every=0 if they should report none"
            )
        _ = self.query_sums  # refuses a query for whose noise there is no secure sum

    @property
    def unit(self) -> PrivacyUnit:
        """The privacy unit: a client, or a user whose data lie in several silos."""
        return PrivacyUnit.CLIENT if self.silos is None else PrivacyUnit.USER

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Assumptions about the mechanism itself, which all its provable guarantees share."""
        return ()

    @property
    def release(self) -> Release:
        """One round's release, for the accountant and the ledger."""
        assert self.relation is not None
        return Release(
            sampling=self.sampling,
            noise_multiplier=self.noise_multiplier / self.sensitivity,
            relation=self.relation,
            approximation_error=self.approximation_error / self.noise_multiplier,
        )

    @property
    def noise_stddev(self) -> float:
        """Standard deviation of the noise on a complete sum, in each coordinate."""
        return self.noise_multiplier * self.clipping_norm

    @property
    def mean_noise_stddev(self) -> float:
        """Standard deviation of the noise in each coordinate of the released mean."""
        return self.noise_stddev / self.sampling.expected_cohort_size

    @property
    def noise_grid(self) -> float:
        """Step of the grid on which all noised uploads of a round, and their sum, lie.

        A client's share of the noise depends on the cohort size, which may be secret; the grid does
        not. Sums of numbers on the grid lie on the grid as well.
        """
        return noise_grid(self.noise_stddev)

    @property
    def num_members(self) -> int:
        """Number of clients in each secure sum, the same in every round.

        With ``silos``, this is the number of all silos. The server then asks the same clients,
        however many users are drawn, and the noise of each silo and of the sum is the same. Users
        may therefore be drawn by Poisson sampling, whose amplification needs the number of drawn
        users to be secret.
        """
        return round(self.sampling.expected_cohort_size) if self.silos is None else self.silos

    @property
    def num_clients(self) -> int:
        """Number of clients, or of silos, from which cohorts are drawn."""
        return self.sampling.population if self.silos is None else self.silos

    @property
    def masked(self) -> MaskedSums | None:
        """The secure sum that hides single uploads; None without a `SecureSum`."""
        if self.secure_sum is None:
            return None
        cell = cell_of(self.noise_stddev)
        parameters = self.secure_sum.for_cohort(
            self.num_members, population=self.num_clients, rounds=self.rounds
        )
        share = share_stddev(self.noise_stddev / cell, parameters.least_answers) * cell
        noise = share / cell * math.sqrt(self.num_members)
        bits = ring_bits(self._largest_sum / cell, noise)
        return MaskedSums(parameters=parameters, cell=cell, share_stddev=share, bits=bits)

    @property
    def _largest_sum(self) -> float:
        """Largest norm of a secure sum before noise, if each unit contributes the clipping norm."""
        units = self.num_members if self.silos is None else self.sampling.population
        return units * self.clipping_norm

    def client_noise_stddev(self, cohort_size: int) -> float:
        """Return the stddev of one client's share of the noise; 0 if the server adds the noise.

        The shares of all clients in a cohort add up to noise of the stddev σC, `noise_stddev`, so
        each share has the stddev σC/√cohort. Pass the size of the drawn cohort, also under Poisson
        sampling: with the expected size, the sum of a small cohort would carry too little noise. In
        a secure sum, the shares of the fewest clients that may answer add up to σC, whatever
        ``cohort_size`` is.
        """
        if self.noised_by_server:
            return 0.0
        if (masked := self.masked) is not None:
            return masked.share_stddev
        require_at_least_one("cohort_size", cohort_size)
        return self.noise_stddev / math.sqrt(cohort_size)

    @property
    def client_protects(self) -> bool:
        """True if clients add the noise."""
        return not self.noised_by_server

    def client_protection(self, cohort_size: int) -> ClipAndNoise:
        """Return the protection that clips an upload and adds one client's share of the noise."""
        masked = self.masked
        return ClipAndNoise(
            clipping_norm=self.clipping_norm,
            noise_stddev=self.client_noise_stddev(cohort_size),
            cell=None if masked is None else masked.cell,
            noise_grid=self.noise_grid if masked is None else None,
        )

    def protection(self, run: RunSummary, cohort_size: int) -> Protection | None:
        """Return the protection of an upload; None if no client is asked."""
        if cohort_size == 0:  # the server adds the whole noise
            return None
        if self.noised_by_server:
            return ProtectedByServer()
        return replace(self.client_protection(cohort_size), of_units=run.method.bounds_units)

    @property
    def query_sums(self) -> Sequence[QuerySum]:
        """The queries, each with the mechanism of its answers."""
        return [
            QuerySum(
                query=query,
                equivalent_rounds=(self.noise_multiplier / query.noise_multiplier) ** 2,
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

    @property
    def planned_answers(self) -> Mapping[Release, int]:
        """All planned answers to queries, as releases with their counts."""
        counts: Counter[Release] = Counter()
        for sums in self.query_sums:  # two queries may have equal releases
            counts[sums.release] += sums.query.times
        return counts

    def releases(self, participations: Participations) -> dict[Release, int]:
        """Return all rounds and all answers to queries so far, as releases with their counts."""
        counts = Counter({self.release: participations.rounds})
        for sums in self.query_sums:
            counts[sums.release] += participations.answers[sums.query.name]
        return dict(counts)

    def spent(self, run: RunSummary) -> dict[str, float]:
        """Return ``epsilon_provable``, against an adversary that sees the released models."""
        loss = privacy_loss_of(self.releases(run.participations), delta=self.delta)
        return {"epsilon_provable": loss.epsilon}

    def begin_sum(self, like: NamedArrays) -> RunningSum:
        """Return an empty sum.

        If the server adds the noise, the sum clips each added upload. With a `SecureSum`, uploads
        are whole numbers of cells.
        """
        if (masked := self.masked) is not None:
            return CellSum(like, masked.cell)
        return ClippedSum(like, self.clipping_norm) if self.noised_by_server else RunningSum(like)

    def aggregate(self, summed: RunningSum, *, cohort_size: int, noise: NoiseSource) -> Aggregate:
        """Return the noised sum of a round's uploads, divided by the expected cohort size.

        If the server adds the noise, it also bounds every upload, so the guarantee holds whatever
        clients send. If clients add the noise, uploads arrive bounded and noised, and the server
        adds the noise shares of the clients that did not answer.

        Refuse more uploads than clients that were asked, a sum that does not come from `begin_sum`,
        and a spoiled secure sum (see `refuse_spoiled`).
        """
        by_server, masked, answered = self.noised_by_server, self.masked, summed.count
        cell = None if masked is None else masked.cell
        if by_server and summed.bound > self.clipping_norm:
            raise InvalidValue(
                f"summed.bound={summed.bound}: expected at most {self.clipping_norm}, the clipping "
                "norm; make the sum with begin_sum(), which clips each upload"
            )
        if summed.cell != cell:
            raise InvalidValue(
                f"summed.cell={summed.cell}: expected {cell}; make the sum with begin_sum()"
            )
        if answered > cohort_size:
            raise InvalidValue(
                f"{answered} uploads from a cohort of {cohort_size}: expected at most one upload "
                "per client"
            )
        if masked is None:
            # Variances of shares add up. The server adds the part of σ²C² of the missing clients.
            missing = 1.0 if by_server or not cohort_size else 1 - answered / cohort_size
            stddev = self.noise_stddev * math.sqrt(missing)
            value = noise.add_gaussian(summed.value, stddev, grid=self.noise_grid)
        else:
            # Shares are sized for the least number of answers, so more answers carry more noise.
            stddev, cells = masked.share_stddev * math.sqrt(cohort_size - answered), summed.value
            if stddev:  # the sampler of discrete noise refuses a stddev of 0
                cells = noise.add_discrete_gaussian(cells, stddev / masked.cell)
            value = {name: cells[name] * masked.cell for name in summed.like}
            whole = masked.share_stddev * math.sqrt(cohort_size)
            refuse_spoiled(value, bound=self._largest_sum, stddev=whole)
        mean = divided(value, self.sampling.expected_cohort_size, summed.like)
        return Aggregate(
            value=mean, answered=answered, topped_up_stddev=0.0 if by_server else stddev
        )


@dataclass(frozen=True, kw_only=True)
class QuerySum(NoisedSum):
    """Mechanism of one answer to a query: a secure sum, to which each client adds one vector."""

    query: VectorQuery
    equivalent_rounds: float
    """Number of training rounds that reveal as much as one answer. With the noise multipliers σ of
    a round and σ_q of an answer, this number is (σ/σ_q)²."""

    def count_answer(self, participations: Participations) -> None:
        """Count one released answer as participations of every client.

        An answer counts with one weight against adversaries that see sums, and with another weight
        against adversaries that see single uploads.
        """
        assert self.masked is not None  # no other plan accepts queries
        parameters = self.masked.parameters
        participations.record_answer(
            self.query.name,
            range(self.num_clients),
            in_sum=self.equivalent_rounds * parameters.least_answers / parameters.honest_answers,
            in_upload=self.equivalent_rounds * parameters.least_answers,
        )


def refuse_spoiled(value: NamedArrays, *, bound: float, stddev: float) -> None:
    """Raise `RoundDiscarded` if a noised sum is larger than honest members could make it.

    The sum of honest members has at most the norm ``bound`` before noise, and noise of the standard
    deviation ``stddev``. The function refuses such a sum with probability `IMPROBABLE` at most.
    This holds for Gaussian shares of noise and for discrete shares, which are subgaussian with
    their stddev.

    The decision depends on the noised sum alone, never on an upload. It is post-processing of a
    release that the ledger counts in any case, so it costs no privacy, and δ need not count a
    wrong refusal. The server cannot name the member that spoiled the sum, because masks hide each
    upload. The check misses a bad upload that leaves the sum within the limit.
    """
    numbers = sum(array.size for array in value.values())
    limit = bound + largest_noised_norm(0.0, stddev, numbers)
    if not (norm := l2_norm(value)) <= limit:
        raise RoundDiscarded(
            f"the noised sum has a norm of {norm:.4g}: expected at most {limit:.4g} from "
            "honest members; a member spoiled it by an upload that was not clipped and noised, "
            "so nothing is released"
        )
