"""Silos that protect records by DP-SGD: the plan of ULDP-GROUP-k."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flower_ext.privacy.group_privacy import DpSgd
from flower_ext.privacy.guarantee import Guarantee
from flower_ext.privacy.release_plan import PlainAverage
from flower_ext.privacy.sampling import FullParticipation
from flower_ext.privacy.theorems.uldp_group import uldp_group_guarantees


@dataclass(frozen=True, kw_only=True)
class GroupPlan(PlainAverage):
    """ULDP-GROUP-k: silos protect records by DP-SGD; what they send is averaged as it is.

    Parameters
    ----------
    sampling : FullParticipation
        Of silos.
    one_round : DpSgd
        What every silo does in a round.
    delta : float
        δ at which the run reports ε.
    """

    sampling: FullParticipation
    one_round: DpSgd
    delta: float

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise ValueError(f"delta={self.delta!r}: expected a number in (0, 1)")

    def describe(self) -> str:
        """For the log."""
        one = self.one_round
        return (
            f"{self.sampling.describe()} · DP-SGD, {one.steps} steps at rate "
            f"{one.sampling_rate:g}, noise multiplier {one.noise_multiplier:.4g}"
        )

    def guarantees(
        self,
        *,
        group_size: int,
        rounds: int,
        secure_noise: bool = True,
        not_covered: Sequence[str] = (),
    ) -> list[Guarantee]:
        """`uldp_group_guarantees` after ``rounds`` rounds."""
        silo = replace(self.one_round, steps=self.one_round.steps * rounds)
        return uldp_group_guarantees(
            [silo] * self.sampling.population,
            group_size=group_size,
            delta=self.delta,
            secure_noise=secure_noise,
            not_covered=not_covered,
        )
