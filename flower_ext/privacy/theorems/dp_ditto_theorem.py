"""Noise for record-level DP of DP-Ditto: clients upload their local model in every round.

Source: Zhao et al., Convergence-Privacy-Fairness Trade-Off in Personalized Federated Learning.

====================  =====================================================
paper                 here
====================  =====================================================
C                     ``clipping_norm`` of the local model
σ_u                   `RecordLevelTerms.upload_stddev`, of the noise in each weight of an upload
Δs                    published sensitivity of the clipped local model, 2C/|D_n| (Eqn 7)
q, N                  published sampling rate 1/N (Eqn 8), ``num_clients``
T, |D_n|              ``rounds``, ``num_examples``
η_G                   ``ClippedSteps.learning_rate``
λ                     ``global_weight`` of a personal model, which stays on its client without noise
====================  =====================================================

Eqns 7 and 8 ask for σ_u = Δs √(2 q T ln(1/δ)) / ε. Three steps of their derivation do not hold:

1. Every client takes part in every round, so q = 1/N is no sampling rate.
2. One record moves a clipped model by up to 2C, not 2C/|D_n|.
3. The closed form omits the term ε²/(4 ln(1/δ)) of composed Gaussians, which matters at a large ε.

The provable bound clips each record's gradient inside the local steps (`ClippedSteps`). The
Gaussians of all steps compose without amplification, because every client takes part in every round
and the server sees each upload.
"""

import math
from dataclasses import dataclass

from flower_ext.checks import (
    Checked,
    Count,
    ProperFraction,
    Scale,
    require_at_least_one,
    require_delta,
    require_positive,
)
from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting.calibration import calibrate_noise_multiplier
from flower_ext.privacy.accounting.gaussian import gaussian_loss
from flower_ext.privacy.accounting.sampling import FullParticipation, Sampling
from flower_ext.privacy.guarantee import Condition, Guarantee
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.privacy.theorems import assumptions
from flower_ext.privacy.theorems.claims import Claims
from flower_ext.privacy.units import AdversaryView, NeighboringRelation, PrivacyUnit

LARGEST_WEIGHT = 2.0
"""Value of ``global_weight``, λ, at which a personal model equals the global one."""


def check_global_weight(global_weight: float) -> None:
    """Refuse a ``global_weight`` λ outside [0, 2]."""
    if not 0 <= global_weight <= LARGEST_WEIGHT:
        raise InvalidValue(f"global_weight={global_weight!r}: expected λ, a number in [0, 2]")


@dataclass(frozen=True, kw_only=True)
class ClippedSteps(Checked):
    """The local steps of one client in one round, which clip each record's gradient.

    A step moves the model u to u − η (1/B) Σ clip(∇F̂(u; record), G), where F̂ is the loss of a
    record, the sum is over the step's records, and η is η_G. A plan adds noise in every step.
    Without noise in the steps, models of neighbouring data sets may move further apart in every
    step after the first.

    Parameters
    ----------
    learning_rate : float
        Learning rate η_G.
    gradient_clipping_norm : float
        Norm bound G of one record's gradient.
    num_examples : int
        |D_n|, which is public.
    local_steps : int
    batch_size : int, optional
        B: most records per step; by default all records. Smaller batches go through the records
        in passes, in an order that does not depend on the records' content. The last step of a pass
        may have fewer records. Each round begins a new pass.
    """

    learning_rate: Scale
    gradient_clipping_norm: Scale
    num_examples: Count
    local_steps: Count = 1
    batch_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size is not None and not 1 <= self.batch_size <= self.num_examples:
            raise InvalidValue(
                f"batch_size={self.batch_size!r}: expected an integer from 1 to num_examples="
                f"{self.num_examples}"
            )

    @property
    def sensitivity(self) -> float:
        """Largest L2 distance by which replacing one record moves a step that uses it: 2ηG/B."""
        return self._step * 2 / (self.batch_size or self.num_examples)

    @property
    def uses_per_round(self) -> int:
        """Largest number of steps in one round that use the same record."""
        # A pass uses each record once, and a round begins a new pass.
        per_pass = math.ceil(self.num_examples / (self.batch_size or self.num_examples))
        return math.ceil(self.local_steps / per_pass)

    @property
    def upload_sensitivity(self) -> float:
        """Largest L2 distance by which replacing one record moves an upload, if steps add no noise.

        With one step, it is `sensitivity`. After one step, the models of the two data sets differ,
        so all their later gradients may differ. Each step moves each model by at most ηG, so the
        distance is at most 2ηG times the number of steps.
        """
        return self.sensitivity if self.local_steps == 1 else 2 * self.local_steps * self._step

    @property
    def upload_noise(self) -> float:
        """Stddev, in each weight, of the sum of all steps' noise, if each step's stddev is 1.

        If the loss is convex, the upload may carry less noise, because later steps shrink the noise
        of earlier steps.
        """
        return math.sqrt(self.local_steps)

    @property
    def _step(self) -> float:
        return self.learning_rate * self.gradient_clipping_norm


@dataclass(frozen=True, kw_only=True)
class RecordLevelTerms(Checked):
    """The fields of a `RecordLevelPlan` on which ε depends; `RecordLevelPlan` explains them."""

    sampling: Sampling
    clipping_norm: Scale
    noise_stddev: Scale
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
        if self.steps is not None and self.num_examples != self.steps.num_examples:
            raise InvalidValue(
                f"num_examples={self.num_examples!r}: expected {self.steps.num_examples}, as in "
                "ClippedSteps"
            )

    @property
    def upload_stddev(self) -> float:
        """σ_u: stddev of the noise in each weight of an upload, from all ``steps`` together."""
        return self.noise_stddev * (1.0 if self.steps is None else self.steps.upload_noise)

    @property
    def upload_sensitivity(self) -> float:
        """Largest L2 distance by which replacing one record moves an upload without noise."""
        diameter = 2 * self.clipping_norm  # of the ball of clipped models
        return diameter if self.steps is None else min(diameter, self.steps.upload_sensitivity)


def noised_values(clipping_norm: float, steps: ClippedSteps | None) -> tuple[float, int]:
    """Return the sensitivity of a noised value, and how many values of a round may use one record.

    The noised values are local steps or, without ``steps``, whole clipped models. Two clipped
    models may be 2C apart, because clipping only ensures that each has a norm of at most C.
    """
    return (2 * clipping_norm, 1) if steps is None else (steps.sensitivity, steps.uses_per_round)


def record_level_guarantees(terms: RecordLevelTerms, run: RunSummary) -> list[Guarantee]:
    """Return the published and the provable guarantee for one record of any client.

    Both guarantees count one upload of every client in every round.
    """
    steps, rounds = terms.steps, run.participations.rounds
    sensitivity, uses = noised_values(terms.clipping_norm, steps)
    multiplier = terms.noise_stddev / sensitivity
    loss = gaussian_loss(multiplier, releases=rounds * uses, delta=terms.delta)
    claims = Claims(
        unit=PrivacyUnit.RECORD,
        relation=NeighboringRelation.REPLACE_ONE,
        delta=terms.delta,
        assumptions=(
            assumptions.AS_INSTRUCTED,
            "personal models, and all else that depends on a client's records, stay on the client",
            assumptions.PUBLIC_SIZES,
            "arithmetic in floating point stays within the margins of clipping",
            *(() if steps is None else (assumptions.OWN_GRADIENTS,)),
            assumptions.LOADS,
            assumptions.OUTLIVES,
            assumptions.ON_A_GRID,
            assumptions.of_noise(run.secure_noise),
        ),
        not_covered=run.not_covered,
    )
    if steps is None:
        source = f"{rounds} uploads, sensitivity 2C = {sensitivity:.4g}"
    else:
        source = (
            f"{rounds} rounds of {steps.local_steps} noised steps, {uses} of them with any one "
            f"record, sensitivity 2ηG/B = {sensitivity:.4g} of a step"
        )
    provable = claims.provable(AdversaryView.EACH_UPLOAD, loss, source)
    return [_eqns_7_8(terms, claims, rounds), provable]


def _eqns_7_8(terms: RecordLevelTerms, claims: Claims, rounds: int) -> Guarantee:
    clients, sensitivity = terms.sampling.population, terms.upload_sensitivity
    claimed = 2 * terms.clipping_norm / terms.num_examples
    # By Eqns 7–8, noise times ε is constant, so the noise for ε = 1 is this constant.
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
            f"1/N is a sampling rate (q = 1/{clients}; every client takes part in every round, "
            "so q = 1)",
            clients == 1,
        ),
        Condition(
            f"one record moves a clipped local model by at most 2C/|D_n| = {claimed:.4g} (what "
            f"holds is {sensitivity:.4g})",
            sensitivity <= claimed,
        ),
        Condition(
            "the closed form is at least the ε of qT Gaussians with sensitivity 2C/|D_n| "
            f"(exact ε = {thinned:.4g}, closed form {epsilon:.4g})",
            thinned <= epsilon,
        ),
    )
    return claims.published(
        AdversaryView.EACH_UPLOAD,
        epsilon,
        accountant="closed form (moments accountant)",
        source="Zhao et al., DP-Ditto, Eqns 7–8",
        conditions=conditions,
    )


def composed_noise_stddev(
    *, sensitivity: float, epsilon: float, delta: float, releases: int
) -> float:
    """Return the noise stddev with which ``releases`` Gaussians together meet (ε, δ).

    One record moves the mean of each Gaussian by at most ``sensitivity``. The Gaussians compose
    exactly, without amplification. Numerical error can only make the result larger than necessary.
    """
    require_positive("sensitivity", sensitivity)
    require_at_least_one("releases", releases)
    one_release = calibrate_noise_multiplier(
        epsilon=epsilon,
        delta=delta,
        sampling=FullParticipation(1),
        rounds=1,
        relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        tolerance=1e-9,
    )
    return sensitivity * math.sqrt(releases) * one_release


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

    T, N, C and |D_n| are ``rounds``, ``num_clients``, ``clipping_norm`` and ``num_examples``.
    """
    require_positive("epsilon", epsilon)
    require_delta(delta)
    require_at_least_one("rounds", rounds)
    require_at_least_one("num_clients", num_clients)
    require_at_least_one("num_examples", num_examples)
    require_positive("clipping_norm", clipping_norm)
    sensitivity = 2 * clipping_norm / num_examples
    return sensitivity * math.sqrt(2 * rounds * math.log(1 / delta) / num_clients) / epsilon
