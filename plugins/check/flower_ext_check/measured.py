"""Measure noise and sensitivity in held runs, and compute ε a second time from them.

This ε uses neither the app's guarantees nor the accountants of this package (`second_accountant`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.stats import chi2

from flower_ext.privacy.guarantee import epsilon_text
from flower_ext_check.observed import Observed
from flower_ext_check.probes import Probes, RunName
from flower_ext_check.second_accountant import second_epsilon
from flower_ext_check.vectors import HELD_NORM

_ERROR_PROBABILITY = 1e-6
"""Largest probability that at least one statistical decision of a check is wrong."""
_DECISIONS = 100
"""Largest number of such decisions in a check."""
DECISION_ERROR = _ERROR_PROBABILITY / _DECISIONS
"""Largest probability that one statistical decision is wrong."""
_SLACK = 1.01
"""Factor by which two accountants may differ, because each rounds on its own grid."""
_NO_NUMBERS = np.empty(0)


class Spread(NamedTuple):
    """A measured standard deviation, with bounds that hold almost surely (see `spread`)."""

    value: float
    low: float
    high: float


def spread(differences: np.ndarray) -> Spread:
    """Return the standard deviation of Gaussian noise of mean zero, with bounds.

    The bounds fail with probability `DECISION_ERROR`.
    """
    count, total = differences.size, float(np.sum(differences**2))
    each_side = DECISION_ERROR / 2
    low, high = chi2.ppf([each_side, 1 - each_side], count)
    return Spread((total / count) ** 0.5, (total / high) ** 0.5, (total / low) ** 0.5)


@dataclass(frozen=True, kw_only=True)
class MeasuredEpsilon:
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


def measure_epsilon(probes: Probes) -> MeasuredEpsilon | None:
    """Return ε as computed from the measurements; None if they do not determine ε."""
    traits = probes.traits
    declared, noise, stated = traits.mechanism.declared, traits.noise, traits.stated_guarantee
    if declared is None or noise is None or stated is None:
        return None
    differences = _pooled(scaled_upload_difference, probes)
    if not differences.size:
        differences = _pooled(scaled_release_difference, probes)
    if not differences.size:
        return None
    if noise.bounds_models:  # the adversary sees each upload
        stddev, sampling = declared.stddev, "each upload alone"
    else:
        size = len(probes.seen(RunName.HELD).cohort(1))
        stddev = noise.of_upload(size) * size**0.5 or noise.release_stddev * noise.divisor
        sampling = declared.release.sampling.describe()
    # A sensitivity that the runs show to be larger than declared takes the declared one's place.
    sensitivity = declared.sensitivity * max(1.0, _measured_share_of_bound(probes))
    scale = spread(differences)  # measured noise, in promised standard deviations
    multiplier, least, most = (
        stddev * value / sensitivity for value in (scale.value, scale.low, scale.high)
    )
    epsilon, low, high = (
        second_epsilon(declared, value, stated.delta) for value in (multiplier, most, least)
    )
    queries = sum(declared.other_queries.values())
    return MeasuredEpsilon(
        epsilon=epsilon,
        low=low,
        high=high,
        stated=stated.epsilon,
        text=f"noise of {multiplier:.4g} times what one {stated.unit.value} moves "
        f"({least:.4g} to {most:.4g}; that is {sensitivity:.4g}), "
        f"{sampling}, {traits.planned_rounds} rounds"
        f"{f' and {queries} queries' if queries else ''}: "
        f"ε = {epsilon_text(epsilon)} ({low:.3g} to {high:.3g}) at δ = {stated.delta:.3g}",
    )


def unmeasured_reason(probes: Probes) -> str:
    """Return the reason why `measure_epsilon` returned None; "" if the app states no guarantee."""
    if probes.traits.stated_guarantee is None:
        return ""
    if reason := probes.traits.mechanism.unmeasured:
        return reason
    if any(
        (run := probes.runs.get(name)) is None or run.error
        for name in (RunName.HELD, RunName.OTHER_SEED)
    ):
        return "a run with other random numbers did not end in time, or failed"
    return "no upload and no released mean shows the noise in the first round"


def _pooled(difference: Callable[[Probes, int], np.ndarray], probes: Probes) -> np.ndarray:
    return np.concatenate([difference(probes, number) for number in probes.comparable])


def scaled_upload_difference(probes: Probes, number: int) -> np.ndarray:
    """Return the differences between the uploads of two runs with different noise.

    Each difference is divided by its promised standard deviation, which follows from the app's
    parameters. The array is empty if the uploads carry no noise, or if no two can be compared.
    """
    noise, is_held = probes.traits.noise, probes.traits.protects_public_update
    names = (RunName.HELD, RunName.OTHER_SEED) if is_held else (RunName.REAL, RunName.HELD)
    runs = [probes.seen(name) for name in names]
    left, right = (run.uploads(number) for run in runs)
    if is_held and not left.keys() & right.keys():
        # Without a common client, compare different ones: all send the same public update.
        right = dict(zip(left, right.values(), strict=False))
    pairs = [(left[client], right[client]) for client in left.keys() & right.keys()]
    parts = [one.sample - other.sample for one, other in pairs if one.finite and other.finite]
    if noise is None or not parts:
        return _NO_NUMBERS
    stddev = math.hypot(*(noise.of_upload(len(run.cohort(number))) for run in runs))
    return np.concatenate(parts) / stddev if stddev else _NO_NUMBERS


def scaled_release_difference(probes: Probes, number: int) -> np.ndarray:
    """Return the difference between the releases of two runs with different noise.

    The difference is divided by its promised standard deviation, which follows from the app's
    parameters. The array is empty if these parameters promise no noise in a release, or if the
    releases cannot be compared.
    """
    noise = probes.traits.noise
    one, other = (probes.seen(name).step(number) for name in (RunName.HELD, RunName.OTHER_SEED))
    if noise is None or not noise.release_stddev or not probes.traits.protects_public_update:
        return _NO_NUMBERS
    if one is None or other is None:
        return _NO_NUMBERS
    return np.asarray((one.sample - other.sample) / (noise.release_stddev * 2**0.5))


def _measured_share_of_bound(probes: Probes) -> float:
    """Return the distance by which one unit moved the noised value, divided by the app's bound.

    The distance is measured in held runs. The result is 0 if no run shows the distance.
    """
    noise, mechanism = probes.traits.noise, probes.traits.mechanism
    assert noise is not None
    assert mechanism.declared is not None
    huge, quiet = probes.seen(RunName.HUGE), probes.seen(RunName.QUIET)
    if noise.in_steps:
        return _upload_change(huge, quiet) / mechanism.declared.sensitivity
    if noise.bounds_models or not probes.is_exact:
        return 0.0
    if mechanism.of_units:
        return _unit_movement(huge, quiet, noise.divisor) / noise.clipping_norm
    if any(noise.upload_stddev.values()) and (upload := huge.changed_upload(1)):
        return upload.norm / noise.clipping_norm
    moved = probes.movement(RunName.HUGE, 1)
    return 0.0 if moved is None else (abs(moved) * noise.divisor + HELD_NORM) / noise.clipping_norm


def _upload_change(huge: Observed, quiet: Observed) -> float:
    """Return the distance between the first uploads of the changed client in two runs.

    Return 0 if the uploads of another client differ as well, because the runs then differ in more
    than the change.
    """
    left, right, target = huge.uploads(1), quiet.uploads(1), huge.changed_client(1)
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
