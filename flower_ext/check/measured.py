"""Compute ε a second time: from measured noise, measured bounds and observed cohorts.

This ε uses neither the app's guarantees nor the accountants of this package: dp-accounting and a
closed form compose the measured releases.
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

from flower_ext.check.mechanisms import Declared
from flower_ext.check.probes import AGAIN, OTHER, QUIET, REAL, Probes, spread
from flower_ext.privacy import FixedSizeSampling, NeighboringRelation, PoissonSampling
from flower_ext.privacy.guarantee import epsilon_text

_SLACK = 1.01
"""Factor by which two accountants may differ, because each rounds on its own grid."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """An ε computed from measurements, and the ε that the app states, for comparison."""

    epsilon: float
    low: float
    """ε with the most noise that the measurement permits."""
    high: float
    """ε with the least noise that the measurement permits."""
    stated: float
    text: str

    @property
    def agrees(self) -> bool:
        """True if the stated ε is, apart from rounding, at least ``low``."""
        return self.low <= self.stated * _SLACK


def measured(probes: Probes) -> Measured | None:
    """Return ε as computed from the measurements; None if they do not determine ε."""
    traits = probes.traits
    declared, noise, stated = traits.ours.declared, traits.noise, traits.stated
    if declared is None or noise is None or stated is None:
        return None
    if (gap := _pooled_gap(probes)) is None:
        return None
    ratio, size = spread(gap), probes.cohort(AGAIN, 1)
    in_upload, sampling = noise.of_upload(size), declared.release.sampling.describe()
    stddev = in_upload * size**0.5 or noise.release_stddev * noise.cohort
    if noise.bounds_models:  # the adversary sees each upload
        stddev, sampling = in_upload / max(1, noise.steps) ** 0.5, "each upload alone"
    moves = declared.moves * max(1.0, _growth(probes))
    multipliers = [stddev * value / moves for value in (ratio.value, ratio.high, ratio.low)]
    epsilon, low, high = (
        second_epsilon(declared, multiplier, stated.delta) for multiplier in multipliers
    )
    besides = sum(declared.besides.values())
    return Measured(
        epsilon=epsilon,
        low=low,
        high=high,
        stated=stated.epsilon,
        text=f"noise of {multipliers[0]:.4g} times what one {stated.unit.value} moves "
        f"({multipliers[2]:.4g} to {multipliers[1]:.4g}; that is {moves:.4g}), "
        f"{sampling}, {traits.planned} rounds{f' and {besides} queries' if besides else ''}: "
        f"ε = {epsilon_text(epsilon)} ({low:.3g} to {high:.3g}) at δ = {stated.delta:.3g}",
    )


def unmeasured(probes: Probes) -> str:
    """Return the reason why `measured` returned None; "" if the app states no ε."""
    if probes.traits.stated is None:
        return ""
    if reason := probes.traits.ours.unmeasured:
        return reason
    held = [name for name in (AGAIN, OTHER) if (run := probes.runs.get(name)) is None or run.ended]
    if held:
        return "a run with other random numbers did not end in time, or failed"
    return "no upload and no released mean shows the noise in the first round"


def _pooled_gap(probes: Probes) -> np.ndarray | None:
    """Return `upload_gap` of all rounds; if uploads show no noise, `release_gap` of all rounds.

    None if neither shows noise.
    """
    for gap in (upload_gap, release_gap):
        gaps = (gap(probes, number) for number in probes.comparable)
        if parts := [part for part in gaps if part is not None]:
            return np.concatenate(parts)
    return None


def _growth(probes: Probes) -> float:
    """Return how far one unit moved the value that gets the noise, divided by the app's bound.

    The distance is measured. The result is 0 if no run shows it.
    """
    noise, declared = probes.traits.noise, probes.traits.ours.declared
    assert noise is not None
    assert declared is not None
    if noise.steps:
        moved = probes.upload_change("huge", QUIET, 1)
        return 0.0 if moved is None else moved / declared.moves
    if noise.bounds_models:
        return 0.0
    if probes.traits.ours.of_units:
        moved = probes.unit_movement(1, noise.cohort) if probes.is_exact else None
        return 0.0 if moved is None else moved / noise.clipping_norm
    by_client = any(noise.upload_stddev.values())
    bound = probes.bound(1, noise.cohort, by_client=by_client)
    return 0.0 if bound is None else bound / noise.clipping_norm


def upload_gap(probes: Probes, number: int) -> np.ndarray | None:
    """Return the differences between the uploads of two runs, which have different noise.

    They are divided by the standard deviation that the app's parameters promise for them. None if
    the uploads carry no noise, or if no two uploads can be compared.
    """
    if (noise := probes.traits.noise) is None or not any(noise.upload_stddev.values()):
        return None
    pair = (AGAIN, OTHER) if probes.traits.holds else (REAL, AGAIN)
    sizes = [probes.cohort(name, number) for name in pair]
    stddev = math.hypot(*(noise.of_upload(size) for size in sizes))
    parts = probes.upload_noise(*pair, number)
    return np.concatenate(list(parts.values())) / stddev if parts and stddev else None


def release_gap(probes: Probes, number: int) -> np.ndarray | None:
    """Return the difference between the releases of two runs, which have different noise.

    It is divided by the standard deviation that the app's parameters promise for it. None if they
    promise no noise in a release, or if the releases cannot be compared.
    """
    if (
        (noise := probes.traits.noise) is None
        or not noise.release_stddev
        or not probes.traits.holds
    ):
        return None
    step = probes.release_noise(AGAIN, OTHER, number)
    return None if step is None else step / (noise.release_stddev * 2**0.5)


def second_epsilon(declared: Declared, noise_multiplier: float, delta: float) -> float:
    """Return the ε that the declared releases have at the noise multiplier ``noise_multiplier``.

    This noise multiplier replaces the declared one. dp-accounting or a closed form computes ε.
    """
    if noise_multiplier <= 0:
        return math.inf
    release, count = declared.release, declared.count
    relative = noise_multiplier / release.relation.sensitivity_factor
    besides = [
        (query.noise_multiplier / query.relation.sensitivity_factor, times)
        for query, times in declared.besides.items()
    ]
    distance = sum(times / sigma**2 for sigma, times in [(relative, count), *besides]) ** 0.5
    plain = gaussian_epsilon(distance, delta)
    sampling, gaussian = release.sampling, dp_accounting.GaussianDpEvent(relative)
    if sampling.sampling_rate == 1 or plain > 1000:
        return plain
    accountant: PLDAccountant | RdpAccountant
    if isinstance(sampling, PoissonSampling):
        accountant = PLDAccountant()
        event = dp_accounting.PoissonSampledDpEvent(sampling.rate, gaussian)
    elif (
        isinstance(sampling, FixedSizeSampling)
        and release.relation is NeighboringRelation.REPLACE_ONE
    ):
        accountant = RdpAccountant(
            neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
        )
        event = dp_accounting.SampledWithoutReplacementDpEvent(
            sampling.population, sampling.size, gaussian
        )
    else:
        return plain
    accountant.compose(event, count)
    for sigma, times in besides:
        accountant.compose(dp_accounting.GaussianDpEvent(sigma), times)
    return min(plain, float(accountant.get_epsilon(delta)))


def gaussian_epsilon(distance: float, delta: float) -> float:
    """Return ε for two Gaussians N(0, 1) and N(d, 1): δ = Φ(d/2 − ε/d) − e^ε Φ(−d/2 − ε/d)."""

    def excess(epsilon: float) -> float:
        first = log_ndtr(distance / 2 - epsilon / distance)
        second = epsilon + log_ndtr(-distance / 2 - epsilon / distance)
        return float(first + np.log(-np.expm1(min(second - first, -1e-300))) - math.log(delta))

    if excess(0.0) <= 0:
        return 0.0
    return float(brentq(excess, 0.0, distance**2 + 50 * distance + 1, xtol=1e-9))
