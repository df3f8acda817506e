"""Guarantees of ULDP-GROUP-k for one user: Lemma 9, Theorem 4, and a provable bound.

Source: Kato et al., Uldp-FL (PVLDB 2024).

====================  =====================================================
paper                 here
====================  =====================================================
k, γ                  ``group_size``, ``DpSgd.sampling_rate``
====================  =====================================================

Lemma 9 (Mironov 2017, Proposition 2) covers groups of 2^c records; use it to compare with published
numbers. `group_loss` needs no power of two and is several times smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from flower_ext.privacy.accounting.group_privacy import DpSgd, group_loss
from flower_ext.privacy.accounting.renyi import sampled_gaussian_renyi
from flower_ext.privacy.guarantee import Condition, Guarantee
from flower_ext.privacy.theorems.claims import OWN_GRADIENTS, noise_assumption
from flower_ext.privacy.theorems.silo_claims import OF_SILOS, user_claims
from flower_ext.privacy.units import AdversaryView


def uldp_group_guarantees(
    silo: DpSgd,
    *,
    group_size: int,
    delta: float,
    num_silos: int = 1,
    secure_noise: bool = True,
    not_covered: Sequence[str] = (),
) -> list[Guarantee]:
    """Return the guarantees of ULDP-GROUP-k, as published and provable.

    Each silo runs the same DP-SGD on at most ``group_size`` records of each user. The published
    guarantee takes the largest power of two that is not above k, and the orders that the authors'
    figures use; Lemma 9 does not hold for some of these. The provable one is `group_loss`.

    Raises
    ------
    ValueError
        As `group_loss`.
    """
    loss = group_loss(silo, group_size=group_size, delta=delta)
    doublings = group_size.bit_length() - 1
    group = 2**doublings
    epsilon, order = lemma_9(silo, doublings, delta, orders=_orders_of_the_figures(group))
    claims = user_claims(
        delta,
        *OF_SILOS,
        f"each user has at most {group_size} records in all silos together, the same ones "
        "in every round; which ones are kept depends on that user's records alone",
        "the group size, the sampling rates and the numbers of steps are public",
        "every step samples each record independently, and the samples stay secret",
        OWN_GRADIENTS,
        noise_assumption(secure_noise),
        not_covered=(
            "which records are kept, and that the group size comes from the data where it is "
            "their maximum or median",
            *not_covered,
        ),
    )
    return [
        claims.published(
            AdversaryView.EACH_UPLOAD,
            epsilon,
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
        claims.provable(
            AdversaryView.EACH_UPLOAD,
            loss,
            f"group of {group_size} records, DP-SGD in {num_silos} silos",
        ),
    ]


def _orders_of_the_figures(group: int) -> list[float]:
    """Return the orders that the authors search: tenths from 2k on, and 20 points up to 64k."""
    tenths = (2 * group + tenth / 10 for tenth in range(100))
    return [*tenths, *np.linspace(group + 10, 64 * group, 20).tolist()]


def lemma_9(
    silo: DpSgd, doublings: int, delta: float, *, orders: Iterable[float]
) -> tuple[float, float]:
    """Return ε of a group of 2^doublings records by Lemma 9, and the order α that gave it.

    The lemma holds for orders α ≥ 2^(doublings + 1), which this function does not check.
    """
    tried = tuple(float(order) for order in orders if order > 2**doublings)
    curve = sampled_gaussian_renyi(silo.noise_multiplier, silo.sampling_rate, tried)
    group = np.array(tried) / 2**doublings
    epsilons = 3.0**doublings * silo.steps * curve
    epsilons += np.log1p(-1 / group) - (math.log(delta) + np.log(group)) / (group - 1)
    best = int(np.argmin(epsilons))
    return max(0.0, float(epsilons[best])), tried[best]
