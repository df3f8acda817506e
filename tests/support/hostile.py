"""Plans and replies for tests of hostile messages."""

from flower_ext.privacy import (
    FullParticipation,
    ReleasePlan,
)
from flower_ext.training import LocalTraining

CLIENTS = 4
FAST = LocalTraining(epochs=1, batch_size=10)


def plan(**changes) -> ReleasePlan:
    facts = {
        "sampling": FullParticipation(CLIENTS),
        "clipping_norm": 0.5,
        "noise_multiplier": 1.0,
        "rounds": 3,
        "delta": 0.1,
    }
    return ReleasePlan(**{**facts, **changes})
