"""Compute ε a second time: from measured noise, measured bounds and observed cohorts.

No guarantee of the app enters, and no accountant of this package: dp-accounting and a closed form
compose what was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import dp_accounting
import numpy as np
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq
from scipy.special import log_ndtr

from flower_ext.check.probes import AGAIN, OTHER, REAL, Probes, spread
from flower_ext.check.recognise import Facts
from flower_ext.privacy import FixedSizeSampling, NeighboringRelation, PoissonSampling, Release
from flower_ext.privacy.guarantee import epsilon_text

_SLACK = 1.01
"""Room for the grids of two accountants."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """An ε that does not rest on the app's own, beside that one."""

    epsilon: float
    low: float
    """ε with the most noise that the measurement permits."""
    high: float
    stated: float
    text: str

    @property
    def agrees(self) -> bool:
        """False if even the most noise that the measurement permits gives more than stated."""
        return self.low <= self.stated * _SLACK


def measured(probes: Probes, facts: Facts) -> Measured | None:
    """Return ε by the measurements in the first round; None if it does not follow from them."""
    release, noise, stated = facts.declared, facts.noise, facts.stated
    if release is None or noise is None or stated is None:
        return None
    gap = upload_gap(probes, facts, 1)
    if gap is None and (gap := release_gap(probes, facts, 1)) is None:
        return None
    ratio, planned, moves = spread(gap), facts.planned, facts.moves
    size = probes.cohort(AGAIN, 1)
    in_sum = noise.of_upload(size) * size**0.5 or noise.release_stddev * noise.cohort
    drawn = release.sampling.describe()
    if noise.bounds_models:  # the adversary sees each upload
        in_sum, drawn = noise.of_upload(size), "each upload alone"
    else:
        by_client = any(noise.upload_stddev.values())
        if (bound := probes.bound(1, noise.cohort, by_client=by_client)) is not None:
            moves *= max(1.0, bound / noise.clipping_norm)
    multipliers = [in_sum * value / moves for value in (ratio.value, ratio.high, ratio.low)]
    epsilon, low, high = (
        second_epsilon(release, multiplier, planned, stated.delta) for multiplier in multipliers
    )
    return Measured(
        epsilon=epsilon,
        low=low,
        high=high,
        stated=stated.epsilon,
        text=f"noise of {multipliers[0]:.4g} times what one {stated.unit.value} moves "
        f"({multipliers[2]:.4g} to {multipliers[1]:.4g}; that is {moves:.4g}), "
        f"{drawn}, {planned} rounds: ε = {epsilon_text(epsilon)} "
        f"({low:.3g} to {high:.3g}) at δ = {stated.delta:.3g}",
    )


def upload_gap(probes: Probes, facts: Facts, number: int) -> np.ndarray | None:
    """Return differences of uploads in promised standard deviations; None without any."""
    if (noise := facts.noise) is None or not any(noise.upload_stddev.values()):
        return None
    pair = (AGAIN, OTHER) if facts.holds else (REAL, AGAIN)
    sizes = [probes.cohort(name, number) for name in pair]
    stddev = math.hypot(*(noise.of_upload(size) for size in sizes))
    parts = probes.upload_noise(*pair, number)
    return np.concatenate(list(parts.values())) / stddev if parts and stddev else None


def release_gap(probes: Probes, facts: Facts, number: int) -> np.ndarray | None:
    """Return a difference of two released steps in promised standard deviations."""
    if (noise := facts.noise) is None or not noise.release_stddev or not facts.holds:
        return None
    step = probes.release_noise(AGAIN, OTHER, number)
    return None if step is None else step / (noise.release_stddev * 2**0.5)


def second_epsilon(release: Release, noise_multiplier: float, rounds: int, delta: float) -> float:
    """Return ε of releases with another noise, by dp-accounting or a closed form."""
    if noise_multiplier <= 0:
        return math.inf
    relative = noise_multiplier / release.relation.sensitivity_factor
    plain = gaussian_epsilon(rounds**0.5 / relative, delta)
    sampling, gaussian = release.sampling, dp_accounting.GaussianDpEvent(relative)
    if sampling.sampling_rate == 1 or plain > 1000:
        return plain
    if isinstance(sampling, PoissonSampling):
        event = dp_accounting.PoissonSampledDpEvent(sampling.rate, gaussian)
        sampled = PLDAccountant().compose(event, rounds).get_epsilon(delta)
        return min(plain, float(sampled))
    replaces = release.relation is NeighboringRelation.REPLACE_ONE
    if isinstance(sampling, FixedSizeSampling) and replaces:
        drawn = dp_accounting.SampledWithoutReplacementDpEvent(
            sampling.population, sampling.size, gaussian
        )
        accountant = RdpAccountant(
            neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
        )
        return min(plain, float(accountant.compose(drawn, rounds).get_epsilon(delta)))
    return plain


def gaussian_epsilon(distance: float, delta: float) -> float:
    """Return ε of two unit Gaussians at a distance: δ = Φ(d/2 − ε/d) − e^ε Φ(−d/2 − ε/d)."""

    def excess(epsilon: float) -> float:
        first = log_ndtr(distance / 2 - epsilon / distance)
        second = epsilon + log_ndtr(-distance / 2 - epsilon / distance)
        return float(first + np.log(-np.expm1(min(second - first, -1e-300))) - math.log(delta))

    if excess(0.0) <= 0:
        return 0.0
    return float(brentq(excess, 0.0, distance**2 + 50 * distance + 1, xtol=1e-9))
