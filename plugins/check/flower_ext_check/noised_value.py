"""The value to which a mechanism adds Gaussian noise, and how far one unit moves this value."""

import math
from dataclasses import dataclass

from flower_ext.privacy import OutputPerturbation, PerturbationPlan, RecordLevelPlan
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.mechanisms.round_mechanism import RoundMechanism
from flower_ext.privacy.plans.release_mechanism import SpacedRelease
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.privacy.theorems.dp_ditto_theorem import noised_values
from flower_ext.privacy.theorems.upcycled_theorem import clipped_model_sensitivity


@dataclass(frozen=True, kw_only=True)
class NoisedValue:
    """A value that gets Gaussian noise: a sum, a client's upload, or one step of its training."""

    clipping_norm: float
    """Bound on each update, or on each model, that clients send."""
    sensitivity: float
    """Largest L2 distance by which one unit moves the value."""
    stddev: float
    """Standard deviation of the noise in each coordinate of the value."""
    upload_stddev: float
    """Stddev of the noise in one upload; 0 if the server adds the noise, or sees only sums."""
    per_round: int = 1
    """Number of such values in a round that depend on the same unit."""


def noised_value(
    mechanism: RoundMechanism, run: RunSummary, cohort_size: int
) -> NoisedValue | None:
    """Return the value that gets the round's noise; None if no value gets Gaussian noise.

    ``cohort_size`` is the number of clients that the round asks.
    """
    if isinstance(mechanism, NoisedSum):
        return _sum_of_uploads(mechanism, cohort_size)
    if isinstance(mechanism, RecordLevelPlan):
        return _model_or_step(mechanism)
    if isinstance(mechanism, PerturbationPlan):
        return _perturbed_model(mechanism, run)
    return None


def _sum_of_uploads(mechanism: NoisedSum, cohort_size: int) -> NoisedValue:
    """Return the sum of the cohort's uploads.

    Under a `SpacedRelease`, the first round stands for the run, because later noise depends on the
    noise of earlier rounds. The noise multiplier of the returned value equals that of the run.
    """
    stddev = mechanism.noise_stddev
    moved = mechanism.clipping_norm * mechanism.sensitivity
    if isinstance(mechanism, SpacedRelease):
        stddev *= float(mechanism.strategy.inverse(1)[0])
        moved = stddev * mechanism.sensitivity / mechanism.noise_multiplier
    seen = mechanism.secure_sum is None
    return NoisedValue(
        clipping_norm=mechanism.clipping_norm,
        sensitivity=moved,
        stddev=stddev,
        upload_stddev=mechanism.client_noise_stddev(cohort_size) if seen else 0.0,
    )


def _model_or_step(plan: RecordLevelPlan) -> NoisedValue:
    """Return a client's model or, if the plan has ``steps``, one of its local steps."""
    moved, uses = noised_values(plan.clipping_norm, plan.steps)
    return NoisedValue(
        clipping_norm=plan.clipping_norm,
        sensitivity=moved,
        stddev=plan.noise_stddev,
        upload_stddev=plan.upload_stddev,
        per_round=uses,
    )


def _perturbed_model(plan: PerturbationPlan, run: RunSummary) -> NoisedValue | None:
    """Return the local model with the largest sensitivity of all clients' models.

    Return None under objective perturbation.
    """
    perturbation, objective = plan.perturbation, plan.objective_in(run)
    if not isinstance(perturbation, OutputPerturbation):
        return None
    sizes = run.num_examples.values()
    moves = [clipped_model_sensitivity(perturbation, objective, size) for size in sizes]
    return NoisedValue(
        clipping_norm=perturbation.clipping_norm,
        sensitivity=max(moves, default=math.inf),
        stddev=perturbation.noise_stddev,
        upload_stddev=perturbation.noise_stddev,
    )
