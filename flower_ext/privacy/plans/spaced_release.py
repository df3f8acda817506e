"""The mechanism of a `ReleasePlan` whose clients take part in turn: all rounds are one Gaussian."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from flower_ext.privacy.accounting.events import MOST_NOISE, Release
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.accounting.sampling import SpacedSampling
from flower_ext.privacy.guarantee import Guarantee
from flower_ext.privacy.mechanisms.correlated_noise import StrategyMatrix
from flower_ext.privacy.mechanisms.run_summary import RunSummary
from flower_ext.privacy.plans.release_mechanism import ReleaseMechanism
from flower_ext.privacy.units import AdversaryView


@dataclass(frozen=True, kw_only=True)
class SpacedRelease(ReleaseMechanism):
    """A `ReleaseMechanism` whose rounds are one Gaussian mechanism (see `correlated_noise`).

    Guarantees
    ----------
    For any number of rounds, the run is one Gaussian mechanism of noise multiplier
    ``noise_multiplier``, against an adversary that sees all released models and who took part. The
    noise source of each round must hold the noise y that ``strategy`` gives for that round.

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
        """Return a release with the loss that a round adds for the most exposed client."""
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

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Assumptions on who takes part, and on the noise of earlier rounds."""
        return _SPACED

    def guarantees(self, run: RunSummary) -> list[Guarantee]:
        """Return the guarantees, one of them against an adversary that sees who took part."""
        models, *others = super().guarantees(run)
        sampling, rounds = self.sampling.describe(), run.participations.rounds
        models = replace(
            models,
            source=f"{sampling}; one Gaussian mechanism of noise multiplier "
            f"{self.noise_multiplier:.4g} for all rounds; {rounds} rounds so far",
        )
        return [models, replace(models, view=AdversaryView.MODELS_AND_COHORTS), *others]


_SPACED = (
    "a client that is asked has taken part, whether it answers or not; which clients may take part "
    "depends on earlier releases and participations only, and on no other data",
    "the noise of earlier rounds stays secret; no two runs continue from one state, such as a "
    "copy or a backup, unless both charge one account",
    "a partition-id belongs to the same client in all rounds, also after its node registers anew",
)
