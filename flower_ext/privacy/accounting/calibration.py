"""Find the least noise that meets a target (ε, δ).

The search errs on the safe side: with its result, the accountant's ε never exceeds the target.
"""

from collections import Counter
from collections.abc import Callable, Mapping

from flower_ext.checks import require_at_least_one, require_positive
from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting.accountant import privacy_loss_of
from flower_ext.privacy.accounting.events import Release
from flower_ext.privacy.accounting.sampling import Sampling
from flower_ext.privacy.units import NeighboringRelation

MAX_NOISE_MULTIPLIER = 1e6
_LEAST_NOISE = 1e-3
"""The search for less noise stops near this noise multiplier: so little noise hides no unit."""


class TargetOutOfReach(InvalidValue):
    """No allowed value, such as a noise multiplier, meets the target (ε, δ)."""


def calibrate_noise_multiplier(
    *,
    epsilon: float,
    delta: float,
    sampling: Sampling,
    rounds: int,
    relation: NeighboringRelation | None = None,
    tolerance: float = 1e-3,
    other_releases: Mapping[Release, int] | None = None,
) -> float:
    """Return the smallest noise multiplier that meets the target.

    The result may be too large by the fraction ``tolerance``, but it is never too small.

    Do not use a result of about 0.001: so little noise hides no unit. The search returns it if
    ``delta`` is at least the probability that the rounds draw a given unit at all, because ε is
    then 0 with any noise. Choose a smaller ``delta``.

    Parameters
    ----------
    other_releases : Mapping[Release, int], optional
        Further releases of the same run, with their counts. ``epsilon`` is the target for the
        rounds and these releases together.

    Raises
    ------
    TargetOutOfReach
        The target needs more noise than `MAX_NOISE_MULTIPLIER`, or ``other_releases`` alone exceed
        the target.
    ValueError
        ``epsilon`` is not above 0, ``delta`` is outside (0, 1), or ``rounds`` is below 1.
    """
    require_positive("epsilon", epsilon)
    require_at_least_one("rounds", rounds)
    relation = relation or sampling.default_relation
    others = Counter(other_releases or {})
    if (alone := privacy_loss_of(others, delta=delta).epsilon) > epsilon:
        raise TargetOutOfReach(
            f"epsilon={epsilon!r} at delta={delta!r}: the run's other releases, such as its "
            f"evaluations, alone spend ε = {alone:.4g}; give them more noise, or raise epsilon or "
            "delta"
        )

    def fits(noise_multiplier: float) -> bool:
        release = Release(sampling=sampling, noise_multiplier=noise_multiplier, relation=relation)
        releases = others + Counter({release: rounds})
        return privacy_loss_of(releases, delta=delta).epsilon <= epsilon

    target = f"epsilon={epsilon!r} at delta={delta!r} over {rounds} rounds"
    return least_noise_multiplier(fits, target, tolerance=tolerance)


def least_noise_multiplier(
    fits: Callable[[float], bool], target: str, *, tolerance: float = 1e-3
) -> float:
    """Return the smallest noise multiplier that ``fits`` accepts.

    If ``fits`` accepts a noise multiplier, it must also accept every larger one. The result may be
    too large by the fraction ``tolerance``, but it is never too small. If not even
    `MAX_NOISE_MULTIPLIER` fits, the error `TargetOutOfReach` begins with the text ``target``.
    """
    # ε falls as noise grows: double the noise until it fits, then halve it until it does not.
    safe = 1.0
    while not fits(safe):
        safe *= 2
        if safe > MAX_NOISE_MULTIPLIER:
            raise TargetOutOfReach(
                f"{target} needs a noise multiplier above {MAX_NOISE_MULTIPLIER:g}; raise epsilon "
                "or delta"
            )
    unsafe = safe / 2
    while fits(unsafe) and unsafe > _LEAST_NOISE:
        safe, unsafe = unsafe, unsafe / 2
    return bisect(fits, safe=safe, unsafe=unsafe, tolerance=tolerance)


def bisect(fits: Callable[[float], bool], *, safe: float, unsafe: float, tolerance: float) -> float:
    """Return a value that ``fits`` accepts, within the fraction ``tolerance`` of a rejected value.

    The result is between ``safe``, which ``fits`` accepts, and ``unsafe``, which ``fits`` rejects.
    """
    while abs(safe - unsafe) > tolerance * max(safe, unsafe):
        middle = (safe + unsafe) / 2
        safe, unsafe = (middle, unsafe) if fits(middle) else (safe, middle)
    return safe
