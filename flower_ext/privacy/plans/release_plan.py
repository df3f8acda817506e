"""The plan of client- and user-level privacy: a run releases one noised sum per round."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from flower_ext.checks import require_positive
from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting.accountant import privacy_loss_of
from flower_ext.privacy.accounting.calibration import calibrate_noise_multiplier
from flower_ext.privacy.accounting.events import MOST_NOISE, Release
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.accounting.sampling import Sampling, SpacedSampling
from flower_ext.privacy.guarantee import Guarantee
from flower_ext.privacy.mechanisms.adaptive_clipping import (
    SIDE,
    AdaptiveClipping,
    SidedSum,
    with_room_for_side,
)
from flower_ext.privacy.mechanisms.correlated_noise import CorrelatedNoise, StrategyMatrix
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum, ReleaseTerms
from flower_ext.privacy.mechanisms.plan import Aggregate, PrivacyPlan
from flower_ext.privacy.mechanisms.protections import (
    ClipToCells,
    ClipUnits,
    ClipUnitsToCells,
    ClipUpdate,
    ClipWithSide,
    ClipWithSideToCells,
    ProtectedByServer,
    Protection,
    SumOfUnits,
)
from flower_ext.privacy.mechanisms.run_summary import MethodTraits, RunSummary
from flower_ext.privacy.mechanisms.updates import RunningSum, Update
from flower_ext.privacy.mechanisms.vector_query import VectorQuery
from flower_ext.privacy.theorems.client_level import client_level_guarantees
from flower_ext.privacy.units import AdversaryView

_OF_CLIENTS = MethodTraits(name="a method of clients")


@dataclass(frozen=True, kw_only=True)
class ReleasePlan(ReleaseTerms, PrivacyPlan):
    """Plan of a run that releases one noised average per round, with its guarantees.

    The privacy unit is a client, or a user with records in several silos under a method of Uldp-FL.

    Guarantees
    ----------
    The guarantees of `NoisedSum`, which `mechanism` makes from this plan.

    Parameters
    ----------
    sampling : Sampling
        Draws the cohorts; the accounting assumes the same sampling.
    clipping_norm : float or AdaptiveClipping
        L2 bound C on one unit's whole update; or how it follows the norms of clients' updates.
    noise_multiplier : float
        σ: the sum carries N(0, (σC)² I).
    rounds : int
        Planned number of releases.
    delta : float
        δ at which the run reports ε.
    relation : NeighboringRelation, optional
        By default the relation for which amplification by ``sampling`` is proved.
    noise_placement : {"client", "server"} or SecureSum
        Party that adds the noise. ``"client"``: every client adds its share before it sends, and
        the server adds the shares of clients that do not answer. ``"server"``: the server adds all
        of it. A `SecureSum`: uploads are whole numbers, and the server sees only their sum. Each
        client adds a share of discrete Gaussian noise. The shares of the least number of answers
        together carry the whole noise; a round with fewer answers is discarded. If units are
        clients, a `SecureSum` needs cohorts of a fixed size.
    correlation : CorrelatedNoise, optional
        Correlates the server's noise over rounds. It needs ``noise_placement="server"``, a fixed
        ``clipping_norm`` and a `SpacedSampling`. Under such a sampling, ``noise_multiplier`` is
        that of all rounds together, however many there are, with correlation or without.
    queries : tuple of VectorQuery
        Further releases of a run, counted in the same ε: `SecureScores` for the scores of
        evaluations, or queries of your own. Each is a secure sum over all clients. Without a query
        in evaluations, clients report their scores without noise, and no ε covers the scores.

    Examples
    --------
    >>> from flower_ext.privacy import FixedSizeSampling, ReleasePlan
    >>> plan = ReleasePlan.for_target(
    ...     epsilon=2.0,
    ...     delta=1e-5,
    ...     sampling=FixedSizeSampling(2000, 100),
    ...     rounds=40,
    ...     clipping_norm=1.0,
    ...     noise_placement="server",
    ... )
    >>> round(plan.noise_multiplier, 1)
    3.3
    """

    correlation: CorrelatedNoise | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.sampling, SpacedSampling):
            if self.correlation is not None:
                raise InvalidValue(
                    f"correlation={self.correlation!r} with {self.sampling.describe()}: expected "
                    "SpacedSampling, because the bound on ε needs participations that are limited "
                    "and apart, and sampling amplifies independent noise only"
                )
            return
        if not self.noised_by_server:
            raise InvalidValue(
                f"noise_placement={self.noise_placement!r} with spaced sampling: expected "
                "'server', because a client that drops out takes its part of the noise along, and "
                "the noise of later rounds then takes back what is not there"
            )
        if isinstance(self.clipping_norm, AdaptiveClipping):
            raise InvalidValue(
                f"clipping_norm={self.clipping_norm!r} with spaced sampling: expected a number, "
                "because noise that follows the norm of each round does not fit that of earlier "
                "rounds"
            )

    @classmethod
    def for_target(
        cls,
        *,
        epsilon: float,
        delta: float,
        sampling: Sampling,
        rounds: int,
        clipping_norm: float | AdaptiveClipping,
        **options: Any,
    ) -> ReleasePlan:
        """Return the plan with the least noise whose provable ε is at most ``epsilon``.

        With ``queries`` among the options, ε covers all rounds and all planned answers together,
        and the rounds get the least noise within this ε.

        The ε holds for `AdversaryView.RELEASED_MODELS`, amplified by the sampling. See
        `client_level_guarantees` for other views.
        """
        terms = {
            "sampling": sampling,
            "clipping_norm": clipping_norm,
            "rounds": rounds,
            "delta": delta,
            **options,
        }
        besides: dict[Release, int] = {}
        if queries := options.get("queries"):
            # Queries do not depend on the rounds' noise, which is not known yet.
            known = {**terms, "clipping_norm": 1.0}  # any norm
            of_clients = cls(noise_multiplier=1.0, **known).mechanism()
            besides = {of_clients.of_query(query).release: query.times for query in queries}
        multiplier = calibrate_noise_multiplier(
            besides=besides,
            epsilon=epsilon,
            delta=delta,
            sampling=sampling,
            # Under spaced sampling, all rounds are one Gaussian mechanism.
            rounds=1 if isinstance(sampling, SpacedSampling) else rounds,
            relation=options.get("relation"),
        )
        return cls(noise_multiplier=multiplier, **terms)

    def describe(self) -> str:
        """Return one line for the log."""
        sums, norm = self.secure_sum, self.clipping_norm
        clipped = norm.describe() if isinstance(norm, AdaptiveClipping) else f"{norm:g}"
        by = "client" if sums else self.noise_placement
        return " · ".join(
            [
                f"{self.sampling.describe()} · clipping norm {clipped}, noise "
                f"multiplier {self.noise_multiplier:.4g} added by the {by}",
                *([] if sums is None else [sums.describe()]),
                *([] if self.correlation is None else [self.correlation.describe()]),
                *(query.describe() for query in self.queries),
            ]
        )

    def num_units(self, run: RunSummary) -> int:
        """Return the size of the population from which units are drawn."""
        return self.sampling.population

    def mechanism(self, method: MethodTraits = _OF_CLIENTS) -> ReleaseMechanism:
        """Return the mechanism of a method's rounds; by default, of a method that protects clients.

        Raises
        ------
        InvalidValue
            The method needs single updates, or the plan's secure sum does not fit its members.
        """
        if method.needs_each_update:
            raise InvalidValue(
                f"plan: the server of {method.name} needs each client's update, which a "
                "ReleasePlan hides; expected NonPrivatePlan, or PerturbationPlan or "
                "RecordLevelPlan for record-level privacy"
            )
        terms = {**vars(self)}
        correlation = terms.pop("correlation")
        if isinstance(sampling := self.sampling, SpacedSampling):
            return self._spaced(method, sampling, terms, correlation)
        if not isinstance(norm := terms.pop("clipping_norm"), AdaptiveClipping):
            return ReleaseMechanism(clipping_norm=norm, **terms, silos=method.num_silos)
        if method.num_silos is not None and not method.bounds_units:
            raise InvalidValue(
                f"clipping_norm={norm!r} with {method.name}: expected a number, because its silos "
                "clip no single user's update, whose norm a quantile could follow; UldpAvg's do"
            )
        return AdaptiveRelease(
            clipping=norm, update_norm=norm.initial, **terms, silos=method.num_silos
        )

    @staticmethod
    def _spaced(
        method: MethodTraits,
        sampling: SpacedSampling,
        terms: Mapping[str, Any],
        correlation: CorrelatedNoise | None,
    ) -> SpacedRelease:
        if method.num_silos is not None or method.bounds_units:
            raise InvalidValue(
                f"sampling={sampling!r} with {method.name}: expected another sampling, because a "
                "user's participations would have to be counted in all silos together"
            )
        matrix = StrategyMatrix()
        if correlation is not None:
            matrix = correlation.matrix(
                terms["rounds"],
                rounds_apart=sampling.rounds_apart,
                participations=sampling.participations,
            )
        return SpacedRelease(strategy=matrix, **terms)


@dataclass(frozen=True, kw_only=True)
class ReleaseMechanism(NoisedSum):
    """A `NoisedSum` of clients' uploads, with its accounting."""

    @property
    def client_protects(self) -> bool:
        """True if clients add the noise."""
        return not self.noised_by_server

    def protection(self, run: RunSummary, cohort_size: int) -> Protection | None:
        """Return the bound and one client's share of the noise in a cohort of that size."""
        if cohort_size == 0:  # nobody is asked; the server adds the whole noise
            return None
        if self.noised_by_server:
            return ProtectedByServer()
        if self.secure_sum is not None:
            in_cells = self.cells_protection
            return ClipUnitsToCells(**vars(in_cells)) if run.method.bounds_units else in_cells
        kind = ClipUnits if run.method.bounds_units else ClipUpdate
        return kind(
            clipping_norm=self.clipping_norm,
            noise_stddev=self.client_noise_stddev(cohort_size),
            noise_grid=self.noise_grid,
        )

    def releases(self, participations: Participations) -> dict[Release, int]:
        """Return how often the run made each release so far.

        A release is the noised sum of a training round or of a query.
        """
        counts = Counter({self.release: participations.rounds})
        for query in self.queries:
            counts[self.of_query(query).release] += participations.answers[query.name]
        return dict(counts)

    def count_answer(self, query: VectorQuery, participations: Participations) -> None:
        """Count one release of a query, for adversaries that see sums and that see uploads.

        The unit of the count is a training round with noise multiplier σ. A release with noise
        multiplier σ_q reveals as much as (σ/σ_q)² training rounds, and counts as that many.
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


_ADAPTIVE = (
    "the clipping norm of a round is a function of earlier releases and public numbers, so rounds "
    "compose adaptively; the number of updates within it is released under the same noise"
)


@dataclass(frozen=True, kw_only=True)
class AdaptiveRelease(ReleaseMechanism):
    """A `ReleaseMechanism` of updates with their sides, and the clipping norm of one round.

    Its ``clipping_norm`` C' bounds update and side together (see `adaptive_clipping`), so sum,
    noise, grid and accounting are those of a fixed norm.

    Parameters
    ----------
    clipping : AdaptiveClipping
    update_norm : float
        C of the round.
    **options
        Fields of `ReleaseMechanism`, without ``clipping_norm``.
    """

    clipping: AdaptiveClipping
    update_norm: float
    clipping_norm: float = field(init=False)

    def __post_init__(self) -> None:
        require_positive("update_norm", self.update_norm)
        spent_on_count = (self.noise_multiplier / self._count_noise / 2) ** 2
        bound = self.update_norm / math.sqrt(1 - spent_on_count)
        object.__setattr__(self, "clipping_norm", bound)
        super().__post_init__()

    @property
    def _count_noise(self) -> float:
        m = self.sampling.expected_cohort_size
        return self.clipping.count_noise(self.noise_multiplier, m)

    @property
    def side_weight(self) -> float:
        """κ: the noise σC' on κ times the sum of sides is σ_b on the sum."""
        return self.noise_stddev / self._count_noise

    def of_query(self, query: VectorQuery) -> NoisedSum:
        """Return the mechanism of one release of a query, whose norm is fixed."""
        terms = {part.name: getattr(self, part.name) for part in fields(ReleaseMechanism)}
        return ReleaseMechanism(**terms).of_query(query)

    def upload_like(self, model: dict[str, Any]) -> dict[str, Any]:
        """Return an update's names, shapes and types, with a side unless the server computes it."""
        return model if self.noised_by_server else with_room_for_side(model)

    def protection(self, run: RunSummary, cohort_size: int) -> Protection | None:
        """Return the bounds of update and side, and one client's share of the noise."""
        usual = super().protection(run, cohort_size)
        sided = {"update_norm": self.update_norm, "side_weight": self.side_weight}
        if isinstance(usual, SumOfUnits):
            return type(usual)(**{**vars(usual), **sided})
        if isinstance(usual, ClipToCells):
            return ClipWithSideToCells(**vars(usual), **sided)
        return ClipWithSide(**vars(usual), **sided) if isinstance(usual, ClipUpdate) else usual

    def begin_sum(self, like: Update) -> RunningSum:
        """Return an empty sum; if the server adds the noise, it also counts the sides."""
        if not self.noised_by_server:
            return super().begin_sum(like)
        return SidedSum(like, self.clipping_norm, self.update_norm, self.side_weight)

    def after(self, mean: Aggregate) -> tuple[Aggregate, AdaptiveRelease]:
        """Return the mean of the updates alone, and the mechanism with the next round's norm."""
        value = dict(mean.value)
        fraction = 0.5 + float(value.pop(SIDE)[0]) / self.side_weight
        norm = self.clipping.next_norm(self.update_norm, fraction)
        return replace(mean, value=value), replace(self, update_norm=norm)

    @property
    def state(self) -> Mapping[str, float]:
        """The norm of the round."""
        return {"clipping_norm": self.update_norm}

    def restored(self, state: Mapping[str, float]) -> AdaptiveRelease:
        """Return the mechanism with the norm of a checkpoint."""
        return replace(self, update_norm=state["clipping_norm"])

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Assumption on the norm."""
        return (_ADAPTIVE,)


@dataclass(frozen=True, kw_only=True)
class SpacedRelease(ReleaseMechanism):
    """A `ReleaseMechanism` whose rounds are one Gaussian mechanism (see `correlated_noise`).

    Guarantees
    ----------
    Against whoever sees all released models and who took part, and for any number of rounds, the
    run is a Gaussian mechanism of noise multiplier ``noise_multiplier``. For this the noise source
    of each round must hold that round's noise y of ``strategy``.

    Parameters
    ----------
    strategy : StrategyMatrix
    **options
        Fields of `ReleaseMechanism`.
    """

    strategy: StrategyMatrix

    @property
    def _limits(self) -> dict[str, int]:
        sampling = self.sampling
        assert isinstance(sampling, SpacedSampling)
        return {
            "rounds_apart": sampling.rounds_apart,
            "participations": sampling.participations,
        }

    @property
    def strategy_matrix(self) -> StrategyMatrix | None:
        """The matrix; None if the noise is independent."""
        return None if self.strategy == StrategyMatrix() else self.strategy

    def with_strategy(self, matrix: StrategyMatrix) -> SpacedRelease:
        """Return the mechanism with another matrix."""
        return replace(self, strategy=matrix)

    @property
    def noise_stddev(self) -> float:
        """Standard deviation σC·sens(C) of a round's fresh noise z."""
        return super().noise_stddev * self.strategy.sensitivity(**self._limits)

    @property
    def mean_noise_stddev(self) -> float:
        """Stddev of the noise y in a coordinate of the mean, after the planned rounds."""
        return super().mean_noise_stddev * float(np.linalg.norm(self.strategy.inverse(self.rounds)))

    def release_in(self, number: int) -> Release:
        """Return what a round adds to the loss of the most exposed client."""
        return self._releases(number)[-1]

    def releases(self, participations: Participations) -> dict[Release, int]:
        """Return the releases of the rounds so far, which differ in their share of the loss."""
        return dict(Counter(self._releases(participations.rounds)))

    def _releases(self, rounds: int) -> list[Release]:
        moves = self.strategy.row_moves(rounds, **self._limits)
        fresh = self.noise_multiplier * self.strategy.sensitivity(**self._limits)
        multipliers = {
            move: min(fresh / move, MOST_NOISE) if move else MOST_NOISE for move in moves
        }
        made = {move: replace(self.release, noise_multiplier=m) for move, m in multipliers.items()}
        return [made[move] for move in moves]

    def guarantees(self, run: RunSummary) -> list[Guarantee]:
        """Return the guarantees: also against whoever sees who took part."""
        models, *others = super().guarantees(run)
        sampling, rounds = self.sampling.describe(), run.participations.rounds
        models = replace(
            models,
            source=f"{sampling}; one Gaussian mechanism of noise multiplier "
            f"{self.noise_multiplier:.4g} for all rounds; {rounds} rounds so far",
            assumptions=(*models.assumptions, *_SPACED),
        )
        return [models, replace(models, view=AdversaryView.MODELS_AND_COHORTS), *others]


_SPACED = (
    "a client that is asked has taken part, whether it answers or not; who may take part depends "
    "on earlier releases and on who took part, on nobody's data otherwise",
    "the noise of earlier rounds stays secret, and the run never continues from an older copy of "
    "its folder `secrets`",
)
