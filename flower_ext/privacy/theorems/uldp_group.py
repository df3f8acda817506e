"""Promises of ULDP-GROUP-k to one user: Lemmas 8 and 9, Theorem 4, and what is provable.

Source: Kato et al., Uldp-FL (PVLDB 2024).

====================  =====================================================
paper                 here
====================  =====================================================
k, γ                  ``group_size``, ``DpSgd.sampling_rate``
====================  =====================================================

=============================  ==================================================================
`group_loss_by_renyi`          Lemma 9 (Mironov 2017, Proposition 2): groups of 2^c
`group_loss_by_conversion`     Lemma 8: (ε, δ) becomes (kε, k e^((k-1)ε) δ)
=============================  ==================================================================

The lemmas are there to compare with published numbers; `group_loss` needs no power of two and is
several times smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from flower_ext.privacy.accounting import PrivacyLoss
from flower_ext.privacy.assumptions import noise_assumption
from flower_ext.privacy.group_privacy import DpSgd, check_group, group_loss
from flower_ext.privacy.guarantee import Condition, Guarantee
from flower_ext.privacy.renyi import sampled_gaussian_renyi
from flower_ext.privacy.theorems.uldp import OF_SILOS, of_one_user
from flower_ext.privacy.units import AdversaryView


def uldp_group_guarantees(
    silos: Sequence[DpSgd],
    *,
    group_size: int,
    delta: float,
    secure_noise: bool = True,
    not_covered: Sequence[str] = (),
) -> list[Guarantee]:
    """ULDP-GROUP-k, where silos run DP-SGD on at most ``group_size`` records a user.

    As published, for the largest power of two that is not above k, and at the orders that the
    authors' figures use: some are below those for which Lemma 9 holds. Provable is `group_loss`.

    Raises
    ------
    ValueError
        As `group_loss`.
    """
    check_group(silos, group_size, delta)
    doublings = group_size.bit_length() - 1
    group = 2**doublings
    epsilon, order = lemma_9(silos, doublings, delta, orders=_orders_of_the_figures(group))
    loss = group_loss(silos, group_size=group_size, delta=delta)
    return [
        of_one_user(
            view=AdversaryView.EACH_UPLOAD,
            epsilon=epsilon,
            delta=delta,
            basis="published",
            accountant="RDP (group of 2^c records)",
            source="Kato et al., Uldp-FL, Theorem 4",
            conditions=(
                Condition(
                    f"groups of {group_size} records are covered (ε is that of {group})",
                    group == group_size,
                ),
                Condition(
                    f"the order is one for which Lemma 9 holds, α ≥ {2 * group} (α = {order:g})",
                    order >= 2 * group,
                ),
                Condition(
                    "which records are kept is decided privately (they are chosen from the exact "
                    "numbers of records)",
                    False,
                ),
            ),
        ),
        of_one_user(
            view=AdversaryView.EACH_UPLOAD,
            epsilon=loss.epsilon,
            delta=delta,
            basis="provable",
            accountant=loss.accountant,
            source=f"group of {group_size} records, DP-SGD in {len(silos)} silos",
            assumptions=(
                *OF_SILOS,
                f"each user has at most {group_size} records in all silos together, the same ones "
                "in every round; which ones are kept depends on that user's records alone",
                "the group size, the sampling rates and the numbers of steps are public",
                "every step takes each record independently, in secret",
                noise_assumption(secure_noise),
            ),
            not_covered=(
                "which records are kept, and that the group size comes from the data where it is "
                "their maximum or median",
                *not_covered,
            ),
        ),
    ]


def _orders_of_the_figures(group: int) -> list[float]:
    """Orders that the authors search: tenths from 2k on, and 20 points from k + 10 to 64k."""
    tenths = (2 * group + tenth / 10 for tenth in range(100))
    return [*tenths, *np.linspace(group + 10, 64 * group, 20).tolist()]


def group_loss_by_renyi(silos: Sequence[DpSgd], *, group_size: int, delta: float) -> PrivacyLoss:
    """Lemma 9 with ``group_size`` rounded up to a power of two.

    (α, ρ) becomes (α/2^c, 3^c ρ) for α ≥ 2^(c+1), with c = ⌈log₂ k⌉ and the largest ρ of any silo.

    Raises
    ------
    ValueError
        As `group_loss`.
    """
    check_group(silos, group_size, delta)
    doublings = (group_size - 1).bit_length()
    epsilon, _ = lemma_9(silos, doublings, delta, orders=group_orders(2**doublings))
    return PrivacyLoss(epsilon=epsilon, delta=delta, accountant="RDP (group of 2^c records)")


def group_loss_by_conversion(
    silos: Sequence[DpSgd], *, group_size: int, delta: float
) -> PrivacyLoss:
    """Lemma 8 at the δ of one record that makes the group's δ the target.

    At order α a record's ε grows by 1/(α-1) with log(1/δ), so the δ to start from solves a linear
    equation for every α > k: no search, and no underflow.

    Raises
    ------
    ValueError
        As `group_loss`.
    """
    check_group(silos, group_size, delta)
    orders = np.array([*range(group_size + 1, group_size + 33), *group_orders(group_size)])
    losses = _renyi(silos, orders)
    at_one = losses + np.log1p(-1 / orders) - np.log(orders) / (orders - 1)  # ε where δ = 1
    others = group_size - 1
    log_inverse = math.log(group_size) - math.log(delta) + others * at_one
    log_inverse /= 1 - others / (orders - 1)
    epsilon = group_size * (at_one + log_inverse / (orders - 1))
    # Only a δ below 1 is one; for others the smallest ε, 0, says what there is to say.
    usable = np.where(log_inverse > 0, np.maximum(epsilon, 0.0), np.inf)
    return PrivacyLoss(
        epsilon=float(usable.min()), delta=delta, accountant="RDP, (ε, δ) of one record times k"
    )


def group_orders(group: int) -> list[int]:
    """Orders α ≥ 2·group, dense where large groups have their best one."""
    first = range(2 * group, 2 * group + 32)
    return sorted({*first, *(group * factor for factor in (3, 4, 5, 6, 8, 12, 16, 24, 32, 64))})


def lemma_9(
    silos: Sequence[DpSgd], doublings: int, delta: float, *, orders: Iterable[float]
) -> tuple[float, float]:
    """ε of a group of 2^doublings records by Lemma 9, and the order α that gave it.

    The lemma holds for orders α ≥ 2^(doublings + 1); this function does not check.
    """
    alphas = np.array([order for order in orders if order > 2**doublings], dtype=np.float64)
    losses = 3.0**doublings * _renyi(silos, alphas)
    group = alphas / 2**doublings
    epsilons = losses + np.log1p(-1 / group) - (math.log(delta) + np.log(group)) / (group - 1)
    best = int(np.argmin(epsilons))
    return max(0.0, float(epsilons[best])), float(alphas[best])


def _renyi(silos: Sequence[DpSgd], orders: Iterable[float]) -> np.ndarray:
    """The largest ρ of any silo at each order α, for one record: it lies in one silo only."""
    alphas = tuple(float(order) for order in orders)
    curves = [
        silo.steps * sampled_gaussian_renyi(silo.noise_multiplier, silo.sampling_rate, alphas)
        for silo in set(silos)
    ]
    largest: np.ndarray = np.max(curves, axis=0)
    return largest
