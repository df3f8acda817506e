"""Bounds on ε by privacy loss distributions (PLD).

A distribution is stored on a grid of privacy losses. Fourier transforms compose the distributions
of several releases.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from flower_ext.privacy.accounting.events import Counts, PrivacyLoss, Release

_ROUNDING = 1e-15
"""Bound on the error in δ that Fourier transforms add per step: 10 times the measured error."""
FINEST_INTERVAL, WIDEST_INTERVAL = 1e-5, 100.0
"""Limits of a grid's interval. Narrower ones lose δ to rounding; in wider ones, exp overflows."""
_MOST_CELLS = 50_000
"""Largest number of grid intervals for one release; a grid of this size takes half a second."""
_MOST_AT_ONCE = 4096
"""Largest number of copies of a grid that one Fourier transform composes. For more copies, the
transforms become long, and the bound by which dp-accounting cuts their tails is loose."""


@lru_cache(maxsize=1024)
def pld_loss(
    counts: Counts, spends: tuple[PrivacyLoss, ...], delta: float, *, rough: float
) -> PrivacyLoss:
    """Return PLD's bound on ε of releases together with other mechanisms.

    ``spends`` has the (ε, δ) of the other mechanisms, of which nothing else is known. The bound
    holds for the worst mechanisms with these (ε, δ). ``rough`` is an estimate of ε, from which the
    function chooses the grid.
    """
    from dp_accounting.pld import privacy_loss_distribution as grids

    steps = len(spends) + sum(count for _, count in counts)
    # A finer grid takes longer and loses δ to rounding; a coarser one adds to ε.
    if spends:  # the grid rounds the ε of each spend up by one interval at most
        interval = max(min(1e-3 * rough / steps, 1e-3), FINEST_INTERVAL, 2e-6 * rough)
    else:
        interval = min(_grid_interval(rough, delta, steps=steps), max(1e-3, 2e-5 * rough))
    interval = max(interval, _widest_step(counts) / _MOST_CELLS)
    losses = [_losses_of(release, count, interval) for release, count in counts]
    for spend in spends:  # the worst mechanism with this (ε, δ)
        known = grids.common.DifferentialPrivacyParameters(spend.epsilon, spend.delta)
        losses.append((grids.from_privacy_parameters(known, interval), 1))
    epsilon = pld_epsilon(losses, delta, interval=interval)
    name = "PLD, optimal composition" if spends else "PLD"
    return PrivacyLoss(epsilon=epsilon, delta=delta, accountant=name)


def _widest_step(counts: Counts) -> float:
    """Return the width of the range of privacy losses, for the release whose range is widest.

    The range leaves out noise beyond ten standard deviations. Equal releases without sub-sampling
    count as one Gaussian.
    """
    widest = 0.0
    for release, count in counts:
        shift, rate = 1 / release.relative_noise, release.poisson_rate
        if rate == 1:
            shift *= math.sqrt(count)
        log_absent = math.log1p(-rate) if rate < 1 else -math.inf
        ends = [
            float(np.logaddexp(log_absent, math.log(rate) + shift * z))
            for z in (shift / 2 + 10, -shift / 2 - 10)
        ]
        widest = max(widest, ends[0] - ends[1])
    return widest


def _grid_interval(epsilon: float, delta: float, *, steps: int) -> float:
    """Return an interval of the grid for which the rounding makes ε larger by about a thousandth.

    Many steps together are nearly one Gaussian. If one unit moves the mean of this Gaussian by μ
    standard deviations, ε at δ is about μ²/2 + μ √(2 log 1/δ), and the privacy loss has variance
    μ². A grid of interval w adds at most w²/4 to this variance in every step.
    """
    log = -math.log(delta)
    shift = math.sqrt(2) * (math.sqrt(log + epsilon) - math.sqrt(log))
    interval = 2 * shift * math.sqrt(1e-3 / steps)
    return min(max(interval, FINEST_INTERVAL), WIDEST_INTERVAL)


def pld_epsilon(losses: Sequence[tuple[Any, int]], delta: float, *, interval: float) -> float:
    """Return a safe bound on ε of a composition: privacy losses are rounded up to the grid.

    ``losses`` are pairs of a mechanism's privacy losses, on a grid of ``interval``, and the number
    of times that the mechanism runs. The result is infinite if the rounding errors of the Fourier
    transforms could reach ``delta``.
    """
    from dp_accounting import pld

    resolved = delta - _ROUNDING * sum(count for _, count in losses)
    if resolved <= 0:
        return math.inf
    total = pld.privacy_loss_distribution.identity(interval)
    for grid, count in losses:
        total = total.compose(_composed(grid, count))
    return float(total.get_epsilon_for_delta(resolved))


def _losses_of(release: Release, count: int, interval: float) -> tuple[Any, int]:
    """Return a release's privacy losses on a grid, and how many copies of them to compose."""
    noise, rate = release.relative_noise, release.poisson_rate
    if rate == 1:  # together they have the losses of one Gaussian
        return _gaussian_losses(noise / math.sqrt(count), rate, interval), 1
    return _gaussian_losses(noise, rate, interval), count


@lru_cache(maxsize=32)  # after each round, ε is mostly computed from this same grid
def _gaussian_losses(noise_multiplier: float, sampling_rate: float, interval: float) -> Any:
    """Return one Gaussian's privacy losses on a grid; with sub-sampling, this takes long."""
    from dp_accounting.pld import privacy_loss_distribution as grids

    return grids.from_gaussian_mechanism(
        noise_multiplier, value_discretization_interval=interval, sampling_prob=sampling_rate
    )


def _composed(losses: Any, count: int) -> Any:
    """Compose ``count`` copies of privacy losses on a grid, in blocks if there are many copies."""
    if count <= _MOST_AT_ONCE:
        return losses.self_compose(count)
    blocks, left = divmod(count, _MOST_AT_ONCE)
    total = _composed(losses.self_compose(_MOST_AT_ONCE), blocks)
    return total.compose(losses.self_compose(left)) if left else total
