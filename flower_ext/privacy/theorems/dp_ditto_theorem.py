"""Record-level DP of DP-Ditto, whose clients upload the whole local model in every round.

Source: Zhao et al., Convergence-Privacy-Fairness Trade-Off in Personalized Federated Learning.

====================  =====================================================
paper                 here
====================  =====================================================
C                     ``clipping_norm`` of the local model
σ_u                   ``noise_stddev`` of each weight of an upload, or `ClippedSteps.upload_stddev`
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
without amplification. The module returns guarantees in pairs: first the guarantee as
published, then the provable one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flower_ext.checks import (
    Checked,
    Count,
    Positive,
    ProperFraction,
    require_at_least_one,
    require_delta,
    require_positive,
)
from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting.events import PrivacyLoss
from flower_ext.privacy.accounting.gaussian import gaussian_loss
from flower_ext.privacy.accounting.sampling import FullParticipation, Sampling
from flower_ext.privacy.guarantee import Condition, Guarantee
from flower_ext.privacy.theorems.claims import (
    LOADS,
    ON_A_GRID,
    OUTLIVES,
    OWN_GRADIENTS,
    Claims,
    noise_assumption,
)
from flower_ext.privacy.theorems.clipped_steps import ClippedSteps
from flower_ext.privacy.units import AdversaryView, NeighboringRelation, PrivacyUnit


@dataclass(frozen=True, kw_only=True)
class RecordLevelTerms(Checked):
    """The values that a user chooses for a run of noised local models; see `RecordLevelPlan`."""

    sampling: Sampling
    clipping_norm: Positive
    noise_stddev: Positive
    num_examples: Count
    rounds: Count
    delta: ProperFraction
    steps: ClippedSteps | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.sampling, FullParticipation):
            raise InvalidValue(
                f"sampling={self.sampling!r}: expected FullParticipation, because every client "
                "uploads in every round"
            )
        if self.steps is not None:
            self.steps.require_examples(self.num_examples)

    @property
    def upload_stddev(self) -> float:
        """σ_u: stddev of the noise in each weight of an upload, from all ``steps`` together."""
        return self.noise_stddev * (1.0 if self.steps is None else self.steps.upload_stddev(1.0))

    @property
    def upload_sensitivity(self) -> float:
        """Largest L2 distance by which replacing one record moves an upload without noise."""
        diameter = 2 * self.clipping_norm  # of the ball of clipped models
        return diameter if self.steps is None else min(diameter, self.steps.upload_sensitivity)


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
    require_positive("epsilon", epsilon)
    require_delta(delta)
    require_at_least_one("rounds", rounds)
    require_at_least_one("num_clients", num_clients)
    require_at_least_one("num_examples", num_examples)
    require_positive("clipping_norm", clipping_norm)
    sensitivity = 2 * clipping_norm / num_examples
    return sensitivity * math.sqrt(2 * rounds * math.log(1 / delta) / num_clients) / epsilon


def dp_ditto_guarantees(
    terms: RecordLevelTerms,
    *,
    rounds: int,
    secure_noise: bool = True,
    not_covered: Sequence[str] = (),
) -> list[Guarantee]:
    """Return the guarantees for one record when clients upload clipped models in every round.

    The first guarantee is the published one, and the second is the provable one. ``rounds`` is the
    number of rounds so far.

    Without ``terms.steps``, a client adds noise to each upload. One record may then move the upload
    by 2C, because only the clipping of the whole model limits its influence. With ``terms.steps``,
    each local step clips every record's gradient and adds noise.
    """
    claims = Claims(
        unit=PrivacyUnit.RECORD,
        relation=NeighboringRelation.REPLACE_ONE,
        delta=terms.delta,
        assumptions=(
            "clients train, clip and add noise as instructed",
            "personal models, and all else that depends on a client's records, stay on the client",
            "the planned rounds and each client's number of examples are public",
            "arithmetic in floating point stays within the margins of clipping",
            *(() if terms.steps is None else (OWN_GRADIENTS,)),
            LOADS,
            OUTLIVES,
            ON_A_GRID,
            noise_assumption(secure_noise),
        ),
        not_covered=not_covered,
    )
    return [
        claims.published(AdversaryView.EACH_UPLOAD, **_eqns_7_8(terms, rounds)),
        claims.provable(AdversaryView.EACH_UPLOAD, *_provable_bound(terms, rounds)),
    ]


def _eqns_7_8(terms: RecordLevelTerms, rounds: int) -> dict[str, Any]:
    """Return ε of Eqns 7–8, as published, with its source and its conditions."""
    clients, moved = terms.sampling.population, terms.upload_sensitivity
    claimed = 2 * terms.clipping_norm / terms.num_examples
    # By Eqns 7–8 ε is inversely proportional to the noise, so the noise for ε = 1 gives every ε.
    for_one = dp_ditto_noise_stddev(
        epsilon=1.0,
        delta=terms.delta,
        rounds=rounds,
        num_clients=clients,
        num_examples=terms.num_examples,
        clipping_norm=terms.clipping_norm,
    )
    epsilon, multiplier = for_one / terms.upload_stddev, terms.upload_stddev / claimed
    # The published proof assumes that sampling with q = 1/N reduces T releases to qT.
    thinned = gaussian_loss(multiplier, releases=rounds / clients, delta=terms.delta).epsilon
    conditions = (
        Condition(
            f"1/N is a sampling rate (q = 1/{clients}; every client takes part in every round, so "
            "q = 1)",
            clients == 1,
        ),
        Condition(
            f"one record moves a clipped local model by at most 2C/|D_n| = {claimed:.4g} (what "
            f"holds is {moved:.4g})",
            moved <= claimed,
        ),
        Condition(
            "the closed form covers qT Gaussians of its own sensitivity (exactly ε = "
            f"{thinned:.4g}, claimed {epsilon:.4g})",
            thinned <= epsilon,
        ),
    )
    return {
        "epsilon": epsilon,
        "accountant": "closed form (moments accountant)",
        "source": "Zhao et al., DP-Ditto, Eqns 7–8",
        "conditions": conditions,
    }


def _provable_bound(terms: RecordLevelTerms, rounds: int) -> tuple[PrivacyLoss, str]:
    """Return the provable bound: for noised steps if ``terms.steps`` is given, else for uploads."""
    steps, stddev, moved = terms.steps, terms.noise_stddev, terms.upload_sensitivity
    if steps is None:
        loss = gaussian_loss(stddev / moved, releases=rounds, delta=terms.delta)
        source = f"{rounds} uploads, sensitivity 2C = {moved:.4g}"
    else:
        loss = steps.loss(stddev, delta=terms.delta, rounds=rounds)
        source = (
            f"{rounds} rounds of {steps.local_steps} noised steps, {steps.uses_per_round} of them "
            f"with any one record, sensitivity 2ηG/B = {steps.sensitivity:.4g} of a step"
        )
    return loss, source
