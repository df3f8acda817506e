"""Plans and mechanisms of a small federation."""

from dataclasses import replace

from flower_ext.privacy import (
    ClippedSteps,
    FullParticipation,
    PoissonSampling,
    ReleasePlan,
    SecureSum,
)
from flower_ext.privacy.plans.release_mechanism import ReleaseMechanism
from flower_ext.privacy.run_summary import MethodTraits


def plan(sampling=None, **changes) -> ReleasePlan:
    facts = {
        "sampling": sampling or PoissonSampling(100, 0.1),
        "clipping_norm": 0.1,
        "noise_multiplier": 1.2,
        "rounds": 60,
        "delta": 1e-2,
    }
    return ReleasePlan(**{**facts, **changes})


def mechanism(sampling=None, **changes) -> ReleaseMechanism:
    """Return the mechanism of `plan` with the same changes."""
    return plan(sampling, **changes).mechanism()


def mechanism_of(plan: ReleasePlan, *, silos=None, **costs) -> ReleaseMechanism:
    """Return the mechanism of a plan among so many silos, with a protocol's costs in privacy."""
    method = MethodTraits(name="a method", num_silos=silos)
    return replace(plan.mechanism(method), **costs)


def sums_of(*, silos=None, **changes):
    """Return the mechanism of a plan of secure sums; among silos if ``silos`` says how many."""
    facts = {
        "sampling": FullParticipation(100),
        "clipping_norm": 0.5,
        "noise_multiplier": 1.0,
        "rounds": 3,
        "delta": 0.01,
        "noise_placement": SecureSum(),
    }
    return mechanism_of(ReleasePlan(**{**facts, **changes}), silos=silos)


def steps(**changes) -> ClippedSteps:
    facts = {"learning_rate": 0.1, "gradient_clipping_norm": 2.0, "num_examples": 50}
    return ClippedSteps(**{**facts, **changes})
