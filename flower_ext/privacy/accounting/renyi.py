"""Bounds on ε by the Rényi divergences of releases, at the order with the smallest ε.

The module computes the divergence of one Poisson sub-sampled Gaussian sum without cancellation.

Source: Mironov, Talwar and Zhang, Rényi differential privacy of the sampled Gaussian mechanism
(2019). The sum has the noise multiplier σ and the sampling rate γ. With z ~ N(0, σ²) and
u = γ (exp((2z - 1)/2σ²) - 1), the divergence of order α is log E[(1 + u)^α] / (α - 1). The
expectation is 1 plus a remainder, which is tiny if the noise is large. A computation of the whole
expectation would lose the remainder to rounding, or make it negative. So the module computes the
remainder alone. Since E[u] = 0, the remainder is the mean of (1 + u)^α - 1 - αu. This function is
never negative, so the mean keeps its relative precision.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from flower_ext.privacy.accounting.events import PrivacyLoss, Release
from flower_ext.privacy.accounting.sampling import FixedSizeSampling

RDP_ORDERS = (
    *(1 + tenth / 10 for tenth in range(1, 100)),
    *map(float, range(11, 64)),
    *(80.0, 96.0, 128.0, 192.0, 256.0, 512.0, 1024.0),
)
"""Orders α for Gaussians that are Poisson sub-sampled, or not sub-sampled at all."""
_WITHOUT_REPLACEMENT_ORDERS = [*range(2, 64), 80, 96, 128, 192, 256, 512, 1024]
_LEAST_NOISE = 0.2
"""Least noise multiplier for which the grid is fine enough to compute fractional orders."""
_STEP, _REACH = 1 / 8, 12.0
"""Step and reach of the grid, in standard deviations. They give a relative error of exp(-30)."""
_MARGIN = 1e-9
"""Relative margin, larger than the rounding error of a sum of positive terms."""


def renyi_loss(counts: Iterable[tuple[Release, int]], delta: float) -> PrivacyLoss:
    """Return RDP's bound on ε, at the order with the smallest bound."""
    from dp_accounting import rdp

    curve = np.zeros(len(RDP_ORDERS))
    for release, count in counts:
        curve += count * sampled_gaussian_renyi(
            release.relative_noise, release.poisson_rate, RDP_ORDERS
        )
    epsilon = float(rdp.compute_epsilon(RDP_ORDERS, _bounds(curve), delta)[0])
    return PrivacyLoss(epsilon=epsilon, delta=delta, accountant="RDP")


def _bounds(curve: Iterable[float]) -> list[float]:
    """Return divergences; a negative one or NaN, from a failed computation, becomes infinite.

    Otherwise, dp-accounting would return an ε of 0 for such a divergence.
    """
    return [divergence if divergence >= 0 else math.inf for divergence in curve]


def without_replacement_loss(counts: Sequence[tuple[Release, int]], delta: float) -> PrivacyLoss:
    """Return RDP's bound on ε for sampling without replacement, at the best order.

    The function tries every fourth order, and then all orders near the best of these.
    """
    from dp_accounting import rdp

    def best_of(orders: Sequence[float]) -> tuple[float, float]:
        curve = [
            sum(count * _renyi_without_replacement(release, order) for release, count in counts)
            for order in orders
        ]
        epsilon, order = rdp.compute_epsilon(orders, _bounds(curve), delta)
        return float(epsilon), float(order)

    epsilon, order = best_of(_WITHOUT_REPLACEMENT_ORDERS[::4])
    if order in _WITHOUT_REPLACEMENT_ORDERS:  # else ε is 0 or infinite
        # Any order gives a bound. ε has a single minimum over the orders, so neighbours suffice.
        place = _WITHOUT_REPLACEMENT_ORDERS.index(order)
        epsilon, _ = best_of(_WITHOUT_REPLACEMENT_ORDERS[max(0, place - 3) : place + 4])
    name = "RDP (sampling without replacement)"
    return PrivacyLoss(epsilon=epsilon, delta=delta, accountant=name)


@lru_cache(maxsize=8192)
def _renyi_without_replacement(release: Release, order: float) -> float:
    """Return the divergence of one release, cached because searches need it again and again."""
    import dp_accounting
    from dp_accounting import rdp

    sampling = release.sampling
    event: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(release.relative_noise)
    if isinstance(sampling, FixedSizeSampling):
        event = dp_accounting.SampledWithoutReplacementDpEvent(
            sampling.population, sampling.size, event
        )
    accountant = rdp.RdpAccountant([order], dp_accounting.NeighboringRelation.REPLACE_ONE)
    return float(accountant.compose(event).rdp[0])


@lru_cache(maxsize=1024)
def sampled_gaussian_renyi(
    noise_multiplier: float, rate: float, orders: tuple[float, ...]
) -> np.ndarray:
    """Return an upper bound on the divergence of one sum at each order, tight to 1e-8.

    If ``noise_multiplier`` is below 0.2, the divergences at the two nearest integer orders bound
    the divergence at a fractional order, because (α - 1) times the divergence is convex in α.

    ``noise_multiplier`` is σ > 0, ``rate`` is γ in (0, 1], and the n ``orders`` are above 1. The
    result is a read-only array of shape (n,).
    """
    alphas = np.asarray(orders, dtype=np.float64)
    if rate == 1:
        curve = alphas / (2 * noise_multiplier**2)
    else:
        logs = [_log_moment(noise_multiplier, rate, order) for order in orders]
        curve = np.asarray(logs) / (alphas - 1) * (1 + _MARGIN)
    curve.setflags(write=False)
    return curve


def _log_moment(noise_multiplier: float, rate: float, order: float) -> float:
    whole = math.floor(order)
    if order == whole:
        remainder = _remainder_by_sum(noise_multiplier, rate, whole)
    elif noise_multiplier >= _LEAST_NOISE:
        remainder = _remainder_by_grid(noise_multiplier, rate, order)
    else:
        below = 0.0 if whole == 1 else _log_moment(noise_multiplier, rate, whole)
        above = _log_moment(noise_multiplier, rate, whole + 1)
        return below + (order - whole) * (above - below)
    return float(np.logaddexp(0.0, remainder))


def _remainder_by_sum(noise_multiplier: float, rate: float, order: int) -> float:
    """Return log Σ_i p_i (exp((i² - i)/2σ²) - 1), summed as in Equation 9.

    p_i is the probability of i under Binomial(α, γ), where α is ``order`` and γ is ``rate``.
    """
    from scipy import special

    i = np.arange(2.0, order + 1)
    exponent = i * (i - 1) / (2 * noise_multiplier**2)
    log_term = exponent + np.log(-np.expm1(-exponent))
    log_term += special.gammaln(order + 1) - special.gammaln(i + 1)
    log_term += i * math.log(rate) + (order - i) * math.log1p(-rate)
    log_term -= special.gammaln(order - i + 1)
    return float(np.logaddexp.reduce(log_term))


def _remainder_by_grid(noise_multiplier: float, rate: float, order: float) -> float:
    """Return log E[(1 + u)^α - 1 - αu] by the trapezoidal rule, which converges exponentially here.

    u is the function of z at the top of this module. The poles of the integrand are πσ² away from
    the real line; the integrand's mass lies in [0, max(α, 2)].
    """
    from scipy import special

    last = max(order, 2.0) / noise_multiplier + _REACH
    z = np.arange(-_REACH, last + _STEP, _STEP)  # in standard deviations
    exponent = (z - 0.5 / noise_multiplier) / noise_multiplier
    log_ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + exponent)  # log(1 + u)
    power = order * log_ratio
    with np.errstate(over="ignore"):
        u = rate * np.expm1(exponent)
    # Three formulas for one function: a series in u, the difference itself, and its largest term.
    # Each is used where the other two cancel, overflow or leave out too much.
    small = np.abs(u) < 1e-2 / order
    large = (order - 1) * log_ratio > 30  # there 1 + αu is at most α exp(-30) (1 + u)^α
    log_value = np.empty_like(z)
    terms = (special.binom(order, j) * u[small] ** (j - 2) for j in range(2, 8))
    with np.errstate(divide="ignore"):  # log 0, where u = 0
        log_value[small] = 2 * np.log(np.abs(u[small])) + np.log(sum(terms))
    middle = ~small & ~large
    log_value[middle] = np.log(np.expm1(power[middle]) - order * u[middle])
    log_value[large] = power[large]
    log_value += -(z**2) / 2 + math.log(_STEP / math.sqrt(2 * math.pi))
    return float(np.logaddexp.reduce(log_value))
