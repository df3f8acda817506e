"""Plans and mechanisms of a small federation."""

from dataclasses import replace
from typing import Any

from flower_ext.privacy import (
    AdaptiveClipping,
    ClippedSteps,
    FullParticipation,
    PoissonSampling,
    ReleasePlan,
    SecureSum,
)
from flower_ext.privacy.accounting.sampling import Sampling
from flower_ext.privacy.plans.release_mechanism import ReleaseMechanism
from flower_ext.privacy.run_summary import MethodTraits


def release_plan(clients: int, sampling: Sampling | None = None, **changes: Any) -> ReleasePlan:
    """Return a plan in which all clients take part, if ``sampling`` does not draw some of them.

    ``changes`` replace its other fields.
    """
    fields = {
        "sampling": sampling or FullParticipation(clients),
        "clipping_norm": 0.5,
        "noise_multiplier": 1.0,
        "rounds": 3,
        "delta": 0.1,
    }
    return ReleasePlan(**{**fields, **changes})


def plan(sampling: Sampling | None = None, **changes: Any) -> ReleasePlan:
    fields = {"clipping_norm": 0.1, "noise_multiplier": 1.2, "rounds": 60, "delta": 1e-2}
    return release_plan(100, sampling or PoissonSampling(100, 0.1), **{**fields, **changes})


def mechanism(sampling=None, **changes) -> ReleaseMechanism:
    """Return the mechanism of `plan` with the same changes."""
    return plan(sampling, **changes).mechanism()


def mechanism_of(plan: ReleasePlan, *, silos=None, **costs) -> ReleaseMechanism:
    """Return the mechanism of a plan among so many silos, with a protocol's costs in privacy."""
    method = MethodTraits(name="a method", num_silos=silos)
    return replace(plan.mechanism(method), **costs)


def sums_of(*, silos=None, **changes):
    """Return the mechanism of a plan of secure sums; among silos if ``silos`` says how many."""
    fields = {"delta": 0.01, "noise_placement": SecureSum(), **changes}
    return mechanism_of(release_plan(100, **fields), silos=silos)


def steps(**changes) -> ClippedSteps:
    facts = {"learning_rate": 0.1, "gradient_clipping_norm": 2.0, "num_examples": 50}
    return ClippedSteps(**{**facts, **changes})


def quiet_clipping(**changes) -> AdaptiveClipping:
    """Return an adaptive norm whose counts have next to no noise."""
    return AdaptiveClipping(
        **{"initial_norm": 1.0, "count_noise_stddev": 0.05, "learning_rate": 0.5, **changes}
    )
