"""Guarantees of ULDP-GROUP-k for one user: Lemma 9, Theorem 4, and a provable bound.

Source: Kato et al., Uldp-FL (PVLDB 2024).

====================  =====================================================
paper                 here
====================  =====================================================
k, γ                  ``group_size``, ``DpSgd.sampling_rate``
====================  =====================================================

Lemma 9 (Mironov 2017, Proposition 2) covers groups of 2^c records. Use it only to compare with
published numbers: `group_loss` holds for every group size, and its ε is several times smaller.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from flower_ext.privacy.accounting.group_privacy import DpSgd, group_loss
from flower_ext.privacy.accounting.renyi import sampled_gaussian_renyi
from flower_ext.privacy.guarantee import Condition, Guarantee
from flower_ext.privacy.theorems import assumptions
from flower_ext.privacy.theorems.claims import Claims
from flower_ext.privacy.theorems.uldp_theorem import OF_SILOS, user_claims
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

    Every silo runs the same DP-SGD, and each user has at most k = ``group_size`` records in all
    silos together. The published guarantee covers groups of the largest power of two up to k. It
    uses the Rényi orders α of the authors' figures, although Lemma 9 does not hold for some of
    these orders. `group_loss` computes the provable guarantee.
    """
    claims = user_claims(
        delta,
        *OF_SILOS,
        f"each user has at most {group_size} records in all silos together, the same records in "
        "every round; which records are kept depends on that user's records alone",
        "the group size, the sampling rates and the numbers of steps are public",
        "every step samples each record independently, and the samples stay secret",
        assumptions.OWN_GRADIENTS,
        assumptions.of_noise(secure_noise),
        not_covered=(
            "which records are kept, and the group size if it is the maximum or median of the "
            "users' numbers of records",
            *not_covered,
        ),
    )
    loss = group_loss(silo, group_size=group_size, delta=delta)
    source = f"group of {group_size} records, DP-SGD in {num_silos} silos"
    return [
        _theorem_4(silo, group_size, claims),
        claims.provable(AdversaryView.EACH_UPLOAD, loss, source),
    ]


def _theorem_4(silo: DpSgd, group_size: int, claims: Claims) -> Guarantee:
    doublings = group_size.bit_length() - 1
    group = 2**doublings
    epsilon, order = lemma_9(silo, doublings, claims.delta, orders=_orders_of_the_figures(group))
    return claims.published(
        AdversaryView.EACH_UPLOAD,
        epsilon,
        accountant="RDP (group of 2^c records)",
        source="Kato et al., Uldp-FL, Theorem 4",
        conditions=(
            Condition(
                f"groups of {group_size} records are covered (ε is for groups of {group})",
                group == group_size,
            ),
            Condition(
                f"the order is one for which Lemma 9 holds, α ≥ {2 * group} (α = {order:g})",
                order >= 2 * group,
            ),
            Condition(
                "the choice of the kept records is private (it reads the exact numbers of records)",
                False,
            ),
        ),
    )


def _orders_of_the_figures(group: int) -> list[float]:
    """Return the Rényi orders that the authors try for a group of k records.

    These are the 100 orders 2k, 2k + 0.1, …, and 20 equidistant orders from k + 10 to 64k.
    """
    tenths = (2 * group + tenth / 10 for tenth in range(100))
    return [*tenths, *np.linspace(group + 10, 64 * group, 20).tolist()]


def lemma_9(
    silo: DpSgd, doublings: int, delta: float, *, orders: Iterable[float]
) -> tuple[float, float]:
    """Return Lemma 9's smallest ε of a group of 2^``doublings`` records, and its Rényi order α.

    Lemma 9 requires α ≥ 2^(``doublings`` + 1). To reproduce the authors' figures, this function
    also tries smaller ``orders``, and skips only α ≤ 2^``doublings``.
    """
    tried = tuple(float(order) for order in orders if order > 2**doublings)
    curve = sampled_gaussian_renyi(silo.noise_multiplier, silo.sampling_rate, tried)
    group = np.array(tried) / 2**doublings
    epsilons = 3.0**doublings * silo.steps * curve
    epsilons += np.log1p(-1 / group) - (math.log(delta) + np.log(group)) / (group - 1)
    best = int(np.argmin(epsilons))
    return max(0.0, float(epsilons[best])), tried[best]
