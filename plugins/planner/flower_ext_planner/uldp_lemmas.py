"""(ε, δ) of a user with several records by Lemmas 8 and 9 of Uldp-FL.

Source: Kato et al., Uldp-FL (PVLDB 2024). Use these lemmas only to compare with published numbers:
`group_loss` of `flower_ext.privacy.accounting.group_privacy` has an ε that is several times
smaller.
"""

import math

import numpy as np

from flower_ext.checks import require_at_least_one, require_delta
from flower_ext.privacy import DpSgd
from flower_ext.privacy.accounting.events import PrivacyLoss
from flower_ext.privacy.accounting.renyi import sampled_gaussian_renyi
from flower_ext.privacy.theorems.uldp_group_theorem import lemma_9


def group_loss_by_renyi(silo: DpSgd, *, group_size: int, delta: float) -> PrivacyLoss:
    """Return (ε, δ) of a group by Lemma 9, with ``group_size`` rounded up to a power of two.

    If the silo's training has the Rényi divergence ρ at order α ≥ 2^(c+1) for one record, it has
    the divergence 3^c ρ at order α/2^c for a group of k records, with c = ⌈log₂ k⌉. The paper
    prints k where it means c, and rounds down, which covers fewer records.
    """
    require_at_least_one("group_size", group_size)
    require_delta(delta)
    doublings = (group_size - 1).bit_length()
    epsilon, _ = lemma_9(silo, doublings, delta, orders=_group_orders(2**doublings))
    return PrivacyLoss(epsilon=epsilon, delta=delta, accountant="RDP (group of 2^c records)")


def group_loss_by_conversion(silo: DpSgd, *, group_size: int, delta: float) -> PrivacyLoss:
    """Return (ε, δ) of a group by Lemma 8: (ε', δ') of a record becomes (kε', k e^((k-1)ε') δ').

    k is the group size. The paper searches for the δ' with which the group's δ is ``delta``. This
    function solves for it: at each order α > k, the record's ε' is linear in log(1/δ') with slope
    1/(α-1), so log(1/δ') solves a linear equation.
    """
    require_at_least_one("group_size", group_size)
    require_delta(delta)
    tried = (*range(group_size + 1, group_size + 33), *_group_orders(group_size))
    curve = sampled_gaussian_renyi(
        silo.noise_multiplier, silo.sampling_rate, tuple(map(float, tried))
    )
    orders, others = np.array(tried), group_size - 1
    at_one = silo.steps * curve + np.log1p(-1 / orders) - np.log(orders) / (orders - 1)  # δ' = 1
    log_inverse = math.log(group_size) - math.log(delta) + others * at_one
    log_inverse /= 1 - others / (orders - 1)
    epsilon = group_size * (at_one + log_inverse / (orders - 1))
    # Only a δ' below 1 is valid, and ε is at least 0.
    usable = np.where(log_inverse > 0, np.maximum(epsilon, 0.0), np.inf)
    return PrivacyLoss(
        epsilon=float(usable.min()), delta=delta, accountant="RDP, (ε, δ) of one record times k"
    )


def _group_orders(group: int) -> list[int]:
    """Return Rényi orders α ≥ 2·group, dense near the best orders of large groups."""
    first = range(2 * group, 2 * group + 32)
    return sorted({*first, *(group * factor for factor in (3, 4, 5, 6, 8, 12, 16, 24, 32, 64))})
