"""One noised sum per round: its sampler, clipping norm, noise and aggregation in one object."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from flower_ext.checks import (
    Checked,
    Count,
    NotNegative,
    Positive,
    ProperFraction,
    is_number,
    require_at_least_one,
    require_one_of,
    require_positive,
)
from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting.accountant import privacy_loss_of
from flower_ext.privacy.accounting.events import Release
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.accounting.sampling import Sampling
from flower_ext.privacy.mechanisms.adaptive_clipping import AdaptiveClipping
from flower_ext.privacy.mechanisms.bounds import ClippedSum
from flower_ext.privacy.mechanisms.noise import NoiseSource, largest_noised_norm, noise_grid
from flower_ext.privacy.mechanisms.protections import ClipAndNoise, ProtectedByServer, Protection
from flower_ext.privacy.mechanisms.round_mechanism import (
    Aggregate,
    RoundDiscarded,
    RoundMechanism,
    divided,
)
from flower_ext.privacy.mechanisms.secure_sum import SecureSum
from flower_ext.privacy.mechanisms.updates import NamedArrays, RunningSum, l2_norm
from flower_ext.privacy.queries.vector_query import VectorQuery
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.privacy.units import NeighboringRelation, PrivacyUnit

NoisePlacement = Literal["client", "server"]


@dataclass(frozen=True, kw_only=True)
class ReleaseTerms(Checked):
    """The values that a user chooses for a run of noised sums; see `ReleasePlan`."""

    sampling: Sampling
    clipping_norm: float | AdaptiveClipping
    noise_multiplier: Positive
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
            require_positive("clipping_norm", norm)
        if not isinstance(self.noise_placement, SecureSum):
            require_one_of("noise_placement", self.noise_placement, ("client", "server"))
        if self.relation is None:
            object.__setattr__(self, "relation", self.sampling.default_relation)
        self._check_queries()

    def _check_queries(self) -> None:
        object.__setattr__(self, "queries", tuple(self.queries))
        names = [query.name for query in self.queries]
        if len({*names}) < len(names):
            raise InvalidValue(f"queries={names}: expected each kind of query once")
        evaluated = [query.name for query in self.queries if query.schedule == "in evaluations"]
        if len(evaluated) > 1:
            raise InvalidValue(
                f"queries={evaluated}: expected at most one query with schedule='in evaluations'"
            )
        if names and self.secure_sum is None:
            raise InvalidValue(
                f"queries={names} with noise_placement={self.noise_placement!r}: expected "
                "noise_placement=SecureSum(…), because otherwise the server would see each "
                "client's vector with at most that client's share of the noise"
            )

    @property
    def secure_sum(self) -> SecureSum | None:
        """Settings of the secure sums that hide single uploads; None without secure sums."""
        return self.noise_placement if isinstance(self.noise_placement, SecureSum) else None

    @property
    def noised_by_server(self) -> bool:
        """True if the server adds the noise, after it has seen the uploads."""
        return self.noise_placement == "server"


@dataclass(frozen=True, kw_only=True)
class NoisedSum(ReleaseTerms, RoundMechanism):
    """Mechanism of a round that releases one noised average.

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

    is_masked: ClassVar[bool] = False
    """True if the protocol of a secure sum adds up the uploads (`MaskedNoisedSum`)."""

    clipping_norm: float
    silos: Count | None = None
    sensitivity: float = 1.0
    approximation_error: NotNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.noise_placement, SecureSum) is not self.is_masked:
            expected = "SecureSum(…)" if self.is_masked else "'client' or 'server'"
            raise InvalidValue(
                f"noise_placement={self.noise_placement!r} of a {type(self).__name__}: expected "
                f"{expected}"
            )
        if not (is_number(self.sensitivity) and 1 <= self.sensitivity < math.inf):
            raise InvalidValue(
                f"sensitivity={self.sensitivity!r}: expected 1 or more, because one unit can move "
                "a sum by a whole clipping norm"
            )
        _ = self.release  # refuses a relation that does not fit the sampling

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
        """Standard deviation σC of the noise on a complete sum."""
        return self.noise_multiplier * self.clipping_norm

    @property
    def mean_noise_stddev(self) -> float:
        """σC/m: standard deviation of the noise in a coordinate of the released mean."""
        return self.noise_stddev / self.sampling.expected_cohort_size

    @property
    def noise_grid(self) -> float:
        """Step of the grid on which all noised uploads and sums lie, the same in every round.

        A client's share of the noise depends on the cohort size, which may be secret; the grid does
        not. Sums of numbers on the grid lie on the grid as well.
        """
        return noise_grid(self.noise_stddev)

    def client_noise_stddev(self, cohort_size: int) -> float:
        """Return the stddev σC/√cohort of one client's share; 0 if the server adds the noise.

        The shares of all clients in a cohort add up to the stddev σC. Pass the size of the drawn
        cohort, also under Poisson sampling: with the expected size, the sum of a small cohort would
        carry too little noise.
        """
        if self.noised_by_server:
            return 0.0
        require_at_least_one("cohort_size", cohort_size)
        return self.noise_stddev / math.sqrt(cohort_size)

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

    def spent(self, run: RunSummary) -> dict[str, float]:
        """Return ε against an adversary that sees the released models."""
        loss = privacy_loss_of(self.releases(run.participations), delta=self.delta)
        return {"epsilon_provable": loss.epsilon}

    @staticmethod
    def refuse_spoiled(value: NamedArrays, *, bound: float, stddev: float) -> None:
        """Refuse a noised sum that is larger than honest members could make it.

        A sum of honest answers is refused with probability `IMPROBABLE` at most.

        The decision depends on the noised sum alone, never on an upload. It is post-processing of a
        release that the ledger counts in any case, so it costs no privacy, and δ need not count a
        wrong refusal. This bound holds for Gaussian shares of noise and for discrete shares, which
        are subgaussian with their stddev. The server cannot name the member that spoiled the sum,
        because masks hide each upload. The check does not find a bad upload that leaves the sum
        within the limit.

        Parameters
        ----------
        value : Mapping[str, array]
            The noised sum.
        bound : float
            Largest norm that the sum of honest members has before noise.
        stddev : float
            Standard deviation of the noise in the sum.

        Raises
        ------
        RoundDiscarded
            The sum is too large, so a member must have spoiled it.
        """
        numbers = sum(array.size for array in value.values())
        limit = bound + largest_noised_norm(0.0, stddev, numbers)
        if not (norm := l2_norm(value)) <= limit:
            raise RoundDiscarded(
                f"the noised sum has a norm of {norm:.4g}: expected at most {limit:.4g} from "
                "honest members; a member spoiled it by an upload that was not clipped and noised, "
                "so nothing is released"
            )

    def begin_sum(self, like: NamedArrays) -> RunningSum:
        """Return an empty sum. If the server adds the noise, the sum clips each added upload."""
        return ClippedSum(like, self.clipping_norm) if self.noised_by_server else RunningSum(like)

    def aggregate(self, summed: RunningSum, *, cohort_size: int, noise: NoiseSource) -> Aggregate:
        """Return the noised sum of a round's uploads, divided by the expected cohort size.

        If the server adds the noise, it also bounds every upload, so the guarantee holds whatever
        clients send. If clients add the noise, uploads arrive bounded and noised, and the server
        adds the noise shares of the clients that did not answer.

        Raises
        ------
        ValueError
            There are more uploads than clients that were asked, or ``summed`` clips uploads to a
            larger norm than C.
        """
        by_server, answered = self.noised_by_server, summed.count
        if by_server and summed.bound > self.clipping_norm:
            raise InvalidValue(
                f"summed.bound={summed.bound}: expected at most {self.clipping_norm}, the clipping "
                "norm; make the sum with begin_sum(), which clips each upload"
            )
        if answered > cohort_size:
            raise InvalidValue(
                f"{answered} uploads from a cohort of {cohort_size}: expected at most one upload "
                "per client"
            )
        # Variances of shares add up. The server adds the part of σ²C² that missing clients owe.
        missing = 1.0 if by_server or not cohort_size else 1 - answered / cohort_size
        stddev = self.noise_stddev * math.sqrt(missing)
        noised = noise.add_gaussian(summed.value, stddev, grid=self.noise_grid)
        value = divided(noised, self.sampling.expected_cohort_size, summed.like)
        topped_up = 0.0 if by_server else stddev
        return Aggregate(value=value, answered=answered, topped_up_stddev=topped_up)
