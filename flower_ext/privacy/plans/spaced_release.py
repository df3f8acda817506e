"""The mechanism of a `ReleasePlan` whose clients take turns.

All rounds together are one Gaussian mechanism.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from flower_ext.privacy.accounting.events import MOST_NOISE, Release
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.accounting.sampling import SpacedSampling
from flower_ext.privacy.guarantee import Guarantee
from flower_ext.privacy.mechanisms.correlated_noise import StrategyMatrix
from flower_ext.privacy.plans.release_mechanism import ReleaseMechanism
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.privacy.units import AdversaryView


@dataclass(frozen=True, kw_only=True)
class SpacedRelease(ReleaseMechanism):
    """A `ReleaseMechanism` whose rounds together are one Gaussian mechanism.

    See `correlated_noise` for the proof.

    Guarantees
    ----------
    For any number of rounds, the run is one Gaussian mechanism with the noise multiplier
    ``noise_multiplier``. The adversary sees all released models and who took part. The caller must
    give each round a noise source with the noise y that ``strategy`` determines for that round.

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
    def noise_stddev(self) -> float:
        """Standard deviation of a round's fresh noise z.

        It is σ times the clipping norm times the sensitivity of ``strategy``.
        """
        return super().noise_stddev * self.strategy.sensitivity(**self._limits)

    @property
    def mean_noise_stddev(self) -> float:
        """Stddev of the noise y in each coordinate of the mean of the last planned round."""
        return super().mean_noise_stddev * float(np.linalg.norm(self.strategy.inverse(self.rounds)))

    def release_in(self, number: int) -> Release:
        """Return the release that stands for round ``number`` in the accounting.

        Its privacy loss is the most that this round adds for any client.
        """
        return self._releases(number)[-1]

    def releases(self, participations: Participations) -> dict[Release, int]:
        """Return the releases of the rounds so far, with their counts.

        Rounds differ in their noise multipliers, which say how much each round adds to the loss of
        the run.
        """
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
        """Assumptions about the clients that take part, and about the noise of earlier rounds."""
        return _SPACED

    def guarantees(self, run: RunSummary) -> list[Guarantee]:
        """Return the guarantees; one is for an adversary that sees models and who took part."""
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
