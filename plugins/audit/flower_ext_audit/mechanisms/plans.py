"""Plans, strategies and scores that experiments of several kinds of mechanisms share."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flower_ext.federation import FederatedStrategy, Method
from flower_ext.privacy import (
    AdaptiveClipping,
    AdversaryView,
    PrivacyPlan,
    ReleasePlan,
    Sampling,
    SecureSum,
)
from flower_ext.privacy.mechanisms.adaptive_clipping import SIDE
from flower_ext_audit.experiment import NEXT_NORM, Score, projected
from flower_ext_audit.linear import SIZE, axes

DELTA = 1e-5
MODELS = (AdversaryView.RELEASED_MODELS,)
HONEST_SUM = SecureSum(colluding=0.0, dropouts=0.0)
_RATE = 1e-2
"""Learning rate of the norm, so small that two rounds have nearly the same norm."""


def release_plans(
    sampling: Sampling, *, noise_multiplier: float = 0.5, **options: Any
) -> Callable[[float, int], ReleasePlan]:
    """Return a function that makes plans with this sampling, and these options.

    The function takes a factor for ``noise_multiplier``, and the number of rounds.
    """
    return lambda noise, rounds: ReleasePlan(
        sampling=sampling,
        clipping_norm=1.0,
        noise_multiplier=noise_multiplier * noise,
        rounds=rounds,
        delta=DELTA,
        **options,
    )


def adaptive_plans(sampling: Sampling, **options: Any) -> Callable[[float, int], ReleasePlan]:
    """Return `release_plans` with an adaptive norm.

    Half of the privacy loss comes from the counts by which the norm adapts.
    """
    fixed = release_plans(sampling, **options)

    def plan(noise: float, rounds: int) -> ReleasePlan:
        usual = fixed(noise, rounds)
        count_noise = usual.noise_multiplier / math.sqrt(2)
        clipping = AdaptiveClipping(
            initial_norm=1.0, learning_rate=_RATE, count_noise_stddev=count_noise
        )
        return replace(usual, clipping_norm=clipping)

    return plan


def sided_score(*, silos: int = 1, partitions: Sequence[int] | None = None) -> Score:
    """Return a score for adaptive clipping.

    It adds up what three values reveal of the canary: the update, the entry `SIDE` that is sent
    with it, and the clipping norm of the next round.
    """
    # The canary's entry at `SIDE` has the same norm as its update, and `axes` has the norm √2. The
    # next clipping norm reveals this entry.
    norm = 2 * math.sqrt(2) / _RATE / silos
    direction = {**axes(SIZE), SIDE: np.array([-math.sqrt(2)]), NEXT_NORM: np.array([norm])}
    return projected(direction, signs=(1.0, -1.0), partitions=partitions)


def strategy_of(method: Method, plan: PrivacyPlan, evaluate_every: int = 0) -> FederatedStrategy:
    """Return the strategy of a method under a plan."""
    return FederatedStrategy(method, plan, evaluate_every=evaluate_every)
