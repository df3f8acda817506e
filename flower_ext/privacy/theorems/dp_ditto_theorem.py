"""Record-level DP for clients that upload their whole local model in every round: DP-Ditto.

Source: Zhao et al., Convergence-Privacy-Fairness Trade-Off in Personalized Federated Learning.

====================  =====================================================
paper                 here
====================  =====================================================
C                     ``clipping_norm`` of the local model
σ_u                   ``noise_stddev`` of each weight of an upload
Δs                    2C/|D_n| (Eqn 7)
q                     1/``num_clients`` (Eqn 8)
T, |D_n|              ``rounds``, ``num_examples``
η_G                   ``ClippedSteps.learning_rate``
====================  =====================================================

Eqns 7 and 8 ask for σ_u = Δs √(2 q T ln(1/δ)) / ε. Three steps of their derivation do not hold:

1. Every client takes part in every round, so q = 1/N is no sampling rate.
2. One record moves a clipped model by up to 2C, not 2C/|D_n|.
3. The closed form omits the term ε²/(4 ln(1/δ)) of composed Gaussians, which matters at a large ε.

The provable bound clips each record's gradient inside the local steps and composes Gaussians
without amplification. Every guarantee comes as a pair: as published, and provable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flower_ext.checks import require_at_least_one, require_positive
from flower_ext.privacy.accounting.gaussian import gaussian_loss
from flower_ext.privacy.guarantee import Condition, Guarantee
from flower_ext.privacy.mechanisms.protections import OutputPerturbation
from flower_ext.privacy.theorems.clipped_steps import (
    ClippedSteps,
    check_target,
    record_claims,
)
from flower_ext.privacy.units import AdversaryView


def dp_ditto_noise_stddev(
    *,
    epsilon: float,
    delta: float,
    rounds: int,
    num_clients: int,
    num_examples: int,
    clipping_norm: float,
) -> float:
    """Return σ_u of Eqns 7–8 as published: Δs √(2 T ln(1/δ) / N) / ε with Δs = 2C/|D_n|.

    Raises
    ------
    ValueError
        A parameter is out of range.
    """
    check_target(epsilon, delta, rounds)
    require_at_least_one("num_clients", num_clients)
    require_at_least_one("num_examples", num_examples)
    require_positive("clipping_norm", clipping_norm)
    sensitivity = 2 * clipping_norm / num_examples
    return sensitivity * math.sqrt(2 * rounds * math.log(1 / delta) / num_clients) / epsilon


def dp_ditto_guarantees(
    perturbation: OutputPerturbation,
    *,
    num_clients: int,
    num_examples: int,
    rounds: int,
    delta: float,
    steps: ClippedSteps | None = None,
    secure_noise: bool = True,
    not_covered: Sequence[str] = (),
) -> list[Guarantee]:
    """Return the guarantees for one record when clients upload clipped models with noise σ_u.

    The first guarantee is as published, the second is provable. ``steps`` states that training
    clipped each record's gradient. Without ``steps``, only the clipping of the whole model limits
    the influence of a record, which may then move the model by 2C.

    Raises
    ------
    ValueError
        A parameter is out of range.
    """
    clip, stddev = perturbation.clipping_norm, perturbation.noise_stddev
    # By Eqns 7–8 noise and ε are inverse, so the noise for ε = 1 tells the ε of any noise.
    published = (
        dp_ditto_noise_stddev(
            epsilon=1.0,
            delta=delta,
            rounds=rounds,
            num_clients=num_clients,
            num_examples=num_examples,
            clipping_norm=clip,
        )
        / stddev
    )
    sensitivity, source = _moved(clip, num_examples, steps)
    loss = gaussian_loss(stddev / sensitivity, releases=rounds, delta=delta)
    claimed = 2 * clip / num_examples
    # The published proof assumes that sampling at q = 1/N thins T releases out to qT.
    thinned = gaussian_loss(stddev / claimed, releases=rounds / num_clients, delta=delta).epsilon
    claims = record_claims(delta, secure_noise=secure_noise, not_covered=not_covered)
    return [
        claims.published(
            AdversaryView.EACH_UPLOAD,
            published,
            accountant="closed form (moments accountant)",
            source="Zhao et al., DP-Ditto, Eqns 7–8",
            conditions=(
                Condition(
                    f"1/N is a sampling rate (q = 1/{num_clients}; every client takes part in "
                    "every round, so q = 1)",
                    num_clients == 1,
                ),
                Condition(
                    f"one record moves a clipped local model by at most 2C/|D_n| = {claimed:.4g} "
                    f"(what holds is {sensitivity:.4g})",
                    sensitivity <= claimed,
                ),
                Condition(
                    f"the closed form covers qT Gaussians of its own sensitivity (exactly ε = "
                    f"{thinned:.4g}, claimed {published:.4g})",
                    thinned <= published,
                ),
            ),
        ),
        claims.provable(AdversaryView.EACH_UPLOAD, loss, f"{rounds} uploads, {source}"),
    ]


def _moved(clip: float, num_examples: int, steps: ClippedSteps | None) -> tuple[float, str]:
    """Return how far one record moves an upload, with the reason. Clipping projects onto a ball."""
    if steps is not None:
        steps.require_examples(num_examples)
    ball = 2 * clip
    if steps is None or steps.upload_sensitivity >= ball:
        return ball, f"sensitivity 2C = {ball:.4g}"
    bound = "2ηG/B" if steps.local_steps == 1 else "2KηG (K steps without noise)"
    return steps.upload_sensitivity, f"sensitivity {bound} = {steps.upload_sensitivity:.4g}"
