"""Bounds on ε by the Rényi divergences of releases, at the best order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from flower_ext.privacy.accounting.events import MOST_NOISE, Release
from flower_ext.privacy.accounting.loss import PrivacyLoss
from flower_ext.privacy.accounting.renyi import sampled_gaussian_renyi
from flower_ext.privacy.accounting.sampling import PoissonSampling

RDP_ORDERS = (
    *(1 + tenth / 10 for tenth in range(1, 100)),
    *map(float, range(11, 64)),
    *(80.0, 96.0, 128.0, 192.0, 256.0, 512.0, 1024.0),
)
"""Orders α for Gaussians, sub-sampled by Poisson draws or not sub-sampled."""
_WITHOUT_REPLACEMENT_ORDERS = [*range(2, 64), 80, 96, 128, 192, 256, 512, 1024]


def renyi_loss(counts: Iterable[tuple[Release, int]], delta: float) -> PrivacyLoss:
    """Return the bound at the best order.

    The divergence is above 0 at every order, so rounding cannot turn a loss into none.
    """
    from dp_accounting import rdp

    curve = np.zeros(len(RDP_ORDERS))
    for release, count in counts:
        noise_multiplier = release.noise_multiplier / release.relation.sensitivity_factor
        sampling = release.sampling
        curve += count * sampled_gaussian_renyi(
            min(noise_multiplier, MOST_NOISE),
            sampling.rate if isinstance(sampling, PoissonSampling) else 1.0,
            RDP_ORDERS,
        )
    epsilon = float(rdp.compute_epsilon(RDP_ORDERS, curve, delta)[0])
    return PrivacyLoss(epsilon=epsilon, delta=delta, accountant="RDP")


def without_replacement_loss(counts: Sequence[tuple[Release, int]], delta: float) -> PrivacyLoss:
    """Return the bound at the best order: of every fourth one, then of its neighbours."""
    from dp_accounting import rdp

    def best_of(orders: Sequence[float]) -> tuple[float, float]:
        curve = [
            sum(count * _renyi_without_replacement(release, order) for release, count in counts)
            for order in orders
        ]
        epsilon, order = rdp.compute_epsilon(orders, curve, delta)
        return float(epsilon), float(order)

    epsilon, order = best_of(_WITHOUT_REPLACEMENT_ORDERS[::4])
    if order in _WITHOUT_REPLACEMENT_ORDERS:  # not if the loss is 0 or infinite
        place = _WITHOUT_REPLACEMENT_ORDERS.index(order)
        epsilon, _ = best_of(_WITHOUT_REPLACEMENT_ORDERS[max(0, place - 3) : place + 4])
    name = "RDP (sampling without replacement)"
    return PrivacyLoss(epsilon=epsilon, delta=delta, accountant=name)


@lru_cache(maxsize=8192)
def _renyi_without_replacement(release: Release, order: float) -> float:
    """Return the divergence of one release; cached because a search asks for many counts of it."""
    import dp_accounting
    from dp_accounting import rdp

    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    accountant = rdp.RdpAccountant([order], relation)
    return float(accountant.compose(release.event).rdp[0])
