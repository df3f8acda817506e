"""Units, bounds, noise, accounting, plans, guarantees and ledger; needs neither torch nor Flower.

This package exports the names that projects, apps and methods use. Import all other names from
their modules.
"""

from flower_ext.privacy.accounting.accountant import privacy_loss_of
from flower_ext.privacy.accounting.calibration import TargetOutOfReach, calibrate_noise_multiplier
from flower_ext.privacy.accounting.events import Release
from flower_ext.privacy.accounting.gaussian import gaussian_loss
from flower_ext.privacy.accounting.group_privacy import DpSgd
from flower_ext.privacy.accounting.sampling import (
    FixedSizeSampling,
    FullParticipation,
    PoissonSampling,
    Sampling,
    SpacedSampling,
    size_for_rate,
)
from flower_ext.privacy.base_plan import NonPrivatePlan, PrivacyPlan
from flower_ext.privacy.guarantee import Condition, Guarantee, epsilon_text
from flower_ext.privacy.ledger import Budget, BudgetExhausted, Ledger, LedgerCorrupt
from flower_ext.privacy.mechanisms.adaptive_clipping import AdaptiveClipping
from flower_ext.privacy.mechanisms.bounds import clip
from flower_ext.privacy.mechanisms.correlated_noise import CorrelatedNoise
from flower_ext.privacy.mechanisms.noise import NoiseSource, SecureNoise, SeededNoise
from flower_ext.privacy.mechanisms.protections import ObjectivePerturbation, OutputPerturbation
from flower_ext.privacy.mechanisms.secure_sum import SecureSum
from flower_ext.privacy.mechanisms.updates import NonFiniteUpdate
from flower_ext.privacy.plans.group_plan import GroupPlan
from flower_ext.privacy.plans.perturbation_plan import PerturbationPlan
from flower_ext.privacy.plans.record_level_plan import RecordLevelPlan
from flower_ext.privacy.plans.release_plan import ReleasePlan
from flower_ext.privacy.queries.secure_scores import SecureScores
from flower_ext.privacy.queries.vector_query import VectorQuery
from flower_ext.privacy.randomness import secure_generator, seeded_generator
from flower_ext.privacy.theorems.dp_ditto_theorem import ClippedSteps
from flower_ext.privacy.theorems.upcycled_theorem import LocalObjective
from flower_ext.privacy.units import AdversaryView, NeighboringRelation, PrivacyUnit

__all__ = [
    "AdaptiveClipping",
    "AdversaryView",
    "Budget",
    "BudgetExhausted",
    "ClippedSteps",
    "Condition",
    "CorrelatedNoise",
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
    "SpacedSampling",
    "TargetOutOfReach",
    "VectorQuery",
    "calibrate_noise_multiplier",
    "clip",
    "epsilon_text",
    "gaussian_loss",
    "privacy_loss_of",
    "secure_generator",
    "seeded_generator",
    "size_for_rate",
]
