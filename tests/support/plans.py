"""Plans of a small federation."""

from flower_ext.privacy import ClippedSteps, PoissonSampling, ReleasePlan


def plan(sampling=None, **changes) -> ReleasePlan:
    facts = {
        "sampling": sampling or PoissonSampling(100, 0.1),
        "clipping_norm": 0.1,
        "noise_multiplier": 1.2,
        "rounds": 60,
        "delta": 1e-2,
    }
    return ReleasePlan(**{**facts, **changes})


def steps(**changes) -> ClippedSteps:
    facts = {"learning_rate": 0.1, "gradient_clipping_norm": 2.0, "num_examples": 50}
    return ClippedSteps(**{**facts, **changes})
