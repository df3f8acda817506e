"""Units, bounds, noise, accounting, ledger and claims. Knows neither torch nor Flower."""

from flower_ext.privacy.accounting import (
    Accountant,
    PrivacyLoss,
    Release,
    participations_loss,
    privacy_curve,
    privacy_loss,
    privacy_loss_of,
)
from flower_ext.privacy.bounds import (
    BoundedSum,
    BoundedUpdate,
    NonFiniteUpdate,
    Update,
    clip,
    l2_norm,
    sum_bounded,
)
from flower_ext.privacy.calibration import (
    TargetOutOfReach,
    calibrate_noise_multiplier,
    calibrate_rounds,
    calibrate_sampling_rate,
    default_relation,
)
from flower_ext.privacy.claims import (
    Condition,
    Guarantee,
    client_level_guarantees,
    dp2_fedsam_theorem2,
    dp2_fedsam_theorem2_noise_multiplier,
    theorem2_of_plan,
)
from flower_ext.privacy.ledger import (
    Budget,
    BudgetExhausted,
    Ledger,
    LedgerCorrupt,
    LedgerLocked,
    Reservation,
)
from flower_ext.privacy.noise import NoiseSource, SecureNoise, SeededNoise
from flower_ext.privacy.participations import Participations
from flower_ext.privacy.plan import Aggregate, NonPrivatePlan, ReleasePlan, RoundDiscarded
from flower_ext.privacy.randomness import secure_generator, seeded_generator
from flower_ext.privacy.sampling import (
    FixedSizeSampling,
    FullParticipation,
    PoissonSampling,
    Sampling,
    sampling_from_dict,
    sampling_to_dict,
    size_for_rate,
)
from flower_ext.privacy.units import AdversaryView, NeighboringRelation, PrivacyUnit

__all__ = [
    "Accountant",
    "AdversaryView",
    "Aggregate",
    "BoundedSum",
    "BoundedUpdate",
    "Budget",
    "BudgetExhausted",
    "Condition",
    "FixedSizeSampling",
    "FullParticipation",
    "Guarantee",
    "Ledger",
    "LedgerCorrupt",
    "LedgerLocked",
    "NeighboringRelation",
    "NoiseSource",
    "NonFiniteUpdate",
    "NonPrivatePlan",
    "Participations",
    "PoissonSampling",
    "PrivacyLoss",
    "PrivacyUnit",
    "Release",
    "ReleasePlan",
    "Reservation",
    "RoundDiscarded",
    "Sampling",
    "SecureNoise",
    "SeededNoise",
    "TargetOutOfReach",
    "Update",
    "calibrate_noise_multiplier",
    "calibrate_rounds",
    "calibrate_sampling_rate",
    "client_level_guarantees",
    "clip",
    "default_relation",
    "dp2_fedsam_theorem2",
    "dp2_fedsam_theorem2_noise_multiplier",
    "l2_norm",
    "participations_loss",
    "privacy_curve",
    "privacy_loss",
    "privacy_loss_of",
    "sampling_from_dict",
    "sampling_to_dict",
    "secure_generator",
    "seeded_generator",
    "size_for_rate",
    "sum_bounded",
    "theorem2_of_plan",
]
