"""Units, bounds, noise, accounting, plans, guarantees and ledger; without torch and Flower.

This package exports the names that projects, apps and methods use. Import all other names from
their modules.
"""

from typing import TYPE_CHECKING

from flower_ext._former import former_names
from flower_ext.privacy.accounting import Release, gaussian_loss, privacy_loss, privacy_loss_of
from flower_ext.privacy.bounds import clip
from flower_ext.privacy.calibration import TargetOutOfReach, calibrate_noise_multiplier
from flower_ext.privacy.clipped_steps import ClippedSteps
from flower_ext.privacy.group_plan import GroupPlan
from flower_ext.privacy.group_privacy import DpSgd
from flower_ext.privacy.guarantee import Condition, Guarantee, epsilon_text
from flower_ext.privacy.ledger import Budget, BudgetExhausted, Ledger, LedgerCorrupt
from flower_ext.privacy.noise import NoiseSource, SecureNoise, SeededNoise
from flower_ext.privacy.perturbation import ObjectivePerturbation, OutputPerturbation
from flower_ext.privacy.perturbation_plan import PerturbationPlan
from flower_ext.privacy.plan import NonPrivatePlan, PrivacyPlan
from flower_ext.privacy.randomness import secure_generator, seeded_generator
from flower_ext.privacy.record_level_plan import RecordLevelPlan
from flower_ext.privacy.release_plan import ReleasePlan
from flower_ext.privacy.sampling import (
    FixedSizeSampling,
    FullParticipation,
    PoissonSampling,
    Sampling,
    size_for_rate,
)
from flower_ext.privacy.secure_scores import SecureScores
from flower_ext.privacy.secure_sum import SecureSum
from flower_ext.privacy.theorems.local_objective import LocalObjective
from flower_ext.privacy.units import AdversaryView, NeighboringRelation, PrivacyUnit
from flower_ext.privacy.updates import NonFiniteUpdate

__all__ = [
    "AdversaryView",
    "Budget",
    "BudgetExhausted",
    "ClippedSteps",
    "Condition",
    "DpSgd",
    "FixedSizeSampling",
    "FullParticipation",
    "GroupPlan",
    "Guarantee",
    "Ledger",
    "LedgerCorrupt",
    "LocalObjective",
    "NeighboringRelation",
    "NoiseSource",
    "NonFiniteUpdate",
    "NonPrivatePlan",
    "ObjectivePerturbation",
    "OutputPerturbation",
    "PerturbationPlan",
    "PoissonSampling",
    "PrivacyPlan",
    "PrivacyUnit",
    "RecordLevelPlan",
    "Release",
    "ReleasePlan",
    "Sampling",
    "SecureNoise",
    "SecureScores",
    "SecureSum",
    "SeededNoise",
    "TargetOutOfReach",
    "calibrate_noise_multiplier",
    "clip",
    "epsilon_text",
    "gaussian_loss",
    "privacy_loss",
    "privacy_loss_of",
    "secure_generator",
    "seeded_generator",
    "size_for_rate",
]

_MOVED = {
    name: f"{__name__}.{module}.{name}"
    for module, names in {
        "accounting": "Accountant PrivacyLoss participations_loss",
        "bounds": "BoundedSum BoundedUpdate clip_each_row sum_clipped sum_clipped_rows",
        "calibration": "calibrate_rounds calibrate_sampling_rate default_relation",
        "client_level": "check_client_plan client_level_guarantees",
        "clipped_steps": (
            "clipped_steps_epsilon clipped_steps_guarantee clipped_steps_noise_stddev "
            "composed_epsilon composed_noise_stddev"
        ),
        "group_privacy": "group_loss",
        "guarantee": "PreconditionFailed",
        "ledger": "LedgerLocked Reservation",
        "noise": "largest_noised_norm noise_grid",
        "participations": "Participations",
        "perturbation": "Perturbation",
        "randomness": "derived_seed",
        "plan": "Aggregate RoundDiscarded",
        "sampling": "sampling_from_dict sampling_to_dict",
        "shared_ledger": (
            "Charge DoesNotCompose RunSpend charge note_uncovered spent_by_run total_spent"
        ),
        "theorems.dp2_fedsam": (
            "dp2_fedsam_theorem2 dp2_fedsam_theorem2_noise_multiplier theorem2_of_plan"
        ),
        "theorems.dp_ditto": "dp_ditto_epsilon dp_ditto_guarantees dp_ditto_noise_stddev",
        "theorems.silos": "company_assumption",
        "theorems.uldp": (
            "SECURE_SUM Weighting check_user_plan uldp_avg_guarantees uldp_closed_form "
            "uldp_naive_guarantees"
        ),
        "theorems.uldp_group": "uldp_group_guarantees",
        "theorems.upcycled": ("perturbation_guarantees upcycled_theorem_6_2 upcycled_theorem_6_3"),
        "updates": "Update l2_norm",
    }.items()
    for name in names.split()
} | {"Plan": f"{__name__}.plan.PrivacyPlan"}
"""Full paths of names that this package exported before, kept for one release."""

if not TYPE_CHECKING:  # so that type checkers refuse them
    __getattr__ = former_names(__name__, _MOVED)
