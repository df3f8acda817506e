"""ULDP-NAIVE: DP-FedAvg over silos, with enough noise to hide a user who has records in all silos.

Source: Kato et al., Uldp-FL (PVLDB 2024), Algorithm 1.

====================  =====================================================
paper                 here
====================  =====================================================
S                     ``num_silos``
C, σ                  ``clipping_norm``, ``noise_multiplier`` of the given plan
σ²C²|S|               variance of one silo's noise; the |S| silos' noise adds up to (σC|S|)²
Q, η_l, η_g           ``local.epochs``, ``local.learning_rate``, ``server_learning_rate``
====================  =====================================================

The paper prints Δ = x_t − x_s although its server adds Δ. Here Δ is x_s − x_t, as in the paper's
other algorithms.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flower_ext.algorithms import dp_fedavg
from flower_ext.algorithms.one_phase import OnePhase, shared_model
from flower_ext.errors import InvalidValue
from flower_ext.federation import (
    ClientMethod,
)
from flower_ext.privacy import FullParticipation, Guarantee, ReleasePlan
from flower_ext.privacy.mechanisms.run_facts import RunFacts
from flower_ext.privacy.theorems.silos import among_silos
from flower_ext.privacy.theorems.uldp import check_user_plan, uldp_naive_guarantees
from flower_ext.training import LocalTraining


class UldpNaive(OnePhase):
    """Clip each silo's update as a whole, and noise it for a user with records in every silo.

    All silos have the same weight in the mean.

    The provable guarantees and the ledger count 2C for the largest change that one user can make to
    a silo's clipped update. The paper counts C (see `uldp_naive_guarantees`).

    Parameters
    ----------
    plan : ReleasePlan
        A plan of users, as for `UldpAvg`, without sampling.
    num_silos : int
    local : LocalTraining
        Training of the whole model on a silo's records.
    **options
        Options of `FederatedStrategy`.
    """

    plan: ReleasePlan
    units_are_clients = False
    client = ClientMethod(
        name="uldp_naive",
        local_update=dp_fedavg.local_update,  # on all records of the silo (lines 9–13)
        local_model=shared_model,
        memoryless=True,
        keeps_memory=False,
    )

    def __init__(
        self,
        *,
        plan: ReleasePlan,
        num_silos: int,
        local: LocalTraining | None = None,
        **options: Any,
    ) -> None:
        check_user_plan(plan, num_silos, "equal")
        if not isinstance(plan.sampling, FullParticipation):
            raise InvalidValue(
                "sampling of the plan: expected FullParticipation, because ULDP-NAIVE does not "
                "sample users"
            )
        self.num_silos = num_silos
        among_silos(plan, num_silos)  # refuses numbers of silos without a secure sum
        super().__init__(plan=plan, local=local, **options)

    @property
    def accounted(self) -> ReleasePlan:
        """The plan for the silos' sum.

        The silos' noise adds up to σC|S|, and one user can move each silo's update by 2C.
        """
        return replace(
            among_silos(self.plan, self.num_silos),
            sampling=FullParticipation(self.num_silos),
            noise_multiplier=self.plan.noise_multiplier * self.num_silos,
            sensitivity=2.0 * self.num_silos,
        )

    def claims(self, run: RunFacts) -> list[Guarantee]:
        """Return Theorem 3, and what is provable against a server that sees each upload."""
        return uldp_naive_guarantees(
            noise_multiplier=self.plan.noise_multiplier,
            rounds=run.participations.rounds,
            delta=self.plan.delta,
            plan=self.accounted,
            secure_noise=run.secure_noise,
            not_covered=run.not_covered,
        )
