"""Group privacy of DP-SGD in several silos: from one record to all records of a user.

Every silo trains by the same DP-SGD on its own records. A user has at most k = ``group_size``
records in all silos together. `group_loss` bounds (ε, δ) of adding or removing all records of a
user. The sums that all silos compute in one step form one vector, with noise in every coordinate,
and each sampled record of the user moves this vector by at most one clipping norm. If each step
samples a record with probability γ, the number of the user's sampled records is Binomial(k, γ). The
step is thus a mixture of Gaussians (Ganesh 2024), for which PLD accounts. The bound is tight.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from flower_ext.checks import (
    Checked,
    CountOrZero,
    Fraction,
    Scale,
    require_at_least_one,
    require_delta,
)
from flower_ext.privacy.accounting.events import PrivacyLoss
from flower_ext.privacy.accounting.gaussian import gaussian_loss
from flower_ext.privacy.accounting.pld import FINEST_INTERVAL, WIDEST_INTERVAL, pld_epsilon

_NEGLIGIBLE = 1e-30
"""If a number of sampled records is less probable than this, it counts as the whole group."""
_NO_PRIVACY = 1e4
"""Largest ε of a single step for which the bound uses sampling: no grid can hold larger losses."""


@dataclass(frozen=True, kw_only=True)
class DpSgd(Checked):
    """The parameters of one silo's DP-SGD, over one local training or several.

    Parameters
    ----------
    noise_multiplier : float
        Standard deviation of a step's noise, divided by the clipping norm of a record's gradient.
    sampling_rate : float
        Probability with which a step samples each record, independently (Poisson).
    steps : int
        Number of steps in all of these trainings together.
    """

    noise_multiplier: Scale
    sampling_rate: Fraction
    steps: CountOrZero


@lru_cache(maxsize=256)
def group_loss(silo: DpSgd, *, group_size: int, delta: float) -> PrivacyLoss:
    """Return (ε, δ) of a group of at most ``group_size`` records, whichever silos hold them.

    ``silo`` has the parameters of the DP-SGD that every silo runs.
    """
    require_at_least_one("group_size", group_size)
    require_delta(delta)
    from dp_accounting.pld import privacy_loss_distribution as grids  # slow to import

    # An upper bound: if every step used all records of the group, each step would be one Gaussian.
    plain = gaussian_loss(silo.noise_multiplier / group_size, releases=silo.steps, delta=delta)
    one_step = (group_size * silo.sampling_rate / silo.noise_multiplier) ** 2 / 2
    if plain.epsilon == 0 or silo.sampling_rate == 1 or one_step > _NO_PRIVACY:
        return plain
    taken, probabilities = _binomial(group_size, silo.sampling_rate)
    # A grid of width w adds about steps·w²/8 to ε; this one adds some thousandths of ε.
    rough = min(plain.epsilon, _by_central_limit(silo, group_size, delta) or 1e-2 * plain.epsilon)
    interval = min(math.sqrt(8e-3 * rough / silo.steps), 1e-2 * rough, WIDEST_INTERVAL)
    interval = max(interval, FINEST_INTERVAL)
    losses = grids.from_mixture_gaussian_mechanism(
        silo.noise_multiplier, taken, probabilities, value_discretization_interval=interval
    )
    epsilon = pld_epsilon([(losses, silo.steps)], delta, interval=interval)
    amplified = PrivacyLoss(epsilon=epsilon, delta=delta, accountant="PLD (mixture of Gaussians)")
    return min(amplified, plain, key=lambda loss: loss.epsilon)


def _binomial(count: int, rate: float) -> tuple[list[float], list[float]]:
    """Return the values of Binomial(count, rate), and their probabilities.

    Values of negligible probability are left out, and ``count``, the largest value, gets their
    probability. This never lowers ε, because the loss grows with the value: it is the number of
    records in a batch that belong to one group.
    """
    from scipy import stats

    values = np.arange(count + 1)
    probabilities = stats.binom.pmf(values, count, rate)
    kept = probabilities > _NEGLIGIBLE
    kept[-1] = True  # the largest shift takes the probability of the values that are left out
    probabilities[-1] += probabilities[~kept].sum()
    chosen = probabilities[kept]
    return values[kept].astype(float).tolist(), (chosen / chosen.sum()).tolist()


def _by_central_limit(silo: DpSgd, group_size: int, delta: float) -> float:
    """Return a rough estimate of ε, by treating all steps as one Gaussian; it may be 0."""
    exponent = silo.noise_multiplier**-2
    if exponent > 100:
        return math.inf
    shift = group_size * silo.sampling_rate * math.sqrt(silo.steps * math.expm1(exponent))
    return gaussian_loss(1 / shift, releases=1, delta=delta).epsilon
