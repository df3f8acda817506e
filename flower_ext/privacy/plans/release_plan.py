"""The plan of client- and user-level privacy: a run releases one noised sum per round."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting.accountant import Accountant, privacy_loss_of
from flower_ext.privacy.accounting.calibration import calibrate_noise_multiplier
from flower_ext.privacy.accounting.events import Release
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.accounting.sampling import FullParticipation, Sampling
from flower_ext.privacy.guarantee import Guarantee
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.mechanisms.protections import (
    ClipUnits,
    ClipUnitsToCells,
    ClipUpdate,
    ProtectedByServer,
    Protection,
)
from flower_ext.privacy.mechanisms.run_facts import MethodTraits, RunFacts
from flower_ext.privacy.mechanisms.secure_scores import SecureScores
from flower_ext.privacy.theorems.client_level import check_client_plan, client_level_guarantees
from flower_ext.privacy.units import PrivacyUnit


@dataclass(frozen=True, kw_only=True)
class ReleasePlan(NoisedSum):
    """Plan of a run that releases one noised average per round, with its guarantees.

    The guarantee is that of `NoisedSum`.

    Parameters
    ----------
    sampling : Sampling
        Draws the cohorts; the accounting assumes the same sampling.
    clipping_norm : float
        L2 bound C on one unit's whole update.
    noise_multiplier : float
        σ: the sum carries N(0, (σC)² I).
    rounds : int
        Planned number of releases.
    delta : float
        δ at which the run reports ε.
    relation : NeighboringRelation, optional
        By default the relation for which amplification by ``sampling`` is proved.
    noise_placement : {"client", "server"}
        Party that adds the noise: every client adds its share before it sends, or the server adds
        all of it.
    dropout_policy : {"top-up", "discard"}
        Reaction to missing answers if clients add the noise: the server adds the missing shares, or
        discards the round.
    unit : PrivacyUnit
    sensitivity : float
        Most clipping norms by which one unit moves a sum: 1 for a unit with one upload, more for a
        unit with a part in several.
    approximation_error : float
        Most clipping norms between a sum and the exact one, or by which a unit that was not drawn
        moves it. Above 0 if a protocol adds up under encryption.
    secure_aggregation : SecureSum, optional
        The server sees only the sum of a round's uploads, and no single upload. Uploads are whole
        numbers with discrete Gaussian noise, scaled for the least number of answers. A round with
        fewer answers is discarded under every ``dropout_policy``. It needs
        ``noise_placement="client"`` and cohorts of a fixed size.
    silos : int, optional
        Number of clients among which each unit's data may be divided. All of them are asked in
        every round; they are the members of a secure sum over users. The strategies of Uldp-FL set
        it. By default each unit is a client.
    scores : SecureScores, optional
        Evaluations release noised means of scores over all clients, counted in ε, by secure sums
        with the parameters of ``secure_aggregation``. By default clients send their scores without
        noise, and no ε covers them.
    """

    scores: SecureScores | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scores is None:
            return
        if self.secure_aggregation is None:
            raise InvalidValue(
                "scores: expected None without secure_aggregation, as the server would see each "
                "client's scores with only that client's share of the noise"
            )
        if self.unit is not PrivacyUnit.CLIENT:
            raise InvalidValue(
                f"scores of a plan with unit={self.unit.value!r}: expected None, as test examples "
                "have no owners whose part in a score could be bounded; set evaluate_every=0 to "
                "turn evaluations off"
            )
        _ = self.of_scores  # refuses a population without a secure sum

    @property
    def of_scores(self) -> ReleasePlan | None:
        """The plan of one evaluation: a secure sum over all clients of the population."""
        if self.scores is None:
            return None
        return replace(
            self,
            sampling=FullParticipation(self.sampling.population),
            clipping_norm=self.scores.norm,
            noise_multiplier=self.scores.noise_multiplier,
            rounds=self.scores.evaluations,
            scores=None,
        )

    @property
    def evaluation_release(self) -> Release | None:
        """Release of a sum of clients' scores, if the plan has `scores`; else None."""
        return None if self.of_scores is None else self.of_scores.release

    def releases(self, participations: Participations) -> dict[Release, int]:
        """Return a run's releases so far, with counts: sums of rounds and of evaluations."""
        counts = Counter({self.release: participations.rounds})
        if (of_scores := self.of_scores) is not None:
            counts[of_scores.release] += participations.evaluations
        return dict(counts)

    def count_scores(self, participations: Participations) -> None:
        """Count an evaluation of all clients, of which an adversary may see the sum or uploads.

        Participations are counted in training rounds, with noise multiplier σ. An evaluation with
        noise multiplier σ_e reveals as much as (σ/σ_e)² of them, and therefore counts as many.
        """
        of_scores = self.of_scores
        assert of_scores is not None
        parameters = of_scores.sum_parameters
        worth = (self.noise_multiplier / of_scores.noise_multiplier) ** 2
        participations.record_evaluation(
            range(self.sampling.population),
            in_sum=worth * parameters.least_answers / parameters.honest_answers,
            in_upload=worth * parameters.least_answers,
        )

    @classmethod
    def for_target(
        cls,
        *,
        epsilon: float,
        delta: float,
        sampling: Sampling,
        rounds: int,
        clipping_norm: float,
        accountant: Accountant = "pld",
        **options: Any,
    ) -> ReleasePlan:
        """Return the plan with the least noise whose provable ε is at most ``epsilon``.

        With ``scores`` among the options, ε covers all rounds and all planned evaluations together,
        and the rounds get the least noise within this ε.

        The ε holds for `AdversaryView.RELEASED_MODELS`, amplified by the sampling. See
        `client_level_guarantees` for other views.
        """
        besides: dict[Release, int] = {}
        if (scores := options.get("scores")) is not None:
            # Evaluations do not depend on the rounds' noise, which is not known yet.
            some = cls(
                sampling=sampling,
                clipping_norm=clipping_norm,
                noise_multiplier=1.0,
                rounds=rounds,
                delta=delta,
                **options,
            ).of_scores
            assert some is not None
            besides = {some.release: scores.evaluations}
        multiplier = calibrate_noise_multiplier(
            besides=besides,
            epsilon=epsilon,
            delta=delta,
            sampling=sampling,
            rounds=rounds,
            relation=options.get("relation"),
            accountant=accountant,
        )
        return cls(
            sampling=sampling,
            clipping_norm=clipping_norm,
            noise_multiplier=multiplier * options.get("sensitivity", 1.0),
            rounds=rounds,
            delta=delta,
            **options,
        )

    def describe(self) -> str:
        """Return one line for the log."""
        sums, scores = self.secure_aggregation, self.scores
        return (
            f"{self.sampling.describe()} · clipping norm {self.clipping_norm:g}, noise multiplier "
            f"{self.noise_multiplier:.4g} added by the {self.noise_placement}"
            + ("" if sums is None else f" · {sums.describe()}")
            + ("" if scores is None else f" · {scores.describe()}")
        )

    @property
    def planned_rounds(self) -> int | None:
        """Planned number of rounds, T."""
        return self.rounds

    @property
    def client_protects(self) -> bool:
        """True if clients add the noise."""
        return self.noise_placement == "client"

    def check(self, method: MethodTraits) -> None:
        """Refuse a method that needs single updates, or units that are not the clients."""
        if method.needs_each_update:
            raise InvalidValue(
                f"plan: the server of {method.name} needs each client's update, which a "
                "ReleasePlan hides; expected NonPrivatePlan, or PerturbationPlan or "
                "RecordLevelPlan for record-level privacy"
            )
        if method.units_are_clients:
            check_client_plan(self)

    def protection(self, run: RunFacts, cohort_size: int) -> Protection | None:
        """Return the bound and one client's share of the noise in a cohort of that size."""
        if cohort_size == 0:
            return None
        if self.noise_placement == "server":
            return ProtectedByServer()
        if self.secure_aggregation is not None:
            in_cells = self.cells_protection
            return ClipUnitsToCells(**vars(in_cells)) if run.method.bounds_units else in_cells
        kind = ClipUnits if run.method.bounds_units else ClipUpdate
        return kind(
            clipping_norm=self.clipping_norm,
            noise_stddev=self.client_noise_stddev(cohort_size),
            noise_grid=self.noise_grid,
        )

    def guarantees(self, run: RunFacts) -> list[Guarantee]:
        """Return the provable guarantees against each adversary, if the units are the clients."""
        return client_level_guarantees(
            self,
            run.participations,
            releases=self.releases(run.participations),
            secure_noise=run.secure_noise,
            secure_cohorts=run.secure_cohorts,
            not_covered=run.not_covered,
            memory=run.method.keeps_memory,
        )

    def spent(self, run: RunFacts) -> dict[str, float]:
        """Return ε against an adversary that sees the released models."""
        loss = privacy_loss_of(self.releases(run.participations), delta=self.delta)
        return {"epsilon_provable": loss.epsilon}
