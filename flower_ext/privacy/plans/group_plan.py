"""The plan of ULDP-GROUP-k: silos protect records by DP-SGD."""

from dataclasses import dataclass, replace

from flower_ext.checks import ProperFraction
from flower_ext.privacy.accounting.group_privacy import DpSgd
from flower_ext.privacy.accounting.sampling import FullParticipation
from flower_ext.privacy.base_plan import PlainAverage
from flower_ext.privacy.guarantee import Guarantee
from flower_ext.privacy.mechanisms.protections import ProtectedByTraining, Protection
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.privacy.theorems.uldp_group_theorem import uldp_group_guarantees


@dataclass(frozen=True, kw_only=True)
class GroupPlan(PlainAverage):
    """ULDP-GROUP-k: silos protect records by DP-SGD, and the server averages their models.

    Parameters
    ----------
    sampling : FullParticipation
        All silos, in every round.
    one_round : DpSgd
        The DP-SGD of every silo in one round.
    delta : float
        δ at which the run reports ε.
    users : int, optional
        Number of users. Reports warn about a δ that is large for this number.
    """

    tells_sizes = False  # the server knows sizes from the histograms

    sampling: FullParticipation
    one_round: DpSgd
    delta: ProperFraction
    users: int | None = None

    def num_units(self, run: RunSummary) -> int | None:
        """Return the number of users."""
        return self.users

    def describe(self) -> str:
        """Describe the plan in words, for the log."""
        one = self.one_round
        return (
            f"{self.sampling.describe()} · DP-SGD, {one.steps} steps at rate "
            f"{one.sampling_rate:g}, noise multiplier {one.noise_multiplier:.4g}"
        )

    def protection(self, run: RunSummary, cohort_size: int) -> Protection | None:
        """Return a protection without further noise, because each silo's training adds noise."""
        return ProtectedByTraining()

    def guarantees(self, run: RunSummary) -> list[Guarantee]:
        """Return `uldp_group_guarantees` of the rounds so far.

        The list is empty until the group size k is known.
        """
        rounds = run.participations.rounds
        if rounds == 0 or run.group_size is None:
            return []
        silo = replace(self.one_round, steps=self.one_round.steps * rounds)
        return uldp_group_guarantees(
            silo,
            group_size=run.group_size,
            delta=self.delta,
            num_silos=self.sampling.population,
            secure_noise=run.secure_noise,
            not_covered=run.not_covered,
        )
