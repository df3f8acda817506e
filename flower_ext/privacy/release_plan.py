"""The plan of client- and user-level privacy: a run releases one noised sum a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting import Accountant, privacy_loss_of
from flower_ext.privacy.calibration import calibrate_noise_multiplier
from flower_ext.privacy.client_level import check_client_plan, client_level_guarantees
from flower_ext.privacy.guarantee import Guarantee
from flower_ext.privacy.noised_sum import NoisedSum
from flower_ext.privacy.protections import (
    ClipUnits,
    ClipUnitsToCells,
    ClipUpdate,
    ProtectedByServer,
    Protection,
)
from flower_ext.privacy.run_facts import MethodTraits, RunFacts
from flower_ext.privacy.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class ReleasePlan(NoisedSum):
    """How a run releases one noised average a round, and what that promises.

    Its guarantee is that of `NoisedSum`.

    Parameters
    ----------
    sampling : Sampling
        Draws the cohorts, and is accounted.
    clipping_norm : float
        L2 bound C on one unit's whole update.
    noise_multiplier : float
        σ: the sum carries N(0, (σC)² I).
    rounds : int
        Planned number of releases.
    delta : float
        δ at which the run reports ε.
    relation : NeighboringRelation, optional
        By default the one that amplification by ``sampling`` is proved for.
    noise_placement : {"client", "server"}
        Whether every client adds its share before it sends, or the server all of it.
    dropout_policy : {"top-up", "discard"}
        What to do where clients add noise and some do not answer.
    unit : PrivacyUnit
    sensitivity : float
        By how many clipping norms one unit moves a sum: 1 where it has one upload, more where it
        has a part in several.
    residue : float
        By how many clipping norms a sum may be away from the exact one, or one unit move it though
        it was not drawn: more than 0 where a protocol adds up under encryption.
    secure_aggregation : SecureSum, optional
        The server sees no upload, but the sum of a round's uploads alone. They are whole numbers
        with discrete Gaussian noise, scaled for the least number of answers; a round with fewer is
        discarded, whatever the ``dropout_policy``. Needs ``noise_placement="client"`` and cohorts
        of a fixed size.
    silos : int, optional
        Clients among whom each unit's data may be divided, all of which are asked in every round:
        the members of a secure sum over users. The strategies of Uldp-FL set it; by default each
        unit is a client.
    """

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
        """The plan with the least noise whose provable ε is at most ``epsilon``.

        The ε is that of `AdversaryView.RELEASED_MODELS`, amplified by the sampling; see
        `client_level_guarantees` for the others.
        """
        multiplier = calibrate_noise_multiplier(
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
        """For the log."""
        sums = self.secure_aggregation
        return (
            f"{self.sampling.describe()} · clipping norm {self.clipping_norm:g}, noise multiplier "
            f"{self.noise_multiplier:.4g} added by the {self.noise_placement}"
            + ("" if sums is None else f" · {sums.describe()}")
        )

    @property
    def planned_rounds(self) -> int | None:
        """T."""
        return self.rounds

    @property
    def client_protects(self) -> bool:
        """Where the plan places the noise there."""
        return self.noise_placement == "client"

    def check(self, method: MethodTraits) -> None:
        """Refuse a method that needs single updates, or units that are not the clients."""
        if method.needs_each_update:
            raise InvalidValue(
                f"plan: the server of {method.name} needs each client's update, which a "
                "ReleasePlan hides: take NonPrivatePlan, or PerturbationPlan or RecordLevelPlan "
                "for record-level privacy"
            )
        if method.units_are_clients:
            check_client_plan(self)

    def protection(self, run: RunFacts, cohort_size: int) -> Protection | None:
        """Bound, and the share of the noise of one client in a cohort of that size."""
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
        """What is provable against each adversary, where the units are the clients."""
        return client_level_guarantees(
            self,
            run.participations,
            secure_noise=run.secure_noise,
            secure_cohorts=run.secure_cohorts,
            not_covered=run.not_covered,
            memory=run.method.keeps_memory,
        )

    def spent(self, run: RunFacts) -> dict[str, float]:
        """ε against who sees the released models."""
        releases = {self.release: run.participations.rounds}
        return {"epsilon_provable": privacy_loss_of(releases, delta=self.delta).epsilon}
