"""Find the number of rounds or the sampling rate that meets a target (ε, δ).

The two searches err on the safe side: the accountant's ε of a result never exceeds the target.
"""

from collections.abc import Mapping

from flower_ext.checks import require_at_least_one, require_positive
from flower_ext.privacy import (
    NeighboringRelation,
    PoissonSampling,
    Release,
    Sampling,
    TargetOutOfReach,
    privacy_loss_of,
)
from flower_ext.privacy.accounting.calibration import bisect

MAX_ROUNDS = 10_000_000


def calibrate_rounds(
    *,
    epsilon: float,
    delta: float,
    sampling: Sampling,
    noise_multiplier: float,
) -> int:
    """Return the largest number of rounds that meets the target; 0 if not even one round does.

    A result below 65,536 is exact. A larger result may be too small by a thousandth of itself, but
    it is never too large. If more than half of `MAX_ROUNDS` rounds meet the target, the result may
    be smaller still, because the search ends there.
    """
    require_positive("epsilon", epsilon)
    release = Release(
        sampling=sampling,
        noise_multiplier=noise_multiplier,
        relation=sampling.default_relation,
    )

    safe, unsafe = 0, 1
    while _meets(epsilon, delta, {release: unsafe}):
        safe, unsafe = unsafe, 2 * unsafe
        if unsafe > MAX_ROUNDS:
            return safe
    exact = unsafe <= 100_000  # for more rounds, an exact search takes too long
    while unsafe - safe > (1 if exact else safe // 1000):
        middle = (safe + unsafe) // 2
        meets = _meets(epsilon, delta, {release: middle})
        safe, unsafe = (middle, unsafe) if meets else (safe, middle)
    return safe


def calibrate_sampling_rate(
    *,
    epsilon: float,
    delta: float,
    population: int,
    noise_multiplier: float,
    rounds: int,
) -> float:
    """Return the largest Poisson sampling rate that meets the target, or raise `TargetOutOfReach`.

    The result may be too small by a thousandth of itself, but it is never too large.
    """
    require_positive("epsilon", epsilon)
    require_at_least_one("rounds", rounds)

    def fits(rate: float) -> bool:
        release = Release(
            sampling=PoissonSampling(population, rate),
            noise_multiplier=noise_multiplier,
            relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        )
        return _meets(epsilon, delta, {release: rounds})

    if fits(1.0):
        return 1.0
    safe, unsafe = 0.5, 1.0
    while not fits(safe):
        safe, unsafe = safe / 2, safe
        if safe * population < 1e-3:
            raise TargetOutOfReach(
                f"epsilon={epsilon!r} at delta={delta!r} is out of reach with "
                f"noise_multiplier={noise_multiplier!r} over {rounds} rounds; raise "
                "noise_multiplier, epsilon or delta"
            )
    return bisect(fits, safe=safe, unsafe=unsafe, tolerance=1e-3)


def _meets(epsilon: float, delta: float, releases: Mapping[Release, int]) -> bool:
    return privacy_loss_of(releases, delta=delta).epsilon <= epsilon
