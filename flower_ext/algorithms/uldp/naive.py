"""ULDP-NAIVE: DP-FedAvg over silos, with enough noise to hide a user who has records in all silos.

Source: Kato et al., Uldp-FL (PVLDB 2024), Algorithm 1.

====================  =====================================================
paper                 here
====================  =====================================================
S                     ``num_silos``
C, σ                  ``clipping_norm``, ``noise_multiplier`` of the given plan
σ²C²|S|               variance of one silo's noise; the noise of all |S| silos has the variance
                      (σC|S|)²
Q, η_l, η_g           ``local.epochs``, ``local.learning_rate``, ``server.learning_rate``
====================  =====================================================

The paper prints Δ = x_t − x_s, the received model minus the trained one, although its server adds
Δ. Here Δ is x_s − x_t, as in the paper's other algorithms.
"""

from dataclasses import dataclass, replace

from flower_ext.algorithms import dp_fedavg
from flower_ext.algorithms.uldp.silo_method import SiloMethod, sums_of_users
from flower_ext.errors import InvalidValue
from flower_ext.federation import ClientMethod, Memory
from flower_ext.privacy import FullParticipation, Guarantee, PrivacyPlan
from flower_ext.privacy.mechanisms.round_mechanism import RoundMechanism
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.privacy.theorems.uldp_theorem import uldp_naive_guarantees
from flower_ext.training import LocalTraining


@dataclass(frozen=True, kw_only=True)
class UldpNaive(SiloMethod):
    """Federated averaging that clips each silo's update as a whole.

    The noise is large enough to hide a user who has records in every silo.

    All silos have the same weight in the mean. The plan protects users, as for `UldpAvg`, and uses
    all of them in every round.

    The provable guarantees and the ledger count 2C for the largest change that one user can make to
    a silo's clipped update. The paper counts C (see `uldp_naive_guarantees`).

    Parameters
    ----------
    num_silos : int
        Number of silos; all of them train in every round.
    local : LocalTraining
        Training of the whole model on a silo's records.
    **options
        Fields of `Method`.
    """

    client = ClientMethod(
        name="uldp_naive",
        local_update=dp_fedavg.local_update,  # on all records of the silo (lines 9–13)
        memory=Memory.NONE,
    )

    local: LocalTraining = LocalTraining()

    def check(self, plan: PrivacyPlan) -> None:
        """Refuse a plan that samples users."""
        if not isinstance(plan.sampling, FullParticipation):
            raise InvalidValue(
                "sampling of the plan: expected FullParticipation, because ULDP-NAIVE does not "
                "sample users"
            )

    def mechanism(self, plan: PrivacyPlan) -> RoundMechanism:
        """Return the mechanism of the silos' sum.

        The sum of the silos' noise has standard deviation σC|S|, and one user can move each silo's
        update by 2C.
        """
        sums = sums_of_users(super().mechanism(plan))
        return replace(
            sums,
            sampling=FullParticipation(self.num_silos),
            noise_multiplier=sums.noise_multiplier * self.num_silos,
            sensitivity=2.0 * self.num_silos,
        )

    def claims(self, run: RunSummary, mechanism: RoundMechanism) -> list[Guarantee]:
        """Return Theorem 3 and the provable guarantees, against sums and against single uploads."""
        return uldp_naive_guarantees(sums_of_users(mechanism), run)
