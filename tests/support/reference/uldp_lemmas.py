"""Lemmas 8 and 9 of Uldp-FL, from one record to a group, to compare with `group_loss`.

Source: Kato et al., Uldp-FL (PVLDB 2024).

=============================  ==================================================================
`group_loss_by_renyi`          Lemma 9 (Mironov 2017, Proposition 2): groups of 2^c
`group_loss_by_conversion`     Lemma 8: (ε, δ) becomes (kε, k e^((k-1)ε) δ)
=============================  ==================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from flower_ext.checks import require_at_least_one, require_delta
from flower_ext.privacy import DpSgd
from flower_ext.privacy.accounting.events import PrivacyLoss
from flower_ext.privacy.accounting.renyi import sampled_gaussian_renyi
from flower_ext.privacy.theorems.uldp_group import lemma_9


def group_loss_by_renyi(silo: DpSgd, *, group_size: int, delta: float) -> PrivacyLoss:
    """Return the loss by Lemma 9, with ``group_size`` rounded up to a power of two.

    (α, ρ) becomes (α/2^c, 3^c ρ) for α ≥ 2^(c+1), with c = ⌈log₂ k⌉ and the silo's ρ.

    Raises
    ------
    ValueError
        As `group_loss`.
    """
    require_at_least_one("group_size", group_size)
    require_delta(delta)
    doublings = (group_size - 1).bit_length()
    epsilon, _ = lemma_9(silo, doublings, delta, orders=group_orders(2**doublings))
    return PrivacyLoss(epsilon=epsilon, delta=delta, accountant="RDP (group of 2^c records)")


def group_loss_by_conversion(silo: DpSgd, *, group_size: int, delta: float) -> PrivacyLoss:
    """Return the loss by Lemma 8, at the δ of one record that gives the group's target δ.

    At order α, a record's ε grows with log(1/δ) at the rate 1/(α-1). The record's δ therefore
    solves a linear equation for every α > k, without search and underflow.

    Raises
    ------
    ValueError
        As `group_loss`.
    """
    require_at_least_one("group_size", group_size)
    require_delta(delta)
    orders = np.array([*range(group_size + 1, group_size + 33), *group_orders(group_size)])
    losses = renyi_of(silo, orders)
    at_one = losses + np.log1p(-1 / orders) - np.log(orders) / (orders - 1)  # ε where δ = 1
    others = group_size - 1
    log_inverse = math.log(group_size) - math.log(delta) + others * at_one
    log_inverse /= 1 - others / (orders - 1)
    epsilon = group_size * (at_one + log_inverse / (orders - 1))
    # Only a δ below 1 is valid, and ε is at least 0.
    usable = np.where(log_inverse > 0, np.maximum(epsilon, 0.0), np.inf)
    return PrivacyLoss(
        epsilon=float(usable.min()), delta=delta, accountant="RDP, (ε, δ) of one record times k"
    )


def group_orders(group: int) -> list[int]:
    """Return orders α ≥ 2·group, dense near the best orders of large groups."""
    first = range(2 * group, 2 * group + 32)
    return sorted({*first, *(group * factor for factor in (3, 4, 5, 6, 8, 12, 16, 24, 32, 64))})


def renyi_of(silo: DpSgd, orders: Iterable[float]) -> np.ndarray:
    """Return the divergence of a silo's whole training at each order."""
    alphas = tuple(float(order) for order in orders)
    return silo.steps * sampled_gaussian_renyi(silo.noise_multiplier, silo.sampling_rate, alphas)
