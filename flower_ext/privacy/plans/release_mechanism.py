"""The mechanisms of a `ReleasePlan`: each round releases one noised sum of clients' uploads.

The clipping norm is fixed or follows a quantile of the updates (`AdaptiveRelease`). If clients take
turns, all rounds together are one Gaussian mechanism (`SpacedRelease`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flower_ext.privacy.accounting.events import MOST_NOISE, Release
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.accounting.sampling import SpacedSampling
from flower_ext.privacy.guarantee import Guarantee
from flower_ext.privacy.mechanisms.adaptive_clipping import (
    SIDE,
    AdaptiveClipping,
    SidedSum,
    with_room_for_side,
)
from flower_ext.privacy.mechanisms.correlated_noise import StrategyMatrix
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.mechanisms.protections import ClipAndNoise, Protection
from flower_ext.privacy.mechanisms.round_mechanism import Aggregate
from flower_ext.privacy.mechanisms.updates import NamedArrays, RunningSum
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.privacy.theorems.client_level import client_level_guarantees
from flower_ext.privacy.units import AdversaryView

_ADAPTIVE = (
    "the clipping norm of a round is a function of earlier releases and public numbers, so rounds "
    "compose adaptively; the number of updates within the norm is released under the same noise"
)
_SPACED = (
    "a client that is asked has taken part, whether it answers or not; which clients may take part "
    "depends on earlier releases and participations only, and on no other data",
    "the noise of earlier rounds stays secret; no two runs continue from one state, such as a "
    "copy or a backup, unless both charge one account",
    "a partition-id belongs to the same client in all rounds, also after its node registers anew",
)


@dataclass(frozen=True, kw_only=True)
class ReleaseMechanism(NoisedSum):
    """A `NoisedSum` with its guarantees."""

    def guarantees(self, run: RunSummary) -> list[Guarantee]:
        """Return the provable guarantee against each adversary. The units must be clients."""
        return client_level_guarantees(self, run)


@dataclass(frozen=True, kw_only=True)
class AdaptiveRelease(ReleaseMechanism):
    """A `ReleaseMechanism` of one round, with a clipping norm that follows a quantile.

    Each update carries one more number, its *side*, which says whether the update is longer than
    the norm C (see `adaptive_clipping`). ``clipping_norm`` is C', which bounds update and side
    together. Sum, noise, grid and accounting therefore work as for a fixed norm.
    """

    clipping: AdaptiveClipping
    adaptive_norm: float
    """Norm C of the round."""
    clipping_norm: float = field(init=False)

    def __post_init__(self) -> None:
        spent_on_count = (self.noise_multiplier / self._count_noise / 2) ** 2
        bound = self.adaptive_norm / math.sqrt(1 - spent_on_count)
        object.__setattr__(self, "clipping_norm", bound)
        super().__post_init__()

    @property
    def _count_noise(self) -> float:
        cohort_size = self.sampling.expected_cohort_size
        return self.clipping.count_noise(self.noise_multiplier, cohort_size)

    @property
    def side_weight(self) -> float:
        """κ, the factor by which a side is multiplied (see `adaptive_clipping`).

        Noise of stddev σC' on the sum of κ·side is noise of stddev σ_b on the sum of sides.
        """
        return self.noise_stddev / self._count_noise

    def upload_like(self, model: dict[str, Any]) -> dict[str, Any]:
        """Return the model's arrays, and one more array if clients send the side."""
        return model if self.noised_by_server else with_room_for_side(model)

    def protection(self, run: RunSummary, cohort_size: int) -> Protection | None:
        """Return the protection that bounds update and side, and adds one client's noise share."""
        usual = super().protection(run, cohort_size)
        if not isinstance(usual, ClipAndNoise):
            return usual
        return replace(usual, adaptive_norm=self.adaptive_norm, side_weight=self.side_weight)

    def begin_sum(self, like: NamedArrays) -> RunningSum:
        """Return an empty sum. If the server adds the noise, the sum also computes the sides."""
        if not self.noised_by_server:
            return super().begin_sum(like)
        return SidedSum(like, self.clipping_norm, self.adaptive_norm, self.side_weight)

    def after(self, mean: Aggregate) -> tuple[Aggregate, AdaptiveRelease]:
        """Return the mean of the updates, and the mechanism with the next round's clipping norm."""
        value = dict(mean.value)
        fraction = 0.5 + float(value.pop(SIDE)[0]) / self.side_weight
        norm = self.clipping.next_norm(self.adaptive_norm, fraction)
        return replace(mean, value=value), replace(self, adaptive_norm=norm)

    @property
    def state(self) -> Mapping[str, float]:
        """The norm C of the round."""
        return {"adaptive_norm": self.adaptive_norm}

    def restored(self, state: Mapping[str, float]) -> AdaptiveRelease:
        """Return the mechanism with the norm that a checkpoint holds."""
        return replace(self, adaptive_norm=state["adaptive_norm"])

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumption that the norm depends on earlier releases and public numbers only."""
        return (_ADAPTIVE,)


@dataclass(frozen=True, kw_only=True)
class SpacedRelease(ReleaseMechanism):
    """A `ReleaseMechanism` whose rounds together are one Gaussian mechanism.

    See `correlated_noise` for the proof.

    Guarantees
    ----------
    For any number of rounds, the run is one Gaussian mechanism with the noise multiplier
    ``noise_multiplier``. The adversary sees all released models and who took part. The caller must
    give each round a noise source with the noise that ``strategy`` determines for that round.
    """

    sampling: SpacedSampling
    strategy: StrategyMatrix

    @property
    def noise_stddev(self) -> float:
        """Stddev of the fresh noise that a round draws, before earlier noise is subtracted.

        It is the noise multiplier times the clipping norm times the sensitivity of ``strategy``.
        """
        return super().noise_stddev * self.strategy.sensitivity(**self.sampling.limits)

    @property
    def mean_noise_stddev(self) -> float:
        """Stddev of the whole noise in each coordinate of the mean of the last planned round."""
        return super().mean_noise_stddev * float(np.linalg.norm(self.strategy.inverse(self.rounds)))

    def release_in(self, number: int) -> Release:
        """Return the release of round ``number`` for the client about which it reveals most."""
        return self._releases(number)[-1]

    def releases(self, participations: Participations) -> dict[Release, int]:
        """Return the releases of the rounds so far; rounds differ in their noise multipliers."""
        return dict(Counter(self._releases(participations.rounds)))

    def _releases(self, rounds: int) -> list[Release]:
        limits = self.sampling.limits
        moves = self.strategy.row_moves(rounds, **limits)
        fresh = self.noise_multiplier * self.strategy.sensitivity(**limits)
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
        """Return the guarantees, with one more for an adversary that sees who took part."""
        models, *others = super().guarantees(run)
        sampling, rounds = self.sampling.describe(), run.participations.rounds
        models = replace(
            models,
            source=f"{sampling}; one Gaussian mechanism of noise multiplier "
            f"{self.noise_multiplier:.4g} for all rounds; {rounds} rounds so far",
        )
        return [models, replace(models, view=AdversaryView.MODELS_AND_COHORTS), *others]
