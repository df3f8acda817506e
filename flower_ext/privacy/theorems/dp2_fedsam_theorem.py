"""Theorem 2 of DP²-FedSAM, as published; see `client_level_guarantees` for the provable bound.

Source: Zhang, Guo, Gong, DP²-FedSAM.

====================  =====================================================
paper                 here
====================  =====================================================
σ                     ``noise_multiplier``
r                     ``sampling_rate``
T                     ``rounds``
====================  =====================================================
"""

import math

from flower_ext.checks import require_at_least_one, require_delta, require_positive, require_rate
from flower_ext.privacy.accounting.sampling import SpacedSampling
from flower_ext.privacy.guarantee import Condition, Guarantee
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.mechanisms.round_mechanism import RoundMechanism
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.privacy.theorems.claims import Claims
from flower_ext.privacy.units import AdversaryView, NeighboringRelation, PrivacyUnit


def dp2_fedsam_theorem2(
    *, noise_multiplier: float, sampling_rate: float, rounds: int, delta: float
) -> Guarantee:
    """Return the guarantee of Theorem 2 of DP²-FedSAM, as published.

    The theorem requires σ² ≥ 7 r² T (ε + 2 ln(1/δ)) / ε², where σ is ``noise_multiplier``, r is
    ``sampling_rate`` and T is ``rounds``. The guarantee has the smallest ε that meets this. The
    proof uses a closed form for the sub-sampled Gaussian (Lemma 4 of the paper). This function
    checks the two conditions of that lemma at the proof's Rényi order α = 1 + 2 ln(1/δ)/ε. The
    paper prints the second condition with the sensitivity C as a factor; here noise is measured in
    multiples of C, so the factor is 1.
    """
    _check_theorem2(sampling_rate, rounds, delta)
    require_positive("noise_multiplier", noise_multiplier)
    variance, log_inverse = noise_multiplier**2, math.log(1 / delta)
    linear = 7 * sampling_rate**2 * rounds
    epsilon = (linear + math.sqrt(linear**2 + 8 * variance * linear * log_inverse)) / (2 * variance)
    order = 1 + 2 * log_inverse / epsilon
    ratio = sampling_rate * order * (1 + variance)
    largest_order = 1 + (2 / 3) * variance * math.log(1 / ratio)
    claims = Claims(
        unit=PrivacyUnit.CLIENT, relation=NeighboringRelation.ADD_OR_REMOVE_ONE, delta=delta
    )
    return claims.published(
        AdversaryView.EACH_UPLOAD,
        epsilon,
        accountant="closed form (RDP)",
        source="Zhang, Guo, Gong, DP²-FedSAM, Theorem 2",
        conditions=(
            Condition(f"σ² ≥ 0.7 (σ² = {variance:.4g})", variance >= 0.7),
            Condition(
                f"ε < 2 ln(1/δ) ({epsilon:.4g} against {2 * log_inverse:.4g})",
                epsilon < 2 * log_inverse,
            ),
            Condition(
                f"α ≤ 1 + (2/3) σ² ln(1/(r α (1 + σ²))) (α = {order:.4g}, "
                f"bound {largest_order:.4g})",
                order <= largest_order,
            ),
            Condition(
                "sampling and relation match: the theorem samples a fixed number of clients "
                "without replacement but takes the sensitivity C of adding or removing one "
                "(replacing one moves the sum by 2C)",
                False,
            ),
            Condition(
                "noise matches the adversary: the paper's server sees single uploads, each with "
                "variance σ²C²/(rN), but the proof counts the noise σ²C² of their sum",
                False,
            ),
        ),
    )


def dp2_fedsam_theorem2_noise_multiplier(
    *, epsilon: float, delta: float, sampling_rate: float, rounds: int
) -> float:
    """Return the smallest noise multiplier that Theorem 2 of DP²-FedSAM allows, as published."""
    _check_theorem2(sampling_rate, rounds, delta)
    require_positive("epsilon", epsilon)
    needed = epsilon + 2 * math.log(1 / delta)
    return math.sqrt(7 * sampling_rate**2 * rounds * needed) / epsilon


def theorem2_of_run(mechanism: RoundMechanism, run: RunSummary) -> list[Guarantee]:
    """Return the guarantee of Theorem 2; an empty list if the theorem does not cover the run."""
    if not isinstance(mechanism, NoisedSum) or mechanism.state:
        return []  # the paper's clipping norm is the same in all rounds
    if isinstance(mechanism.sampling, SpacedSampling):
        return []  # the paper's noise multiplier is for one round
    theorem = dp2_fedsam_theorem2(
        noise_multiplier=mechanism.noise_multiplier,
        sampling_rate=mechanism.sampling.sampling_rate,
        rounds=run.participations.rounds,
        delta=mechanism.delta,
    )
    return [theorem]


def _check_theorem2(sampling_rate: float, rounds: int, delta: float) -> None:
    require_rate("sampling_rate", sampling_rate)
    require_at_least_one("rounds", rounds)
    require_delta(delta)
