"""Measure noise and bounds in held runs, and compute ε a second time from them.

This ε uses neither the app's guarantees nor the accountants of this package: dp-accounting composes
the measured releases.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import dp_accounting
import numpy as np
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy.stats import chi2

from flower_ext.privacy import FixedSizeSampling, NeighboringRelation, PoissonSampling
from flower_ext.privacy.guarantee import epsilon_text
from flower_ext_check.mechanisms import Declared
from flower_ext_check.observed import Observed
from flower_ext_check.probes import Probes, RunName
from flower_ext_check.vectors import HELD

LUCK = 1e-6
"""All statistical decisions of a check are right with a probability of at least 1 − `LUCK`."""
_DECISIONS = 100
_SLACK = 1.01
"""Factor by which two accountants may differ, because each rounds on its own grid."""
_NOTHING = np.empty(0)


class Spread(NamedTuple):
    """A measured standard deviation, with bounds that hold almost surely (see `spread`)."""

    value: float
    low: float
    high: float


def spread(differences: np.ndarray) -> Spread:
    """Return the standard deviation of Gaussian noise of mean zero, with bounds.

    The bounds fail with probability `LUCK` / `_DECISIONS`.
    """
    count, total = differences.size, float(np.sum(differences**2))
    low, high = chi2.ppf([LUCK / _DECISIONS / 2, 1 - LUCK / _DECISIONS / 2], count)
    return Spread((total / count) ** 0.5, (total / high) ** 0.5, (total / low) ** 0.5)


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
    declared, noise, stated = traits.mechanism.declared, traits.noise, traits.stated
    if declared is None or noise is None or stated is None:
        return None
    gap = _pooled(upload_gap, probes)
    if not gap.size:
        gap = _pooled(release_gap, probes)
    if not gap.size:
        return None
    ratio, size = spread(gap), len(probes.seen(RunName.AGAIN).cohort(1))
    in_upload, sampling = noise.of_upload(size), declared.release.sampling.describe()
    stddev = in_upload * size**0.5 or noise.release_stddev * noise.cohort
    if noise.bounds_models:  # the adversary sees each upload
        stddev, sampling = declared.stddev, "each upload alone"
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
    """Return the reason why `measured` returned None; "" if the app has no `stated` guarantee."""
    if probes.traits.stated is None:
        return ""
    if reason := probes.traits.mechanism.unmeasured:
        return reason
    if any(
        (run := probes.runs.get(name)) is None or run.ended
        for name in (RunName.AGAIN, RunName.OTHER)
    ):
        return "a run with other random numbers did not end in time, or failed"
    return "no upload and no released mean shows the noise in the first round"


def _pooled(gap: Callable[[Probes, int], np.ndarray], probes: Probes) -> np.ndarray:
    return np.concatenate([gap(probes, number) for number in probes.comparable])


def upload_gap(probes: Probes, number: int) -> np.ndarray:
    """Return the differences between the uploads of two runs, which have different noise.

    Each difference is divided by its promised standard deviation, which follows from the app's
    parameters. The array is empty if the uploads carry no noise, or if no two can be compared.
    """
    noise, holds = probes.traits.noise, probes.traits.holds
    runs = [
        probes.seen(name)
        for name in ((RunName.AGAIN, RunName.OTHER) if holds else (RunName.REAL, RunName.AGAIN))
    ]
    left, right = (run.uploads(number) for run in runs)
    if holds and not left.keys() & right.keys():
        # Without a common client, compare different ones: all send the same public update.
        right = dict(zip(left, right.values(), strict=False))
    pairs = [(left[client], right[client]) for client in left.keys() & right.keys()]
    parts = [one.sample - other.sample for one, other in pairs if one.finite and other.finite]
    if noise is None or not parts:
        return _NOTHING
    stddev = math.hypot(*(noise.of_upload(len(run.cohort(number))) for run in runs))
    return np.concatenate(parts) / stddev if stddev else _NOTHING


def release_gap(probes: Probes, number: int) -> np.ndarray:
    """Return the difference between the releases of two runs, which have different noise.

    The difference is divided by its promised standard deviation, which follows from the app's
    parameters. The array is empty if these parameters promise no noise in a release, or if the
    releases cannot be compared.
    """
    noise = probes.traits.noise
    one, other = (probes.seen(name).step(number) for name in (RunName.AGAIN, RunName.OTHER))
    if noise is None or not noise.release_stddev or not probes.traits.holds:
        return _NOTHING
    if one is None or other is None:
        return _NOTHING
    return np.asarray((one.sample - other.sample) / (noise.release_stddev * 2**0.5))


def _growth(probes: Probes) -> float:
    """Return the distance by which one unit moved the noised value, divided by the app's bound.

    The distance is measured in held runs. The result is 0 if no run shows the distance.
    """
    noise, mechanism = probes.traits.noise, probes.traits.mechanism
    assert noise is not None
    assert mechanism.declared is not None
    huge, quiet = probes.seen(RunName.HUGE), probes.seen(RunName.QUIET)
    if noise.in_steps:
        return _upload_change(huge, quiet) / mechanism.declared.moves
    if noise.bounds_models or not probes.is_exact:
        return 0.0
    if mechanism.of_units:
        return _unit_movement(huge, quiet, noise.cohort) / noise.clipping_norm
    if any(noise.upload_stddev.values()) and (upload := huge.target_upload(1)):
        return upload.norm / noise.clipping_norm
    moved = probes.movement(RunName.HUGE, 1)
    return 0.0 if moved is None else (abs(moved) * noise.cohort + HELD) / noise.clipping_norm


def _upload_change(huge: Observed, quiet: Observed) -> float:
    """Return the distance between the first uploads of the changed client in two runs.

    Return 0 if the uploads of another client differ as well, because the runs then differ in more
    than the change.
    """
    left, right, target = huge.uploads(1), quiet.uploads(1), huge.target(1)
    if left.keys() != right.keys() or target not in left:
        return 0.0
    distances = {client: left[client].minus(right[client]) for client in left}
    changed = distances.pop(target)
    if not changed.finite or any(distance.norm for distance in distances.values()):
        return 0.0
    return float(changed.norm * (changed.size / changed.sample.size) ** 0.5)


def _unit_movement(huge: Observed, quiet: Observed, cohort: float) -> float:
    """Return how far one unit moves the sum of round 1, if several clients have its records.

    The function compares the uploads of two runs if the check sees uploads, and the released means
    if not. Uploads come first because the server may refuse a huge upload.
    """
    left, right = huge.uploads(1), quiet.uploads(1)
    changed, held = huge.step(1), quiet.step(1)
    if left and left.keys() == right.keys():
        parts, factor = [left[client].minus(right[client]) for client in left], 1.0
    elif changed is not None and held is not None:
        parts, factor = [changed.minus(held)], cohort
    else:
        return 0.0
    moved = np.linalg.norm(np.sum([part.sample for part in parts], axis=0))
    skipped = parts[0].size / parts[0].sample.size
    return float(moved * factor * skipped**0.5) if all(p.finite for p in parts) else 0.0


def second_epsilon(declared: Declared, noise_multiplier: float, delta: float) -> float:
    """Return ε of the declared releases with another noise multiplier, by dp-accounting.

    ``noise_multiplier`` replaces the declared one.
    """
    if noise_multiplier <= 0:
        return math.inf
    release, count = declared.release, declared.count
    relative = noise_multiplier / release.relation.sensitivity_factor
    besides = [
        (query.noise_multiplier / query.relation.sensitivity_factor, times)
        for query, times in declared.besides.items()
    ]
    # Gaussian releases compose to one, whose 1 / sigma² is the sum of theirs.
    sigma = sum(times / sigma**2 for sigma, times in [(relative, count), *besides]) ** -0.5
    plain = float(dp_accounting.get_epsilon_gaussian(sigma, delta))
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
