"""Exact composition of Gaussian releases that no sampling amplifies."""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from flower_ext.checks import require_delta, require_not_negative
from flower_ext.privacy.accounting.events import LEAST_NOISE, PrivacyLoss, Release
from flower_ext.privacy.accounting.sampling import FullParticipation
from flower_ext.privacy.units import NeighboringRelation

EXACT_GAUSSIAN = "exact Gaussian composition"
"""Balle and Wang (2018), Theorem 8: tight, since every release is a Gaussian."""


def gaussian_loss(relative_noise: float, *, releases: float, delta: float) -> PrivacyLoss:
    """Return (ε, δ) of Gaussian releases, exactly (Balle and Wang 2018, Theorem 8).

    Parameters
    ----------
    relative_noise : float
        σ: standard deviation of the noise, divided by the largest L2 distance by which one unit
        moves a sum.
    releases : float
        Number of releases. If a release has the relative noise σ_t instead of σ, count it as
        (σ/σ_t)² releases. If the adversary sees who took part, count for each unit the releases to
        which it contributed, and pass the largest of these counts. The number must not depend on
        anybody's data.

    Raises
    ------
    ValueError
        A number is below 0, or ``delta`` is outside (0, 1).
    """
    require_not_negative("relative_noise", relative_noise)
    require_not_negative("releases", releases)
    require_delta(delta)
    if releases == 0:
        return PrivacyLoss(epsilon=0.0, delta=delta, accountant=EXACT_GAUSSIAN, releases=())
    relative_noise = float(relative_noise) / math.sqrt(releases)
    together = Release(
        sampling=FullParticipation(1),
        noise_multiplier=relative_noise,
        relation=NeighboringRelation.REPLACE_SPECIAL,
    )
    return replace(_one_gaussian(relative_noise, delta), releases=((together, 1),))


def without_amplification(counts: Iterable[tuple[Release, int]], delta: float) -> PrivacyLoss:
    """Return the loss of releases as if no sampling amplified them.

    Gaussians with noise multipliers σ_i together have the same loss as one Gaussian with the noise
    multiplier (Σ σ_i⁻²)^(−1/2).
    """
    precision = sum(count / release.relative_noise**2 for release, count in counts)
    return _one_gaussian(1 / math.sqrt(precision), delta)


@lru_cache(maxsize=4096)
def _one_gaussian(relative_noise: float, delta: float) -> PrivacyLoss:
    import dp_accounting

    epsilon = math.inf
    if relative_noise > LEAST_NOISE:
        epsilon = float(dp_accounting.get_epsilon_gaussian(relative_noise, delta))
    epsilon *= 1 + 1e-9  # the root finder may stop just below the root
    return PrivacyLoss(epsilon=epsilon, delta=delta, accountant=EXACT_GAUSSIAN)
