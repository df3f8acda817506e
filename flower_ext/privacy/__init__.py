"""Units, bounds, noise, accounting, ledger and claims. Knows neither torch nor Flower."""

from flower_ext.privacy.accounting import (
    Accountant,
    PrivacyLoss,
    Release,
    gaussian_loss,
    participations_loss,
    privacy_loss,
    privacy_loss_of,
)
from flower_ext.privacy.bounds import (
    BoundedSum,
    BoundedUpdate,
    clip,
    clip_each_row,
    sum_clipped,
    sum_clipped_rows,
)
from flower_ext.privacy.calibration import (
    TargetOutOfReach,
    calibrate_noise_multiplier,
    calibrate_rounds,
    calibrate_sampling_rate,
    default_relation,
)
from flower_ext.privacy.client_level import (
    check_client_plan,
    client_level_guarantees,
)
from flower_ext.privacy.clipped_steps import (
    ClippedSteps,
    clipped_steps_epsilon,
    clipped_steps_guarantee,
    clipped_steps_noise_stddev,
    composed_epsilon,
    composed_noise_stddev,
)
from flower_ext.privacy.group_plan import (
    GroupPlan,
)
from flower_ext.privacy.group_privacy import (
    DpSgd,
    group_loss,
)
from flower_ext.privacy.guarantee import (
    Condition,
    Guarantee,
    PreconditionFailed,
    epsilon_text,
)
from flower_ext.privacy.ledger import (
    Budget,
    BudgetExhausted,
    Ledger,
    LedgerCorrupt,
    LedgerLocked,
    Reservation,
)
from flower_ext.privacy.noise import (
    NoiseSource,
    SecureNoise,
    SeededNoise,
    largest_noised_norm,
    noise_grid,
)
from flower_ext.privacy.participations import (
    Participations,
)
from flower_ext.privacy.perturbation import (
    ObjectivePerturbation,
    OutputPerturbation,
    Perturbation,
)
from flower_ext.privacy.perturbation_plan import (
    PerturbationPlan,
)
from flower_ext.privacy.randomness import (
    derived_seed,
    secure_generator,
    seeded_generator,
)
from flower_ext.privacy.record_level_plan import (
    RecordLevelPlan,
)
from flower_ext.privacy.release_plan import (
    Aggregate,
    NonPrivatePlan,
    ReleasePlan,
    RoundDiscarded,
)
from flower_ext.privacy.sampling import (
    FixedSizeSampling,
    FullParticipation,
    PoissonSampling,
    Sampling,
    sampling_from_dict,
    sampling_to_dict,
    size_for_rate,
)
from flower_ext.privacy.shared_ledger import (
    Charge,
    DoesNotCompose,
    RunSpend,
    charge,
    note_uncovered,
    spent_by_run,
    total_spent,
)
from flower_ext.privacy.theorems.dp2_fedsam import (
    dp2_fedsam_theorem2,
    dp2_fedsam_theorem2_noise_multiplier,
    theorem2_of_plan,
)
from flower_ext.privacy.theorems.dp_ditto import (
    dp_ditto_epsilon,
    dp_ditto_guarantees,
    dp_ditto_noise_stddev,
)
from flower_ext.privacy.theorems.local_objective import (
    LocalObjective,
)
from flower_ext.privacy.theorems.uldp import (
    SECURE_SUM,
    Weighting,
    check_user_plan,
    company_assumption,
    uldp_avg_guarantees,
    uldp_closed_form,
    uldp_naive_guarantees,
)
from flower_ext.privacy.theorems.uldp_group import (
    group_loss_by_conversion,
    group_loss_by_renyi,
    uldp_group_guarantees,
)
from flower_ext.privacy.theorems.upcycled import (
    perturbation_guarantees,
    upcycled_theorem_6_2,
    upcycled_theorem_6_2_delta,
    upcycled_theorem_6_3,
)
from flower_ext.privacy.units import (
    AdversaryView,
    NeighboringRelation,
    PrivacyUnit,
)
from flower_ext.privacy.updates import (
    NonFiniteUpdate,
    Update,
    l2_norm,
)

Plan = ReleasePlan | PerturbationPlan | RecordLevelPlan | GroupPlan | NonPrivatePlan
"""Who takes part in a round, and what protects them."""

__all__ = [
    "SECURE_SUM",
    "Accountant",
    "AdversaryView",
    "Aggregate",
    "BoundedSum",
    "BoundedUpdate",
    "Budget",
    "BudgetExhausted",
    "Charge",
    "ClippedSteps",
    "Condition",
    "DoesNotCompose",
    "DpSgd",
    "FixedSizeSampling",
    "FullParticipation",
    "GroupPlan",
    "Guarantee",
    "Ledger",
    "LedgerCorrupt",
    "LedgerLocked",
    "LocalObjective",
    "NeighboringRelation",
    "NoiseSource",
    "NonFiniteUpdate",
    "NonPrivatePlan",
    "ObjectivePerturbation",
    "OutputPerturbation",
    "Participations",
    "Perturbation",
    "PerturbationPlan",
    "Plan",
    "PoissonSampling",
    "PreconditionFailed",
    "PrivacyLoss",
    "PrivacyUnit",
    "RecordLevelPlan",
    "Release",
    "ReleasePlan",
    "Reservation",
    "RoundDiscarded",
    "RunSpend",
    "Sampling",
    "SecureNoise",
    "SeededNoise",
    "TargetOutOfReach",
    "Update",
    "Weighting",
    "calibrate_noise_multiplier",
    "calibrate_rounds",
    "calibrate_sampling_rate",
    "charge",
    "check_client_plan",
    "check_user_plan",
    "client_level_guarantees",
    "clip",
    "clip_each_row",
    "clipped_steps_epsilon",
    "clipped_steps_guarantee",
    "clipped_steps_noise_stddev",
    "company_assumption",
    "composed_epsilon",
    "composed_noise_stddev",
    "default_relation",
    "derived_seed",
    "dp2_fedsam_theorem2",
    "dp2_fedsam_theorem2_noise_multiplier",
    "dp_ditto_epsilon",
    "dp_ditto_guarantees",
    "dp_ditto_noise_stddev",
    "epsilon_text",
    "gaussian_loss",
    "group_loss",
    "group_loss_by_conversion",
    "group_loss_by_renyi",
    "l2_norm",
    "largest_noised_norm",
    "noise_grid",
    "note_uncovered",
    "participations_loss",
    "perturbation_guarantees",
    "privacy_loss",
    "privacy_loss_of",
    "sampling_from_dict",
    "sampling_to_dict",
    "secure_generator",
    "seeded_generator",
    "size_for_rate",
    "spent_by_run",
    "sum_clipped",
    "sum_clipped_rows",
    "theorem2_of_plan",
    "total_spent",
    "uldp_avg_guarantees",
    "uldp_closed_form",
    "uldp_group_guarantees",
    "uldp_naive_guarantees",
    "upcycled_theorem_6_2",
    "upcycled_theorem_6_2_delta",
    "upcycled_theorem_6_3",
]
