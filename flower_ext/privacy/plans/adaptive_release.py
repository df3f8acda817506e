"""The mechanisms of a `ReleasePlan` whose clipping norm follows a quantile of the updates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flower_ext.checks import require_positive
from flower_ext.privacy.mechanisms.adaptive_clipping import (
    SIDE,
    AdaptiveClipping,
    SidedSum,
    with_room_for_side,
)
from flower_ext.privacy.mechanisms.protections import ClipAndNoise, Protection
from flower_ext.privacy.mechanisms.round_mechanism import Aggregate
from flower_ext.privacy.mechanisms.updates import NamedArrays, RunningSum
from flower_ext.privacy.plans.release_mechanism import ReleaseMechanism
from flower_ext.privacy.run_summary import RunSummary

_ADAPTIVE = (
    "the clipping norm of a round is a function of earlier releases and public numbers, so rounds "
    "compose adaptively; the number of updates within the norm is released under the same noise"
)


@dataclass(frozen=True, kw_only=True)
class AdaptiveRelease(ReleaseMechanism):
    """A `ReleaseMechanism` of one round, with a clipping norm that follows a quantile.

    Each update carries one more number, its *side*, which says if the update is longer than the
    norm C (see `adaptive_clipping`). ``clipping_norm`` C' bounds update and side together, so sum,
    noise, grid and accounting work as for a fixed norm.

    Parameters
    ----------
    clipping : AdaptiveClipping
    update_norm : float
        C of the round.
    **options
        Fields of `ReleaseMechanism`, except ``clipping_norm``.
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
        """κ, the factor of each side.

        Noise of stddev σC' on the sum of κ·side is noise of stddev σ_b on the sum of sides.
        """
        return self.noise_stddev / self._count_noise

    def upload_like(self, model: dict[str, Any]) -> dict[str, Any]:
        """Return arrays with the names, shapes and types of an upload.

        An upload has an array for the side, unless the server computes the side.
        """
        return model if self.noised_by_server else with_room_for_side(model)

    def protection(self, run: RunSummary, cohort_size: int) -> Protection | None:
        """Return the protection that bounds update and side, and adds a client's noise share."""
        usual = super().protection(run, cohort_size)
        if not isinstance(usual, ClipAndNoise):
            return usual
        return replace(usual, update_norm=self.update_norm, side_weight=self.side_weight)

    def begin_sum(self, like: NamedArrays) -> RunningSum:
        """Return an empty sum. If the server adds the noise, the sum also computes the sides."""
        if not self.noised_by_server:
            return super().begin_sum(like)
        return SidedSum(like, self.clipping_norm, self.update_norm, self.side_weight)

    def after(self, mean: Aggregate) -> tuple[Aggregate, AdaptiveRelease]:
        """Return the mean without the sides, and the mechanism with the next round's norm."""
        value = dict(mean.value)
        fraction = 0.5 + float(value.pop(SIDE)[0]) / self.side_weight
        norm = self.clipping.next_norm(self.update_norm, fraction)
        return replace(mean, value=value), replace(self, update_norm=norm)

    @property
    def state(self) -> Mapping[str, float]:
        """The norm C of the round."""
        return {"clipping_norm": self.update_norm}

    def restored(self, state: Mapping[str, float]) -> AdaptiveRelease:
        """Return the mechanism with the norm that a checkpoint holds."""
        return replace(self, update_norm=state["clipping_norm"])

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumption about the norm."""
        return (_ADAPTIVE,)
