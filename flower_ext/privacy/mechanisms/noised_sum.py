"""One noised sum per round: a plan that binds sampler, bound, noise and aggregation together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from flower_ext.checks import (
    require_at_least_one,
    require_delta,
    require_not_negative,
    require_one_of,
    require_positive,
)
from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting.calibration import default_relation
from flower_ext.privacy.accounting.events import Release
from flower_ext.privacy.accounting.sampling import PoissonSampling, Sampling
from flower_ext.privacy.mechanisms.bounds import sum_clipped
from flower_ext.privacy.mechanisms.discrete_gaussian import share_stddev
from flower_ext.privacy.mechanisms.noise import NoiseSource, largest_noised_norm, noise_grid
from flower_ext.privacy.mechanisms.plan import Aggregate, PrivacyPlan, RoundDiscarded, divided
from flower_ext.privacy.mechanisms.protections import ClipToCells
from flower_ext.privacy.mechanisms.quantization import Cells, cell_of, check_cell, out_of_cells
from flower_ext.privacy.mechanisms.run_facts import RunFacts
from flower_ext.privacy.mechanisms.secure_sum import SecureSum, SumParameters, ring_bits
from flower_ext.privacy.mechanisms.updates import Summed, Update, l2_norm
from flower_ext.privacy.units import NeighboringRelation, PrivacyUnit

NoisePlacement = Literal["client", "server"]
DropoutPolicy = Literal["top-up", "discard"]


@dataclass(frozen=True, kw_only=True)
class NoisedSum(PrivacyPlan):
    """Plan of a round that releases one noised average.

    Guarantees
    ----------
    For any number of answers, `aggregate` releases nothing, or a sum that is divided by a public
    constant. The sum has Gaussian noise of standard deviation ``noise_multiplier * clipping_norm``
    or more.

    Parameters
    ----------
    sampling, clipping_norm, noise_multiplier, …
        As for `ReleasePlan`.
    """

    sampling: Sampling
    clipping_norm: float
    noise_multiplier: float
    rounds: int
    delta: float
    relation: NeighboringRelation | None = None
    noise_placement: NoisePlacement = "client"
    dropout_policy: DropoutPolicy = "top-up"
    unit: PrivacyUnit = PrivacyUnit.CLIENT
    sensitivity: float = 1.0
    approximation_error: float = 0.0
    secure_aggregation: SecureSum | None = None
    silos: int | None = None

    def __post_init__(self) -> None:
        require_positive("clipping_norm", self.clipping_norm)
        require_positive("noise_multiplier", self.noise_multiplier)
        require_positive("sensitivity", self.sensitivity)
        require_not_negative("approximation_error", self.approximation_error)
        require_at_least_one("rounds", self.rounds)
        if self.silos is not None:
            require_at_least_one("silos", self.silos)
        require_delta(self.delta)
        require_one_of("noise_placement", self.noise_placement, ("client", "server"))
        require_one_of("dropout_policy", self.dropout_policy, ("top-up", "discard"))
        if self.secure_aggregation is not None and self.noise_placement == "server":
            raise InvalidValue(
                "secure_aggregation with noise_placement='server': expected 'client', because the "
                "server of a secure sum sees no single upload, so it cannot clip one"
            )
        if self.secure_aggregation is not None:
            check_cell(self.cell, self.clipping_norm)
            self._check_members()
        if self.relation is None:
            object.__setattr__(self, "relation", default_relation(self.sampling))
        _ = self.release  # refuses a relation that does not fit the sampling

    def _check_members(self) -> None:
        """Refuse a secure sum with too few members, or with a secret number of members.

        For user-level plans the members are the silos, for any number of drawn users (`silos`).
        """
        if self.silos is None and self.unit is PrivacyUnit.USER:
            return  # the silos' strategy checks again, once it has set `silos`
        if self.silos is None and isinstance(self.sampling, PoissonSampling):
            raise InvalidValue(
                "secure_aggregation with Poisson sampling: expected cohorts of a fixed size "
                "(FixedSizeSampling), as a sum's noise would reveal the number of drawn clients, "
                "which amplification needs to be secret"
            )
        _ = self.sum_bits  # refuses a cohort without a secure sum

    def num_units(self, run: RunFacts) -> int:
        """Return the size of the population from which units are drawn."""
        return self.sampling.population

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
    def noise_grid(self) -> float:
        """Step of the grid on which all noised uploads and sums lie, the same in every round.

        A share of the noise depends on the size of its cohort, which may be secret. The grid does
        not, and sums of numbers on the grid stay on it.
        """
        return noise_grid(self.noise_stddev)

    def client_noise_stddev(self, cohort_size: int) -> float:
        """Return the standard deviation σC/√cohort of one client's share; all shares make σC.

        The cohort size is the drawn one, also under Poisson sampling. With the expected size
        instead, a small cohort's sum would carry too little noise.
        """
        if self.noise_placement == "server":
            return 0.0
        require_at_least_one("cohort_size", cohort_size)
        return self.noise_stddev / math.sqrt(cohort_size)

    @property
    def cell(self) -> float:
        """Width of the cells of a secure sum, the same in every round."""
        return cell_of(self.noise_stddev)

    @property
    def cohort_size(self) -> int:
        """Number of clients in each secure sum, the same in every round.

        With `silos`, these are all silos. Neither the asked clients, nor a silo's share of the
        noise, nor the noise of a sum then depends on the number of drawn users. Users may therefore
        be drawn by Poisson sampling, whose amplification needs this number to be secret.
        """
        return round(self.sampling.expected_cohort_size) if self.silos is None else self.silos

    @property
    def num_clients(self) -> int:
        """Number of clients from which the members of secure sums are drawn."""
        return self.sampling.population if self.silos is None else self.silos

    @property
    def sum_parameters(self) -> SumParameters:
        """Parameters of the secure sums, for cohorts from all clients and for all rounds."""
        assert self.secure_aggregation is not None
        return self.secure_aggregation.for_cohort(
            self.cohort_size, population=self.num_clients, rounds=self.rounds
        )

    @property
    def cells_protection(self) -> ClipToCells:
        """Protection of an upload to a secure sum."""
        least = self.sum_parameters.least_answers
        share = share_stddev(self.noise_stddev / self.cell, least)
        return ClipToCells(
            clipping_norm=self.clipping_norm, share_stddev=share * self.cell, cell=self.cell
        )

    @property
    def sum_bits(self) -> int:
        """Bits of the ring of secure sums, enough for all units of the population."""
        noise = self.cells_protection.share_stddev / self.cell * math.sqrt(self.cohort_size)
        return ring_bits(self.largest_sum / self.cell, noise)

    @property
    def largest_sum(self) -> float:
        """Largest norm of a secure sum before noise: that of all units with norm C each."""
        units = self.cohort_size if self.silos is None else self.sampling.population
        return units * self.clipping_norm

    def aggregate_sum(
        self, cells: Cells, *, answered: int, noise: NoiseSource, like: Update
    ) -> Aggregate:
        """Return the average of a round from its finished secure sum.

        The server adds the noise shares of clients that did not answer, so that the noise of the
        release does not depend on the number of answers.

        Parameters
        ----------
        cells : Mapping[str, ndarray]
            Sum of the answers' noised updates, in whole numbers of cells.
        answered : int
            Number of answers, at least the parameters' ``least_answers``, so that the sum carries
            noise of σC or more.
        noise : NoiseSource
            The server's source.
        like : Update
            Names, shapes and types of the result.

        Raises
        ------
        RoundDiscarded
            The sum is larger than a sum of honest answers, so a member spoiled it.
        """
        share = self.cells_protection.share_stddev
        missing = share * math.sqrt(self.cohort_size - answered)
        noised = noise.add_discrete_gaussian(cells, missing / self.cell) if missing else cells
        value = out_of_cells(noised, self.cell, like)
        stddev = share * math.sqrt(self.cohort_size)
        self.refuse_spoiled(value, bound=self.largest_sum, stddev=stddev)
        mean = divided(value, self.sampling.expected_cohort_size, like)
        return Aggregate(value=mean, answered=answered, topped_up_stddev=missing)

    @staticmethod
    def refuse_spoiled(value: Update, *, bound: float, stddev: float) -> None:
        """Refuse a noised sum that a sum of honest answers exceeds with probability `IMPROBABLE`.

        The decision reads the noised sum alone, never an upload. It is post-processing of a release
        that the ledger counts either way, so it costs no privacy, and no δ needs to count a wrong
        refusal. The bound holds for Gaussian shares and for discrete ones, which are subgaussian
        with their stddev. It does not name the member, whom the masks hide, nor does it notice
        an upload that the noise or the other members' bounds have room for.

        Parameters
        ----------
        value : Mapping[str, array]
            The noised sum.
        bound : float
            Largest norm of honest members' sum before noise.
        stddev : float
            Standard deviation of the noise in the sum.

        Raises
        ------
        RoundDiscarded
            A member spoiled the sum.
        """
        numbers = sum(array.size for array in value.values())
        limit = bound + largest_noised_norm(0.0, stddev, numbers)
        if not (norm := l2_norm(value)) <= limit:
            raise RoundDiscarded(
                f"the noised sum has a norm of {norm:.4g}, where honest members' has "
                f"{limit:.4g} at most: a member spoiled it by an upload that is not a clipped and "
                "noised one, so nothing is released"
            )

    def largest_upload(self, *, cohort_size: int, numbers: int, norms: float = 1.0) -> float:
        """Return `PrivacyPlan.largest_upload`; infinite if the server adds the noise.

        Refusing larger uploads changes a sum with at most that probability per upload, which no
        reported δ counts. The limit keeps a hostile client from moving the sum further than the
        noise of an honest upload might. It does not bound the client's part by C, as a server that
        adds the noise itself does.
        """
        if self.noise_placement == "server":
            return math.inf
        share = self.client_noise_stddev(cohort_size)
        return largest_noised_norm(norms * self.clipping_norm, share, numbers)

    def part(self, uploads: Iterable[Update | Summed], *, like: Update) -> Summed:
        """Return `PrivacyPlan.part`, of clipped uploads if the server adds the noise."""
        if self.noise_placement == "server":
            return sum_clipped(uploads, self.clipping_norm, like=like)
        return super().part(uploads, like=like)

    def aggregate(
        self,
        uploads: Iterable[Update | Summed],
        *,
        cohort_size: int,
        noise: NoiseSource,
        like: Update,
    ) -> Aggregate:
        """Return the noised sum of a round's uploads, divided by the expected cohort size.

        If the server adds the noise, it bounds every upload itself, so the guarantee relies on no
        client. If clients add the noise, uploads arrive bounded and noised.

        Raises
        ------
        RoundDiscarded
            Clients add the noise, some did not answer, and the policy is ``"discard"``.
        ValueError
            There are more uploads than asked clients, or names or shapes differ from ``like``.
        """
        if self.secure_aggregation is not None:
            raise InvalidValue(
                "secure_aggregation: expected the sum of all uploads; call aggregate_sum"
            )
        by_server = self.noise_placement == "server"
        summed = self.part(uploads, like=like)
        answered = summed.count
        if answered > cohort_size:
            raise InvalidValue(
                f"{answered} uploads from a cohort of {cohort_size}: expected at most one each"
            )
        if not by_server and answered < cohort_size and self.dropout_policy == "discard":
            raise RoundDiscarded(
                f"{answered} of {cohort_size} clients answered; the sum lacks the others' noise"
            )
        missing = 1.0 if by_server or not cohort_size else 1 - answered / cohort_size
        stddev = self.noise_stddev * math.sqrt(missing)
        noised = noise.add_gaussian(summed.value, stddev, grid=self.noise_grid)
        value = divided(noised, self.sampling.expected_cohort_size, like)
        topped_up = 0.0 if by_server else stddev
        return Aggregate(value=value, answered=answered, topped_up_stddev=topped_up)
